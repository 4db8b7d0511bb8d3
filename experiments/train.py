"""Train a model and see what a loss does to it: `uv run experiments/train.py loss=focal model=resnet50`.

Every word is a Hydra override of conf/: a group's option (loss=ce) or one setting (optim.lr=3e-4); `--help` lists them.
"""

import os
import subprocess
import sys
import time

from lab.errors import UserError
from lab.settings import ROOT, Settings, absolute, combinations, help_text, load


def main(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(help_text("experiments/train.py"))
        return 0
    try:
        if {"-m", "--multirun"} & set(words):
            return run_all(combinations([word for word in words if word not in ("-m", "--multirun")]))
        settings = load([word for word in words if word != "--cfg"])
        if "--cfg" in words:
            import yaml

            print(yaml.safe_dump(settings.tree(), sort_keys=False), end="")
            return 0
        return train(settings)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run_all(runs: list[list[str]]) -> int:
    """Check every combination first, then run them one after another; the status is that of the first that failed."""
    for words in runs:
        load(words)
    status = 0
    for number, words in enumerate(runs, start=1):
        print(f"run {number}/{len(runs)}: {' '.join(words)}", flush=True)
        status = subprocess.run([sys.executable, __file__, *words]).returncode or status
    return status


def train(settings: Settings) -> int:
    """One run, from checked settings to the final table."""
    began = time.monotonic()
    config = settings.config
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    from lab.models import check_model_name, model_norm
    from lab.optim import check_optimizer_name

    check_model_name(config.model.name)
    check_optimizer_name(config.optim.name)

    from lab.console import Console, clock
    from lab.data import load_data
    from lab.guard import NonFiniteError
    from lab.kernels_used import KernelsUsed
    from lab.machine import SystemSampler, describe, pick_device, seed_all
    from lab.run_folder import RunFolder
    from lab.tasks import Classification
    from lab.tracking import Feeder, tracking_uri
    from lab.trainer import Trainer

    device = pick_device(config.trainer.device)
    seed_all(config.trainer)
    data = load_data(config.data, model_norm(config.model), device, config.trainer.seed)
    task = Classification(config, data, device)
    trainer = Trainer(config, task, data, task.model(), device, settings.tree())
    kernels = KernelsUsed(config.loss, device)

    name = config.name or f"{config.loss.name}-{config.model.name}-{config.data.name}"
    folder = RunFolder(absolute(config.trainer.runs, ROOT / "runs"), name, settings.tree())
    folder.record("start", name=name, params=settings.flat(), tags=describe(device) | kernels.tags() | config.tracking.tags)
    folder.artifact(folder.path / "config.yaml")
    feeder = None
    if config.tracking.enabled:
        uri = tracking_uri(config.tracking)
        feeder = Feeder(folder.path, uri, config.tracking.experiment, config.tracking.patience_seconds)
        feeder.start()
    sampler = SystemSampler(folder, config.tracking.system_seconds, device)
    sampler.start()
    console = Console(trainer.updates)
    console.say(f"{name}: {data.train.samples} training and {data.val.samples} held-out samples on {device}, loss by {kernels.backend}")

    status, failure = "FAILED", None
    try:
        trainer.fit(folder, console)
        status = "FINISHED"
    except NonFiniteError as error:
        failure = error
    except KeyboardInterrupt:
        status = "KILLED"
    finally:
        console.stop_bar()
        sampler.stop()
        values = trainer.finish() | kernels.counts()
        values["run/seconds"] = time.monotonic() - began
        folder.metrics(trainer.done, kernels.counts() | {"run/seconds": values["run/seconds"]})
        folder.close(status)
        untracked = feeder.close() if feeder else None

    best = f"{values.get('best/top1', float('nan')):.2%} (best, epoch {values['best/epoch']:.0f} of {config.trainer.epochs})"
    rows = {
        "held-out top-1": best,
        "held-out top-5": f"{values.get('best/top5', float('nan')):.2%}",
        "calibration error": f"{values.get('best/ece', float('nan')):.4f}",
        "loss": f"train {values.get('train/loss', float('nan')):.4f}, held-out {values.get('val/loss', float('nan')):.4f}",
        "images/s": f"{values['run/images_per_second']:,.0f}" if "run/images_per_second" in values else "too short a run to tell",
        "loss forward + backward": f"{values.get('train/loss_ms', float('nan')):.3f} ms by {kernels.summary()}",
        "skipped updates": f"{values.get('train/nonfinite_updates', 0):.0f} without a finite loss",
        "time": clock(values["run/seconds"]),
        "run folder": os.path.relpath(folder.path),
    }
    if feeder:
        rows["MLflow"] = f"incomplete: {untracked}" if untracked else f"{feeder.uri}, run {feeder.run_id}"
    console.table(f"{name}: {status.lower()}", rows)
    if failure:
        print(f"error: {failure}", file=sys.stderr)
    return {"FINISHED": 0, "KILLED": 130}.get(status, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Train a model and see what a loss does to it: `uv run experiments/train.py loss=focal model=resnet50`.

Every word is a Hydra override of conf/: a group's option (loss=ce) or one setting (optim.lr=3e-4); `--help` lists them.
"""

import os
import signal
import subprocess
import sys
import time
import traceback

from lab.errors import UserError
from lab.settings import ROOT, Settings, absolute, combinations, help_text, load


def main(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(help_text("experiments/train.py"))
        return 0
    try:
        if {"-m", "--multirun"} & set(words):
            if "--cfg" in words:
                raise UserError("--cfg prints the settings of one run: give it without -m and with one value a setting.")
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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # trainer.deterministic needs it, set before CUDA starts

    from lab.models import check_model_name

    check_model_name(config.model.name)

    from lab.assemble import assemble
    from lab.console import Console
    from lab.failures import explained
    from lab.kernels_used import KernelsUsed
    from lab.machine import SystemSampler, describe
    from lab.run_folder import RunFolder
    from lab.summary import rows
    from lab.tracking import Feeder, tracking_uri

    with explained(config):
        trainer = assemble(settings)
    kernels = KernelsUsed(config.loss, trainer.device)

    name = config.name or f"{config.loss.title}-{config.model.title}-{config.data.name}"
    folder = RunFolder(absolute(config.trainer.runs, ROOT / "runs"), name, settings.tree())
    folder.record("start", name=name, params=settings.flat(), tags=describe(trainer.device) | kernels.tags() | config.tracking.tags)
    folder.artifact(folder.path / "config.yaml")
    console = Console(trainer.updates)
    feeder = None
    if config.tracking.enabled:
        uri = tracking_uri(config.tracking)
        feeder = Feeder(folder.path, uri, config.tracking.experiment, config.tracking.patience_seconds, say=console.say)
        feeder.start()
    sampler = SystemSampler(folder, config.tracking.system_seconds, trainer.device)
    sampler.start()
    samples = f"{trainer.data.train.samples} training and {trainer.data.val.samples} held-out samples"
    console.say(f"{name}: {samples} on {trainer.device}, loss by {kernels.backend}")

    status, figures = "FAILED", {}
    failure: BaseException | None = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with explained(config, trainer, folder):
            trainer.fit(folder, console)
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
    except Exception as error:
        failure = error
    console.stop_bar()
    sampler.stop()
    try:
        figures = trainer.finish() | kernels.counts() | {"run/seconds": time.monotonic() - began}
        folder.metrics(trainer.done, figures)
    except (Exception, KeyboardInterrupt) as error:
        status, failure = "FAILED", failure or error
    if failure:
        folder.record("tags", values={"error": f"{type(failure).__name__}: {failure}"})
    folder.close(status)
    untracked = feeder.close() if feeder else None

    table = rows(trainer, kernels, trainer.values | figures) | {"run folder": os.path.relpath(folder.path)}
    if feeder:
        table["MLflow"] = f"incomplete: {untracked}" if untracked else f"{feeder.uri}, run {feeder.run_id}"
    console.table(f"{name}: {status.lower()}", table)
    if failure:
        report(failure)
    return {"FINISHED": 0, "KILLED": 130}.get(status, 1)


def report(failure: BaseException) -> None:
    """A stop that the trainer chose needs its message alone; a fault needs its place as well."""
    from lab.guard import NonFiniteError

    if isinstance(failure, (NonFiniteError, UserError)):
        print(f"error: {failure}", file=sys.stderr)
    else:
        traceback.print_exception(failure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Train a model and see what a loss does to it: `uv run experiments/train.py loss=focal model=resnet50`.

Every word is a Hydra override of conf/: a group's option (loss=ce) or one setting (optim.lr=3e-4); `--help` lists them.
"""

import os
import sys
from typing import TYPE_CHECKING

from lab.config.errors import UserError
from lab.config.schema import TrainConfig
from lab.config.settings import Settings, help_text, load, value_of
from lab.runs.resume import Earlier, load_state, named, newest
from lab.train.ranks import launched, launched_first, refuse_several

if TYPE_CHECKING:
    from lab.runs.run import Run
    from lab.train.trainer import Trainer


def main(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(help_text("experiments/train.py"))
        return 0
    try:
        if {"-m", "--multirun"} & set(words):
            refuse_several("--multirun")
            if "--cfg" in words:
                raise UserError("--cfg prints the settings of one run: give it without -m and with one value a setting.")
            from lab.sweep.sweep import run_sweep

            return run_sweep([word for word in words if word not in ("-m", "--multirun")])
        settings, earlier = chosen([word for word in words if word != "--cfg"])
        if "--cfg" in words:
            import yaml

            print(yaml.safe_dump(settings.tree(), sort_keys=False), end="")
            return 0
        return train(settings, earlier)
    except UserError as error:
        return refused(error)
    except KeyboardInterrupt:
        return 130


def refused(error: UserError) -> int:
    """Say it once, also where several processes come to the same; the exit status."""
    if launched() == 1:
        print(f"error: {error}", file=sys.stderr)
    else:
        from lab.train.peers import announce

        announce(error, f"error: {error}")
    return 1


def chosen(words: list[str]) -> tuple[Settings[TrainConfig], Earlier | None]:
    """The settings, and the run to go on with, if `resume=` names or finds one."""
    resume = value_of(words, "resume")
    if resume is not None and resume != "auto":
        earlier = named(resume, words)
        return earlier.settings, earlier
    settings = load(words)
    return settings, newest(settings) if resume and launched_first() else None


def train(settings: Settings[TrainConfig], earlier: Earlier | None = None) -> int:
    """One run, or the rest of one, from checked settings to the final table."""
    config = settings.config
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # trainer.deterministic needs it, set before CUDA starts

    from lab.tasks.models import check_model_name

    check_model_name(config.model.name)

    from lab.runs.machine import SystemSampler
    from lab.runs.summary import rows
    from lab.train import distributed
    from lab.train.assemble import assemble
    from lab.train.console import Console
    from lab.train.failures import explained
    from lab.train.follow import follow
    from lab.train.peers import watched

    with explained(config):
        trainer = assemble(settings)
    earlier = distributed.of_first(earlier)
    if not launched_first():
        return follow(trainer, earlier)
    run, name = opened(settings, trainer, earlier)
    sampler = SystemSampler(run.folder, config.tracking.system_seconds, trainer.device)
    sampler.start()
    console = Console(trainer.updates, done=trainer.done)
    samples = f"{trainer.data.train.samples} training and {trainer.data.val.samples} held-out samples"
    console.say(f"{name}: {samples} on {trainer.device}, loss by {trainer.kernels.backend}")
    if launched() > 1:
        console.say(trainer.parallel.says(config.data.batch_size * config.trainer.accumulate))
    if earlier:
        console.say(f"going on with {os.path.relpath(earlier.path)} after update {trainer.done} of {trainer.updates}")
        if run.folder.copy_of:
            console.say(f"it is a copy of {run.folder.copy_of}: it gets a run of its own in MLflow")
    elif config.resume:
        console.say("resume=auto: no unfinished run has these settings; this is a new one")

    if run.feeder:
        run.feeder.say = console.say
    with run.noted(), watched(run.abandon), explained(config, trainer, run.folder):
        trainer.fit(run.folder, console, run.stop)
        distributed.stop()
    run.stop.deaf = launched() > 1  # torchrun stops all when another process has failed
    console.stop_bar()
    sampler.stop()
    figures: dict[str, float] = {}
    if run.status != "KILLED":  # what is killed is to end soon; its figures come when it has gone on to its end
        with run.noted():
            figures = trainer.finish() | trainer.kernels.counts() | {"run/seconds": run.seconds()}
            run.folder.metrics(trainer.done, figures)
    places = run.close()
    console.table(f"{name}: {run.status.lower()}", rows(trainer, trainer.values | figures) | places)
    if run.status == "KILLED":
        console.say(f"to go on: {'torchrun ... ' if launched() > 1 else ''}experiments/train.py resume={places['run folder']}")
    return run.exit_status()


def opened(settings: Settings[TrainConfig], trainer: "Trainer", earlier: Earlier | None) -> "tuple[Run, str]":
    """The run, new or gone on with, and its name; the trainer is put where the run was."""
    from lab.runs.folder import RunFolder
    from lab.runs.machine import describe
    from lab.runs.run import Run, record_start
    from lab.runs.tracking import read_state, tracking_uri
    from lab.train.trainer import restore

    config = settings.config
    name = config.name or f"{config.loss.title}-{config.model.title}-{config.data.name}"
    tags = describe(trainer.device) | trainer.kernels.tags() | {"monitor": trainer.task.monitor}
    if earlier is None:
        return Run.start("train", settings, name, config.trainer.runs, tags), name
    state = load_state(earlier)
    known = state["tracking"] if state else {}
    recorded = {**known, **read_state(earlier.path)}.get("uri")
    uri = tracking_uri(config.tracking, recorded) if config.tracking.enabled else None
    folder = RunFolder.reopen(earlier.path)
    if state is not None:
        restore(trainer, state)
    if earlier.changed:
        folder.write_config(settings.tree())
    if folder.history.start is None:  # it was killed before it could say so
        record_start(folder, "train", settings, name, tags)
    else:
        folder.record("resume", step=trainer.done, tags={"resumed": f"after update {trainer.done}", **earlier.changed})
        folder.artifact(folder.path / "config.yaml")
    return Run(folder, config.tracking, uri, patient=True, known=known), name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

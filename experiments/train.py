"""Train a model and see what a loss does to it: `uv run experiments/train.py loss=focal model=resnet50`.

Every argument is a Hydra override of conf/: a group's option (loss=ce) or one setting (optim.lr=3e-4); `--help` lists them.
"""

if __name__ == "__main__":
    from lab.base.process import start_script

    start_script()

import sys

from lab.base.errors import UserError
from lab.base.paths import absolute
from lab.base.process import ABORTED, launched, refuse_several
from lab.config.command import command, fitted, say_loading, show
from lab.config.help import train_help
from lab.config.settings import value_of
from lab.data.specs import SOURCES
from lab.processes.rank_failures import announce
from lab.run.resume import chosen, recorded_store
from lab.sweep.sweep import run_sweep


def main(argv: list[str]) -> int:
    try:
        given = command(argv, "--multirun")
        if "--help" in given.flags:
            show(fitted(train_help("uv run experiments/train.py", given.overrides)))
            return 0
        if "--cfg" not in given.flags:
            refuse_missing(given.overrides)
        if "--multirun" in given.flags:
            refuse_several("--multirun")
            if "--cfg" in given.flags:
                raise UserError("--cfg prints the settings of one run: give it without -m and with one value a setting.")
            return run_sweep(given.overrides)
        settings, earlier = chosen(given.overrides)
        if "--cfg" in given.flags:
            show(settings.text(recorded_store(earlier) if earlier else None).rstrip("\n"))
            return 0
        say_loading()
        from lab.training.session import run_training  # it loads torch, which --help and a wrong setting do not need

        return run_training(settings, earlier).exit_status
    except UserError as error:
        return refused(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ABORTED


def refuse_missing(overrides: list[str]) -> None:
    """Raise UserError for a file or folder of the data that does not exist, before torch and timm are imported, which takes seconds."""
    spec = SOURCES.get(value_of(overrides, "data") or "")
    for name in spec.existing if spec else ():
        given = value_of(overrides, f"data.{name}")
        if given and not (path := absolute(given, "")).exists():
            raise UserError(f"data.{name}={path}: no such file or folder.")


def refused(error: UserError) -> int:
    """Print the error once, even if several processes meet it; return the exit status."""
    if launched() == 1:
        print(f"error: {error}", file=sys.stderr)
    else:
        announce(error, f"error: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

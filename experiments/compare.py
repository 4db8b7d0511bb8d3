"""Compare finished runs: `uv run experiments/compare.py sweep=<name> baseline=loss=ce`.

Write a table of loss × model with intervals over seeds, tested differences to a baseline, costs and pictures: on the terminal, as CSV and
Markdown, as one HTML page, and in MLflow. `--help` lists the settings.
"""

if __name__ == "__main__":
    from lab.base.process import start_script

    start_script()

import sys
from collections.abc import Callable
from typing import Any

from lab.comparison.app import asked_comparison
from lab.comparison.runs import COMPARE, as_hydra
from lab.config.command import run_app
from lab.config.help import settings_text

HELP = """usage: uv run experiments/compare.py [setting=value ...]
       --cfg            print the resolved settings and stop
       --help           this text

settings, each with its default and what it takes; names and values may be globs, and several stand with commas between:
{settings}

Runs that differ in more than rows, columns and their seed get rows of their own.

examples:
  uv run experiments/compare.py
  uv run experiments/compare.py where=data=digits,trainer.epochs=8 baseline=loss=ce
  uv run experiments/compare.py rows=loss.gamma columns=model where=loss=focal baseline=loss.gamma=0.0 metric=val/loss
  uv run experiments/compare.py experiment=mine tag=host:gpu* goal=min ui=http://127.0.0.1:5000"""


def main(argv: list[str]) -> int:
    return run_app("compare", argv, lambda words: HELP.format(settings=settings_text(COMPARE, [as_hydra(word) for word in words])), _asked)


def _asked(words: list[str]) -> tuple[Any, Callable[[], int]]:
    settings, work = asked_comparison(words)
    return settings, lambda: work().exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

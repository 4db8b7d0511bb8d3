"""Measure losses against what people use today: `uv run experiments/bench.py loss=ce dtype=bf16 contenders=lossforge,torch`.

Every word is a setting; a filter takes names or globs, several with commas. `--help` lists them.
"""

if __name__ == "__main__":
    from lab.base.process import start_script

    start_script()

import sys
from collections.abc import Callable
from typing import Any

from lab.base.errors import unknown
from lab.config.command import run_app
from lab.config.help import settings_text
from lab.config.schema import BenchConfig
from lab.config.settings import BENCH, load_for
from lossforge.bench.cases import CASES, CONTENDERS, DTYPES, SUITES, Case, UnknownNameError, matching, select

FILTERS = ("suite", "loss", "shape", "dtype", "contenders")


def main(argv: list[str]) -> int:
    return run_app("bench", argv, lambda words: help_text(), _asked)


def _asked(words: list[str]) -> tuple[Any, Callable[[], int]]:
    settings = load_for(BENCH, [as_list(word) for word in words])
    cases, names = chosen(settings.config)

    def work() -> int:
        from lab.bench import bench  # it loads torch, which --help and a wrong setting do not need

        return bench(settings, cases, names)

    return settings, work


def as_list(word: str) -> str:
    """Rewrite `loss=ce,focal` as a list in Hydra's grammar."""
    name, _, value = word.partition("=")
    return f"{name}=[{value}]" if name in FILTERS and value and value[0] not in "['\"" else word


def chosen(config: BenchConfig) -> tuple[list[Case], list[str]]:
    """Return the cases and contenders that pass the filters."""
    try:
        names = matching("contenders", config.contenders, CONTENDERS)
        return select(config.suite, config.loss, config.shape, config.dtype), [name for name in CONTENDERS if name in names]
    except UnknownNameError as error:
        raise unknown(f"{error.what}={error.got}", error.got, error.choices, show=100) from None


def help_text() -> str:
    def names(found: Any) -> str:
        return ", ".join(dict.fromkeys(found))

    return "\n".join(
        [
            "usage: uv run experiments/bench.py [filter=name,glob*,... ...] [setting=value ...]",
            "       --cfg            print the resolved settings and stop",
            "       --help           this text",
            "",
            "filters:",
            f"  suite       {names(SUITES)}",
            f"  loss        {names(c.loss for c in CASES)}",
            f"  shape       {names(c.use for c in CASES)};",
            f"              {names(c.size for c in CASES if c.suite != 'scaling')}",
            f"  dtype       {names(DTYPES)}",
            f"  contenders  {names(CONTENDERS)}",
            "",
            "settings, each with its value and what it takes:",
            settings_text(BENCH, []),
            "",
            "examples:",
            "  uv run experiments/bench.py loss=ce dtype=bf16 contenders=lossforge*,torch",
            "  uv run experiments/bench.py suite=scaling",
            "  uv run experiments/bench.py mode=profile loss=focal",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure what results/ holds, and write it there: `uv run measurements/measure.py WHAT [--out FILE] [--commit COMMIT]`.

`--help` lists the measurements, `WHAT --help` says what one of them measures and which further options it has.
"""

import argparse
import ast
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from measuring import ROOT, Request


class Measurement(NamedTuple):
    """A measurement: a function of its name in `module`, which fills a file of results/.

    options: further ones of OPTIONS. gpus: how many it needs without --small.
    """

    module: str
    result: str
    options: tuple[str, ...] = ()
    gpus: int = 1


MEASUREMENTS = {
    "losses": Measurement("measure_losses", "bench-h200.json", ("--losses",)),
    "linear": Measurement("measure_losses", "linear-h200.json", ("--losses",)),
    "objectives": Measurement("measure_losses", "objectives-h200.json"),
    "drafts": Measurement("measure_losses", "drafts-h200.json", ("--losses",)),
    "first_page": Measurement("measure_losses", "first-page-h200.json"),
    "precision": Measurement("measure_precision", "precision-h200.json", ("--small",)),
    "language_model": Measurement("measure_language_model", "language-model.json", ("--small",), gpus=0),
    "training": Measurement("measure_training", "training-h200.json", ("--small",), gpus=0),
    "throughput": Measurement("measure_throughput", "throughput-h100.json", ("--small", "--parts")),
    "detection": Measurement("measure_detection", "detection.json", ("--small", "--parts", "--with"), gpus=0),
    "integrations": Measurement("measure_integrations", "integrations.json", ("--small", "--parts")),
    "recipe": Measurement("measure_recipe", "recipe-h200.json", ("--small",)),
    "effects": Measurement("measure_effects", "effects.json", ("--parts",), gpus=0),
    "several_gpus": Measurement("measure_several_gpus", "several-gpus-h100.json", ("--small",), gpus=2),
    "spread_vocabulary": Measurement("spread_vocabulary", "spread-vocabulary-h200.json", ("--small",), gpus=2),
    "spread_contrastive": Measurement("spread_contrastive", "spread-contrastive-h200.json", ("--small",), gpus=2),
    "spread_trainings": Measurement("spread_trainings", "spread-trainings-h200.json", ("--small", "--parts"), gpus=2),
}
OPTIONS = {
    "--small": {"action": "store_true", "help": "measure little, with or without a GPU: does it work?"},
    "--parts": {"nargs": "+", "default": (), "metavar": "PART", "help": "measure only these, and keep the others of the file"},
    "--losses": {"nargs": "+", "default": (), "metavar": "LOSS", "help": "measure the cases of these losses alone"},
    "--with": {"nargs": "+", "default": (), "metavar": "SETTING", "dest": "settings", "help": "settings of the part `large`"},
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="measurements/measure.py", description="Measure what results/ holds.")
    commands = made.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, each in MEASUREMENTS.items():
        about = ast.get_docstring(ast.parse((ROOT / "measurements" / f"{each.module}.py").read_text(encoding="utf-8"))) or ""
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, description=about, help=about.splitlines()[0], formatter_class=form)
        command.add_argument(
            "--out", type=Path, default=ROOT / "results" / each.result, metavar="FILE", help=f"instead of results/{each.result}"
        )
        command.add_argument("--commit", help="the commit of the sources, where they are not a git checkout")
        for option in each.options:
            command.add_argument(option, **OPTIONS[option])
    return made


def main(arguments: list[str]) -> int:
    given = vars(parser().parse_args(arguments))
    name = given.pop("what")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of trainer.deterministic, read when CUDA starts
    import torch

    from lossforge.bench.run import current_commit

    asked, found = MEASUREMENTS[name], torch.cuda.device_count()
    if found < asked.gpus and not given.get("small"):
        print(f"error: {name} needs {asked.gpus} CUDA GPU{'s' * (asked.gpus > 1)}; torch sees {found}", file=sys.stderr)
        return 1
    module = import_module(asked.module)
    if unknown := [part for part in given.get("parts", ()) if part not in module.PARTS]:
        parser().error(f"--parts {unknown[0]}: unknown; parts are {', '.join(module.PARTS)}")
    return getattr(module, name)(Request(**given | {"commit": given["commit"] or current_commit()}))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "experiments")]
    sys.exit(main(sys.argv[1:]))

"""Measure what results/ holds, and write it there: `uv run measurements/measure.py WHAT [--out FILE] [--commit COMMIT]`.

`--help` lists the measurements, `WHAT --help` says what one of them measures and which further options it has.
"""

import argparse
import ast
import os
import sys
from importlib import import_module
from pathlib import Path

from measuring import ROOT, Request

MEASUREMENTS: dict[str, tuple[str, str, tuple[str, ...], int]] = {
    "losses": ("measure_losses", "bench-h200.json", ("--losses",), 1),
    "linear": ("measure_losses", "linear-h100.json", ("--losses",), 1),
    "objectives": ("measure_losses", "objectives-h200.json", (), 1),
    "precision": ("measure_precision", "precision-h200.json", ("--small",), 1),
    "language_model": ("measure_language_model", "language-model.json", ("--small",), 0),
    "training": ("measure_training", "training-h200.json", ("--small",), 0),
    "throughput": ("measure_throughput", "throughput-h100.json", ("--small", "--parts"), 1),
    "detection": ("measure_detection", "detection.json", ("--small", "--parts", "--with"), 0),
    "integrations": ("measure_integrations", "integrations.json", ("--small", "--parts"), 1),
    "effects": ("measure_effects", "effects.json", ("--parts",), 0),
    "several_gpus": ("measure_several_gpus", "several-gpus-h100.json", ("--small",), 2),
}
"""Of each: the module with a function of this name, the file in results/, further options, and the GPUs that it needs without --small."""
OPTIONS = {
    "--small": {"action": "store_true", "help": "measure little, with or without a GPU: does it work?"},
    "--parts": {"nargs": "+", "default": (), "metavar": "PART", "help": "measure only these, and keep the others of the file"},
    "--losses": {"nargs": "+", "default": (), "metavar": "LOSS", "help": "measure the cases of these losses alone"},
    "--with": {"nargs": "+", "default": (), "metavar": "SETTING", "dest": "settings", "help": "settings of the part `large`"},
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="measurements/measure.py", description="Measure what results/ holds.")
    commands = made.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, result, options, _) in MEASUREMENTS.items():
        about = ast.get_docstring(ast.parse((ROOT / "measurements" / f"{module}.py").read_text(encoding="utf-8"))) or ""
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, description=about, help=about.splitlines()[0], formatter_class=form)
        command.add_argument("--out", type=Path, default=ROOT / "results" / result, metavar="FILE", help=f"instead of results/{result}")
        command.add_argument("--commit", help="the commit of the sources, where they are not a git checkout")
        for option in options:
            command.add_argument(option, **OPTIONS[option])
    return made


def main(arguments: list[str]) -> int:
    given = vars(parser().parse_args(arguments))
    name = given.pop("what")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of trainer.deterministic, read when CUDA starts
    import torch

    from lossforge.bench.run import current_commit

    file, _, _, needed = MEASUREMENTS[name]
    found = torch.cuda.device_count()
    if found < needed and not given.get("small"):
        print(f"error: {name} needs {needed} CUDA GPU{'s' * (needed > 1)}; torch sees {found}", file=sys.stderr)
        return 1
    module = import_module(file)
    if unknown := [part for part in given.get("parts", ()) if part not in module.PARTS]:
        parser().error(f"--parts {unknown[0]}: unknown; parts are {', '.join(module.PARTS)}")
    return getattr(module, name)(Request(**given | {"commit": given["commit"] or current_commit()}))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "experiments")]
    sys.exit(main(sys.argv[1:]))

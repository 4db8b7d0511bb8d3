"""The README's table of losses, made from the registry: `uv run tests/readme_table.py` says whether it is current, `--write` renews it."""

import inspect
import sys
from pathlib import Path

from lossforge.losses.registry import LOSSES, Loss

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- losses: uv run tests/readme_table.py --write -->", "<!-- end of losses -->"
TARGETS = {"elementwise": "dense, class index, mixup pair", "rowwise": "class index, probabilities, mixup pair"}
HEADER = ("`loss=`", "function", "module", "formula", "targets", "template", "in place of")


def formula(loss: Loss) -> str:
    """The formula in the function's docstring: from `L =` to the end of the clause."""
    text = " ".join((inspect.getdoc(loss.function) or "").split())
    start = text.find(" L = ") + 1
    if not start:
        raise ValueError(f"{loss.function.__name__}: its docstring has no formula, L = ...")
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([") - (text[i] in ")]")
        if depth == 0 and text.startswith((", ", "; ", ". ", " with "), i):
            return text[start:i]
    return text[start:].rstrip(".")


def row(loss: Loss) -> list[str]:
    return [
        f"`{loss.name}`",
        f"`{loss.function.__name__}`",
        f"`{loss.module.__name__}`",
        f"`{formula(loss)}`",
        TARGETS[loss.template],
        f"`{loss.template}.py`",
        "" if loss.judge is None else f"`{loss.judge.replace(':', '.')}`",
    ]


def table() -> str:
    rows = [list(HEADER), ["---"] * len(HEADER), *map(row, LOSSES.values())]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in rows)


def renewed(text: str) -> str:
    """A README's text with the table of today's registry."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README.md lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main(words: list[str]) -> int:
    text = README.read_text(encoding="utf-8")
    wanted = renewed(text)
    if words == ["--write"]:
        README.write_text(wanted, encoding="utf-8")
        return 0
    if text != wanted:
        print("README.md: the table of losses is not the registry's; run: uv run tests/readme_table.py --write", file=sys.stderr)
    return int(text != wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The README's tables: losses from the registry, measurements from results/. `--write` renews them; else says whether they are current."""

import inspect
import json
import sys
from pathlib import Path

from lossforge.losses.registry import LOSSES, Loss

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BENCH, TRAINING = ROOT / "results" / "bench-h200.json", ROOT / "results" / "training-h200.json"
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


def markdown(header: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in lines)


def losses() -> str:
    return markdown(HEADER, [row(loss) for loss in LOSSES.values()])


def provenance(found: dict) -> str:
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton"))
    return f"One {found['gpu']}, {versions}, commit {found['commit']}, {found['date']}"


def bench() -> str:
    """Ours beside torch's, one line a case; times of small work by the host's clock."""
    found = json.loads(BENCH.read_text(encoding="utf-8"))
    cases: dict[tuple, dict[str, dict]] = {}
    for each in found["rows"]:
        cases.setdefault((each["case"], tuple(each["shape"]), each["dtype"]), {})[each["contender"]] = each
    large, small = [], []
    for (case, shape, dtype), by in cases.items():
        ours, theirs = by["lossforge"], by["torch"]
        what = [case, "×".join(map(str, shape)), dtype]
        if "host_us" in ours:
            small.append([*what, f"{ours['host_us']:.0f}", f"{theirs['host_us']:.0f}"])
            continue
        ratio = f"{theirs['ms'] / ours['ms']:.1f}"
        share = f"{100 * ours['floor_ms'] / ours['ms']:.0f} %"
        memory = [f"{by[name]['peak_mib']:,.0f}" for name in ("lossforge", "torch")]
        large.append([*what, f"{ours['ms']:.3f}", f"{theirs['ms']:.3f}", ratio, share, *memory])
    work = ("forward + backward", "shape", "dtype")
    header = (*work, "ours, ms", "torch, ms", "times faster", "of the byte floor", "ours, MiB", "torch, MiB")
    return "\n\n".join(
        [
            f"{provenance(found)}; made by `python -m lossforge.bench results/bench-h200.json`, "
            "each value and gradient checked against float64 in the same run. "
            "The floor is the fewest bytes that one launch can move, over the copy rate of that run "
            f"({found['copy_bytes_per_second'] / 1e12:.2f} TB/s); "
            "memory is the peak beyond the logits and targets.",
            markdown(header, large),
            "Small work, where the host is the cost (µs a forward + backward, back to back); there torch's cross entropy is quicker:",
            markdown((*work, "ours, µs", "torch, µs"), small),
        ]
    )


def training() -> str:
    found = json.loads(TRAINING.read_text(encoding="utf-8"))
    rows = [[f"`{each['command']}`", f"{each['top1']:.2f} %", f"{each['seconds']:.0f} s", each["backend"]] for each in found["runs"]]
    parity = [[each["loss"], f"{each['largest_difference']:.1e}", str(each["steps"])] for each in found["parity"]]
    return "\n\n".join(
        [
            f"{provenance(found)}; made by `python results/measure_training.py`: digits, held-out top-1 and time of the whole command.",
            markdown(("`uv run experiments/train.py`", "top-1, last epoch", "time", "loss computed by"), rows),
            "Training losses under ours and torch's, same trainer and seed, fp32 (`model=vit_tiny`): largest relative difference.",
            markdown(("loss", "largest difference", "steps"), parity),
        ]
    )


SECTIONS = {"losses": losses, "bench": bench, "training": training}


def renewed(text: str) -> str:
    """A README's text with the tables of today's registry and results."""
    for name, content in SECTIONS.items():
        begin, end = f"<!-- {name}: uv run tests/readme_tables.py --write -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"README.md lacks the lines {begin} and {end}")
        text = f"{before}{begin}\n\n{content()}\n\n{end}{after}"
    return text


def main(words: list[str]) -> int:
    text = README.read_text(encoding="utf-8")
    wanted = renewed(text)
    if words == ["--write"]:
        README.write_text(wanted, encoding="utf-8")
        return 0
    if text != wanted:
        print("README.md: a table is not what the registry and results/ say; run: uv run tests/readme_tables.py --write", file=sys.stderr)
    return int(text != wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write docs/losses/<family>.md, and with --write the curves of each family, from the registry, the measurements and tools/loss_guide.yaml.

Without --write it says which pages are stale. Pictures are not compared: their last digits depend on the processor.
"""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import tables as results
import torch
import yaml
from tables import FAMILIES, ROOT, family_of, formula, targets_of
from torch import Tensor

from lab.runs.files import save_figure, write_text
from lossforge.bench.report import Row, load, tables
from lossforge.losses import checks
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.templates.docstrings import COMMON, described, sections

DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures" / "losses"
GUIDE = yaml.safe_load((ROOT / "tools" / "loss_guide.yaml").read_text(encoding="utf-8"))
OF_LINEAR = {"rowwise", "elementwise", "divergence"}
POINTS = 161

OF_TORCH = ("size_average", "reduce")
"""torch's older words for the reduction."""


def documented(loss: Loss) -> tuple[str, dict[str, str]]:
    """The docstring's text and its sections."""
    return sections(inspect.getdoc(loss.function) or "")


def example(loss: Loss) -> str:
    first, *code = (line.removeprefix(">>> ") for line in documented(loss)[1]["Examples"].splitlines())
    return "\n".join(["```python", first, "", code[0], "", *code[1:], "```"])


def about(loss: Loss) -> str:
    """What the docstring says between its first line and the arguments."""
    _, *paragraphs = documented(loss)[0].split("\n\n")
    told = (each for each in paragraphs if not each.startswith("Source: "))
    return "\n\n".join(f"```text\n{each}\n```" if each.startswith("L =") or " = " in each.splitlines()[0][:24] else each for each in told)


def arguments(loss: Loss) -> str:
    """A table of the loss's own arguments, and the options that every loss has."""
    signature, defaults = checks.signature(loss.function).parameters, inspect.signature(loss.module).parameters
    meanings = described(documented(loss)[1]["Args"])
    rows, shared = [], []
    for name, text in meanings.items():
        own = name in signature
        default = (signature if own else defaults)[name].default if own or name in defaults else None
        written = "" if default is inspect.Parameter.empty else f"`{default!r}`".replace("'", '"')
        if not own and text == COMMON.get(name, "").replace("\n", "\n    "):
            shared.append(f"`{name}={written.strip('`')}`")
        elif name not in OF_TORCH:
            rows.append([f"`{name}`", written, " ".join(text.split())])
    table = tables.markdown(("argument", "default", "meaning"), rows)
    return f"{table}\n\n[Options of every loss](../reference/options.md): {', '.join(shared)}."


def measured(loss: Loss, rows: list[Row]) -> str:
    """Time and memory beside torch, torch.compile and the best other library."""
    labels = dict.fromkeys(row.label for row in rows if row.loss == loss.name and row.suite in ("table", "losses", "variants"))
    report = load(results.BENCH)
    return tables.short([report], list(labels)) if labels else ""


def effects(loss: Loss) -> str:
    """The runs of results/effects.json under this loss."""
    rows = [row for row in results.effect_rows() if re.search(rf"\bloss={loss.name}\b", row[0])]
    return tables.markdown(results.EFFECT_HEADER, rows) if rows else ""


def links(loss: Loss) -> str:
    judge = (loss.judge or "").replace(":", ".")
    paper = loss.paper
    if paper.startswith("arXiv "):
        paper = f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv ')})"
    elif paper.startswith("doi "):
        paper = f"[{paper}](https://doi.org/{paper.removeprefix('doi ')})"
    facts = {
        "function": f"`{loss.function.__name__}`",
        "module": f"`{loss.module.__name__}`",
        "in place of": f"`{judge}`" if judge and not judge.startswith("lossforge") else "",
        "targets": targets_of(loss),
        "reductions": ", ".join(f"`{each}`" for each in get_args(inspect.signature(loss.function).parameters["reduction"].annotation)),
        "template": f"[{results.folder_of(loss)}](../know/template_{results.folder_of(loss)}.md)",
        "fused with a linear layer": f"`fuse_linear({loss.function.__name__})`"
        if loss.template in OF_LINEAR and loss.domain == "logits"
        else "",
        "paper": paper,
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)


def section(loss: Loss, rows: list[Row]) -> str:
    first = (inspect.getdoc(loss.function) or "").split("\n\n")[0].replace("\n", " ")
    title = re.split(r", as |, for | \(|; |\. |\.$|: ", first)[0]
    guide = GUIDE[loss.name]
    parts = [
        f'<a id="{loss.name}"></a>',
        f"## {title}: `{loss.name}`",
        f"```text\n{formula(loss)}\n```",
        f"**When to use it.** {guide['use']}",
        f"**When not.** {guide['avoid']}",
        links(loss),
        example(loss),
        arguments(loss),
    ]
    if text := about(loss):
        parts.append(f'<details markdown="1"><summary>The formula and its edges, in full</summary>\n\n{text}\n\n</details>')
    if figures := measured(loss, rows):
        parts += ["**Measured** on one NVIDIA H200, forward + backward ([all](../benchmarks/losses.md)):", figures]
    if figures := effects(loss):
        parts += ["**What it did to a model**, over five seeds ([all](../benchmarks/effects.md)):", figures]
    return "\n\n".join(parts)


def page(family: str, rows: list[Row]) -> str:
    members = [loss for loss in LOSSES.values() if family_of(loss) == family]
    picture = f"![loss and gradient of this page's losses](../pictures/losses/{family}.svg)\n\n{CURVES[family][0]}"
    return "\n\n".join([f"# {FAMILIES[family]}", picture, *(section(loss, rows) for loss in members)]) + "\n"


def _logits(loss: Loss, x: Tensor, y: float) -> tuple[Any, ...]:
    return (x.sigmoid() if loss.domain == "probabilities" else x, torch.full_like(x, y))


def _row(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x), torch.zeros_like(x)], -1)


def _of_row(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    return _row(x), torch.zeros(len(x), dtype=torch.long)


def _likelihood(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    log_p = torch.stack([x, (1 - x.exp()).log()], -1)
    return (
        (log_p, torch.zeros(len(x), dtype=torch.long))
        if loss.name == "nll"
        else (log_p, torch.tensor([[0.7, 0.3]]).expand(len(x), 2).to(x))
    )


def _detection(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    if loss.name == "distribution_focal":
        bins = torch.arange(8, dtype=x.dtype)
        return -((bins - (3.5 + x.unsqueeze(-1) / 2)) ** 2), torch.full_like(x, 3.5)
    return x, torch.full_like(x, 0.7)


def _boxes(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    return torch.stack([x, zero, x + 1, one], -1), torch.stack([zero, zero, one, one], -1)


def _regions(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    target = torch.zeros(len(x), 8, 8, dtype=torch.long)
    target[:, :, :2] = 1
    sign = (2.0 * target - 1.0).to(x)
    maps = torch.stack([-x[:, None, None] * sign / 2, x[:, None, None] * sign / 2], 1)
    return maps, target


def _teacher(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    teacher = torch.tensor([[1.0, 0.0, -1.0]], dtype=x.dtype).expand(len(x), 3)
    student = _row(x) - torch.tensor([0.0, 0.0, 1.0], dtype=x.dtype)
    return (student, *teacher.log_softmax(1).topk(2, dim=1)) if loss.template == "topk" else (student, teacher)


Maker = Callable[[Loss, Tensor], tuple[Any, ...]]
CURVES: dict[str, tuple[str, str, float, float, dict[str, Maker]]] = {
    "regression": ("Loss and gradient over x - y.", "x - y", -3, 3, {"": lambda loss, x: (x, torch.zeros_like(x))}),
    "binary": (
        "Loss and gradient over the logit: where the target is 1 (lines) and where it is 0 (dashes).",
        *("logit", -6.0, 6.0),
        {"": lambda loss, x: _logits(loss, x, 1.0), "--": lambda loss, x: _logits(loss, x, 0.0)},
    ),
    "cross_entropy": ("Loss and gradient over the target's logit, beside two classes at 0.", "logit of the target", -6, 6, {"": _of_row}),
    "classification": ("Loss and gradient over the target's logit, beside two classes at 0.", "logit of the target", -6, 6, {"": _of_row}),
    "likelihood": (
        "Loss and gradient over ln p of the target's class, of two; the target of `kl_div` is (0.7, 0.3).",
        "ln p",
        -5,
        -0.1,
        {"": _likelihood},
    ),
    "detection": (
        "Loss and gradient over the logit of a box of quality 0.7; of `distribution_focal` over twice the distance of the "
        "distribution's mean from the target.",
        *("logit", -6.0, 6.0),
        {"": _detection},
    ),
    "iou": (
        "Loss and gradient over the shift of a box of side 1 along one axis, away from an equal one.",
        "shift",
        -2.5,
        2.5,
        {"": _boxes},
    ),
    "dice": (
        "Loss and gradient over the logit with which each pixel is told right, a quarter of which are of the region.",
        "logit",
        -6,
        6,
        {"": _regions},
    ),
    "divergence": (
        "Loss and gradient over the student's logit of the first of three classes; the teacher has 1, 0, -1.",
        "logit",
        -6,
        8,
        {"": _teacher},
    ),
    "contrastive": (
        "Loss and gradient over the logit of one pair: that belongs together (line) and that does not (dashes).",
        *("logit", -6.0, 6.0),
        {"": lambda loss, x: (x, torch.ones_like(x)), "--": lambda loss, x: (x, torch.zeros_like(x))},
    ),
}


def curve(loss: Loss, family: str, make: Maker) -> tuple[Tensor, Tensor, Tensor]:
    """Abscissae, values and slopes, in float64."""
    _, _, low, high, _ = CURVES[family]
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    values = torch.stack([_value(loss, make, at) for at in x])
    leaf = x.clone().requires_grad_()
    slopes = torch.autograd.grad(torch.stack([_value(loss, make, at) for at in leaf]).sum(), leaf)[0]
    return x, values.detach(), slopes


def _value(loss: Loss, make: Maker, at: Tensor) -> Tensor:
    options = {"log_prior": torch.tensor([0.1, 0.45, 0.45], dtype=at.dtype).log()} if loss.name == "logit_adjusted_ce" else {}
    made = make(loss, at.unsqueeze(0))
    return loss.function(*made, reduction="mean", **options)


def draw(family: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    _, label, _, _, lines = CURVES[family]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    members = [loss for loss in LOSSES.values() if family_of(loss) == family]
    for number, loss in enumerate(members):
        for style, make in lines.items():
            x, values, slopes = curve(loss, family, make)
            look = {
                "color": f"C{number % 10}",
                "linestyle": style or "-",
                "linewidth": 3.4 - 2.2 * number / len(members),
            }  # where lines fall together, all show
            left.plot(x, values, label=None if style else loss.name, **look)
            right.plot(x, slopes, **look)
    for axes, title in ((left, "loss"), (right, "gradient")):
        axes.set(title=title, xlabel=label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8, frameon=False)
    with matplotlib.rc_context(
        {"svg.hashsalt": "lossforge", "svg.fonttype": "none", "font.family": "sans-serif", "path.simplify_threshold": 0.2}
    ):
        save_figure(figure, PICTURES / f"{family}.svg", metadata={"Date": None})


def main(options: list[str]) -> int:
    rows = load(results.BENCH).rows
    pages = {DOCS / "losses" / f"{family}.md": page(family, rows) for family in FAMILIES}
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if options == ["--write"]:
        for path in stale:
            write_text(path, pages[path])
        for family in FAMILIES:
            draw(family)
        return 0
    missing = [PICTURES / f"{family}.svg" for family in FAMILIES if not (PICTURES / f"{family}.svg").is_file()]
    if stale or missing:
        names = ", ".join(str(Path(path).relative_to(ROOT)) for path in [*stale, *missing])
        print(f"{names}: stale; run: uv run tools/loss_pages.py --write", file=sys.stderr)
    return int(bool(stale or missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

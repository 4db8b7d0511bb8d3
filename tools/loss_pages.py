"""docs/losses/<family>.md and the curves of each family, from the registry and the measurements."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import tables as results
import torch
from loss_text import MissingError, described, file_of, sections
from tables import ROOT, family_of, formula, functions, targets_of, titles
from torch import Tensor

import lossforge.losses
from lab.runs.files import save_figure
from lossforge.bench.report import Row, load, tables
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.templates import TEMPLATES
from lossforge.losses.templates.declare import Declared
from lossforge.losses.templates.docs import COMMON

DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures" / "losses"
GUIDE = ("When to use it", "When not")
"""How the paragraphs of a docstring begin that say when to take the loss."""
POINTS = 161

OF_TORCH = ("size_average", "reduce")
"""torch's older words for the reduction."""


def documented(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the docstring's text and its sections."""
    return sections(inspect.getdoc(function) or "")


def guide(declared: Declared) -> list[str]:
    """Return when to take a loss, and when not.

    Raises:
        MissingError: its docstring does not say it.
    """
    paragraphs = documented(declared.definition)[0].split("\n\n")
    told = []
    for title in GUIDE:
        found = [each for each in paragraphs if each.startswith(f"{title}: ")]
        if not found:
            raise MissingError(f'{file_of(declared)}: the docstring of {declared.definition.__name__} has no paragraph "{title}: ..."')
        told.append(f"**{title}.** {' '.join(found[0].removeprefix(f'{title}: ').split())}")
    return told


def example(function: Callable[..., Any]) -> str:
    first, *code = (line.removeprefix(">>> ") for line in documented(function)[1]["Examples"].splitlines())
    return "\n".join(["```python", first, "", code[0], "", *code[1:], "```"])


EQUATION = re.compile(r"\S+(?:\(.*?\))? = ")
"""How a paragraph begins that is mathematics."""


def about(definition: Callable[..., Any]) -> str:
    """Return what the docstring says between its first line and the arguments, folded."""
    _, *paragraphs = documented(definition)[0].split("\n\n")
    told = (each for each in paragraphs if not each.startswith(("Source: ", *GUIDE)))
    text = "\n\n".join(f"```text\n{each}\n```" if EQUATION.match(each) else each for each in told)
    return f'<details markdown="1"><summary>The formula and its edges, in full</summary>\n\n{text}\n\n</details>' if text else ""


def arguments(function: Callable[..., Any], definition: Callable[..., Any]) -> str:
    """Return a table of the loss's own arguments, and the options that every loss has."""
    signature, defaults = (inspect.signature(each).parameters for each in (definition, function))
    meanings = described(documented(function)[1]["Args"])
    rows, shared = [], []
    for name, text in meanings.items():
        own = name in signature
        default = (signature if own else defaults)[name].default if own or name in defaults else None
        written = "" if default is inspect.Parameter.empty else f"`{default!r}`".replace("'", '"')
        if not own and text.split() == COMMON.get(name, "").split():
            shared.append(f"`{name}={written.strip('`')}`")
        elif name not in OF_TORCH:
            rows.append([f"`{name}`", written, " ".join(text.split())])
    table = tables.markdown(("argument", "default", "meaning"), rows)
    if not shared:
        return table
    return f"{table}\n\n[Options of every loss](../reference/options.md): {', '.join(shared)}."


def measured(loss: Loss, rows: list[Row]) -> str:
    """Time and memory beside torch, torch.compile and the best other library."""
    labels = dict.fromkeys(row.label for row in rows if row.loss == loss.name and row.suite in ("table", "losses", "variants"))
    report = load(results.BENCH)
    return tables.short([report], list(labels)) if labels else ""


def effects(loss: Loss) -> str:
    """Return the runs of results/effects.json under this loss."""
    rows = [row for row in results.effect_rows() if re.search(rf"\bloss={loss.name}\b", row[0])]
    return tables.markdown(results.EFFECT_HEADER, rows) if rows else ""


def links(loss: Loss) -> str:
    like = (loss.like or "").replace(":", ".")
    paper = loss.paper
    if paper.startswith("arXiv "):
        paper = f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv ')})"
    elif paper.startswith("doi "):
        paper = f"[{paper}](https://doi.org/{paper.removeprefix('doi ')})"
    facts = {
        "function": f"[`{loss.function.__name__}`](../reference/losses.md#lossforge.losses.{loss.function.__name__})",
        "module": f"`{loss.module.__name__}`",
        "in place of": f"`{like}`" if like and not like.startswith("lossforge") else "",
        "targets": targets_of(loss),
        "reductions": ", ".join(f"`{each}`" for each in get_args(inspect.signature(loss.function).parameters["reduction"].annotation)),
        "template": f"[{results.folder_of(loss)}](../know/template_{results.folder_of(loss)}.md)",
        "fused with a linear layer": f"`fuse_linear({loss.function.__name__})`"
        if loss.template.fusable and loss.domain in ("logits", "cosines")
        else "",
        "paper": paper,
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)


def title(function: Callable[..., Any]) -> str:
    """Return the beginning of a docstring's first sentence."""
    first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r", as |, for |, the | \(|; |\. |\.$|: ", first)[0]


def section(loss: Loss, rows: list[Row]) -> str:
    assert loss.declared
    parts = [
        f'<a id="{loss.name}"></a>',
        f"## {title(loss.function)}: `{loss.name}`",
        f"```text\n{formula(loss.definition)}\n```",
        *guide(loss.declared),
        links(loss),
        example(loss.function),
        arguments(loss.function, loss.definition),
        about(loss.definition),
    ]
    if figures := measured(loss, rows):
        parts += ["**Measured** on one NVIDIA H200, forward + backward ([all](../benchmarks/losses.md)):", figures]
    if figures := effects(loss):
        parts += ["**What it did to a model**, over five seeds ([all](../benchmarks/effects.md)):", figures]
    return "\n\n".join(filter(None, parts))


def function_section(declared: Declared) -> str:
    """Return the section of a loss that is not in the registry: a function with arguments of its own."""
    name = declared.definition.__name__
    function = getattr(lossforge.losses, name)
    template = next(each.name for each in TEMPLATES.values() if each.docs is declared.docs)
    facts = [f"- function: [`{name}`](../reference/losses.md#lossforge.losses.{name})"]
    facts += [f"- module: `{declared.module.name}`"] if declared.module else []
    facts += [f"- template: [{template}](../know/template_{template}.md)"]
    parts = [f'<a id="{name}"></a>', f"## {title(function)}: `{name}`", f"```text\n{formula(declared.definition)}\n```"]
    told = [*guide(declared), "\n".join(facts), example(function), arguments(function, declared.definition), about(declared.definition)]
    return "\n\n".join(filter(None, [*parts, *told]))


def page(family: str, rows: list[Row]) -> str:
    members = [loss for loss in LOSSES.values() if family_of(loss.definition) == family]
    picture = f"![loss and gradient of this page's losses](../pictures/losses/{family}.svg)"
    others = [each for each in functions() if family_of(each.definition) == family]
    parts = [*(section(loss, rows) for loss in members), *map(function_section, others)]
    return "\n\n".join([f"# {titles()[family]}", *([picture, CURVES[family].caption] if family in CURVES else []), *parts]) + "\n"


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


def _noise_model(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    one = torch.ones_like(x)
    return (x, one, one) if loss.name == "gaussian_nll" else (x, one)


def _margin(loss: Loss, x: Tensor, y: float) -> tuple[Any, ...]:
    if loss.template.name in ("margins", "margin_lists"):
        index = torch.tensor([0, -1, -1]) if loss.template.name == "margin_lists" else torch.tensor(0)
        return y * _row(x), index.expand(len(x), *index.shape)
    label = torch.full_like(x, y)
    if loss.name == "hinge_embedding":
        x = torch.where(x < 0, torch.nan, x)  # no distance
    return (x, torch.zeros_like(x), label) if loss.name == "margin_ranking" else (x, label)


def _embedding(loss: Loss, x: Tensor, y: float) -> tuple[Any, ...]:
    """Return two vectors at the angle x, or an anchor, a positive at the distance x and a negative at the distance 1."""
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    if loss.name == "cosine_embedding":
        return torch.stack([x.cos(), x.sin()], -1), torch.stack([one, zero], -1), y * one
    return torch.stack([zero, zero], -1), torch.stack([x, zero], -1), torch.stack([zero, one], -1)


def _detection(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    if loss.name == "distribution_focal":
        bins = torch.arange(8, dtype=x.dtype)
        return -((bins - (3.5 + x.unsqueeze(-1) / 2)) ** 2), torch.full_like(x, 3.5)
    return x, torch.full_like(x, 1.0 if loss.name == "gaussian_focal" else 0.7)


def _boxes(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    return torch.stack([x, zero, x + 1, one], -1), torch.stack([zero, zero, one, one], -1)


def _regions(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    target = torch.zeros(len(x), 8, 8, dtype=torch.long)
    target[:, :, :2] = 1
    sign = (2.0 * target - 1.0).to(x)
    if loss.name == "lovasz_hinge":
        return x[:, None, None] * sign, target
    maps = torch.stack([-x[:, None, None] * sign / 2, x[:, None, None] * sign / 2], 1)
    return maps, target


def _teacher(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    teacher = torch.tensor([[1.0, 0.0, -1.0]], dtype=x.dtype).expand(len(x), 3)
    student = _row(x) - torch.tensor([0.0, 0.0, 1.0], dtype=x.dtype)
    if loss.domain == "probabilities":
        return student.softmax(-1), teacher.softmax(-1)
    return (student, *teacher.log_softmax(1).topk(2, dim=1)) if loss.template.name == "topk" else (student, teacher)


class Curves(NamedTuple):
    """What a page's picture shows.

    Attributes:
        caption: below the picture.
        make: from a loss and abscissae, and a target where there are some, to the loss's tensors.
        label: of the abscissae, which lie between low and high.
        targets: of the lines and of the dashes.
    """

    caption: str
    make: Callable[..., tuple[Any, ...]]
    label: str = "logit"
    low: float = -6.0
    high: float = 6.0
    targets: tuple[float, ...] = ()


OF_TARGET = "Loss and gradient over the target's logit, beside two classes at 0."
CURVES = {
    "regression": Curves("Loss and gradient over x - y.", lambda loss, x: (x, torch.zeros_like(x)), "x - y", -3.0, 3.0),
    "binary": Curves(
        "Loss and gradient over the logit: where the target is 1 (lines) and where it is 0 (dashes).", _logits, targets=(1.0, 0.0)
    ),
    "cross_entropy": Curves(OF_TARGET, _of_row, "logit of the target"),
    "classification": Curves(OF_TARGET, _of_row, "logit of the target"),
    "angular": Curves(
        "Loss and gradient over the cosine of the target's class, beside two classes at 0.", _of_row, "cosine of the target", -1.0, 1.0
    ),
    "likelihood": Curves(
        "Loss and gradient over ln p of the target's class, of two; the target of `kl_div` is (0.7, 0.3).", _likelihood, "ln p", -5.0, -0.1
    ),
    "noise_model": Curves("Loss and gradient over the input, where target and variance are 1.", _noise_model, "input", -3.0, 3.0),
    "margin": Curves(
        "Loss and gradient over the score, for `hinge_embedding` over the distance: where the label is 1 (lines) and where it is -1 "
        "(dashes).",
        *(_margin, "score", -3.0, 3.0, (1.0, -1.0)),
    ),
    "embedding": Curves(
        "Loss and gradient: of `cosine_embedding` over the angle between the vectors, where they belong together (line) and where not "
        "(dashes); of `triplet_margin` over the positive's place on a line through the anchor at 0, where the negative's distance is 1.",
        *(_embedding, "angle in radians, or place", -3.0, 3.0, (1.0, -1.0)),
    ),
    "detection": Curves(
        "Loss and gradient over the logit of a box of quality 0.7; of `gaussian_focal` over that of a peak, where the target is 1; of "
        "`distribution_focal` over twice the distance of the distribution's mean from the target.",
        _detection,
    ),
    "iou": Curves(
        "Loss and gradient over the shift of a box of side 1 along one axis, away from an equal one.", _boxes, "shift", -2.5, 2.5
    ),
    "dice": Curves("Loss and gradient over the logit with which each pixel is told right, a quarter of which are of the region.", _regions),
    "divergence": Curves(
        "Loss and gradient over the student's logit of the first of three classes; the teacher has 1, 0, -1.", _teacher, high=8.0
    ),
    "contrastive": Curves(
        "Loss and gradient over the logit of one pair: that belongs together (line) and that does not (dashes).",
        _logits,
        targets=(1.0, 0.0),
    ),
}


def curve(loss: Loss, drawn: Curves, *target: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return abscissae, values and slopes, in float64."""
    x = torch.linspace(drawn.low, drawn.high, POINTS, dtype=torch.float64, requires_grad=True)
    options = {"log_prior": torch.tensor([0.1, 0.45, 0.45], dtype=x.dtype).log()} if loss.name == "logit_adjusted_ce" else {}
    values = torch.stack([loss.function(*drawn.make(loss, at.unsqueeze(0), *target), reduction="mean", **options) for at in x])
    slopes = torch.autograd.grad(values.sum(), x)[0]
    slopes[values.isnan()] = torch.nan
    return x.detach(), values.detach(), slopes


def draw(family: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    drawn = CURVES[family]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    members = [loss for loss in LOSSES.values() if family_of(loss.definition) == family]
    for number, loss in enumerate(members):
        width = 3.4 - 2.2 * number / len(members)  # where lines fall together, all show
        for style, target in zip(("-", "--"), [(each,) for each in drawn.targets] or [()], strict=False):
            x, values, slopes = curve(loss, drawn, *target)
            left.plot(x, values, style, label=loss.name if style == "-" else None, color=f"C{number % 10}", linewidth=width)
            right.plot(x, slopes, style, color=f"C{number % 10}", linewidth=width)
    for axes, title in ((left, "loss"), (right, "gradient")):
        axes.set(title=title, xlabel=drawn.label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8, frameon=False)
    settings = {"svg.hashsalt": "lossforge", "svg.fonttype": "none", "font.family": "sans-serif", "path.simplify_threshold": 0.2}
    with matplotlib.rc_context(settings):
        save_figure(figure, PICTURES / f"{family}.svg", metadata={"Date": None})


def files() -> dict[Path, str]:
    """Return the page of each family."""
    rows = load(results.BENCH).rows
    return {DOCS / "losses" / f"{family}.md": page(family, rows) for family in titles()}


def stale_drawings() -> dict[Path, Callable[[], object]]:
    """Return the curves to draw, which are missing or lack a loss, and what draws each. Their last digits depend on the processor."""
    stale: dict[Path, Callable[[], object]] = {}
    for family in CURVES:
        path = PICTURES / f"{family}.svg"
        drawn = path.read_text(encoding="utf-8") if path.is_file() else ""
        if any(f">{loss.name}<" not in drawn for loss in LOSSES.values() if family_of(loss.definition) == family):
            stale[path] = partial(draw, family)
    return stale

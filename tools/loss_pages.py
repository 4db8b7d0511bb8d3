"""docs/losses/<family>.md and the curves of each family, from the registry and the measurements."""

import inspect
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import reported
import torch
from formula_tex import tex
from loss_text import MissingError, file_of
from tables import ROOT, family_of, formula, members, targets_of, title_of, titles
from torch import Tensor

import lossforge.losses
from lab.base.files import save_figure
from lossforge.bench.report import Report, load, tables
from lossforge.losses.base.declare import Declared
from lossforge.losses.base.docs import COMMON
from lossforge.losses.base.text import described, documented, in_place_of
from lossforge.losses.formulas import has_kernel
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.templates import TEMPLATES

DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures" / "losses"
GUIDE = ("When to use it", "When not")
"""How the paragraphs of a docstring begin that say when to take the loss."""
POINTS = 161

OF_TORCH = ("size_average", "reduce")
"""torch's older words for the reduction."""
EQUATION = re.compile(r"\S+(?:\(.*?\))? = ")
"""How a paragraph begins that is mathematics."""


def guide(declared: Declared) -> list[str]:
    """Return when to take a loss, and when not.

    Raises:
        MissingError: its docstring does not say it.
    """
    paragraphs = dict(each.partition(": ")[::2] for each in documented(declared.definition)[0].split("\n\n"))
    for title in GUIDE:
        if title not in paragraphs:
            raise MissingError(f'{file_of(declared)}: the docstring of {declared.definition.__name__} has no paragraph "{title}: ..."')
    return [f"**{title}.** {' '.join(paragraphs[title].split())}" for title in GUIDE]


def example(function: Callable[..., Any]) -> str:
    first, *code = (line.removeprefix(">>> ") for line in documented(function)[1]["Examples"].splitlines())
    return "\n".join(["```python", first, "", code[0], "", *code[1:], "```"])


def about(definition: Callable[..., Any]) -> str:
    """Return what the docstring says between its first line and the arguments, folded."""
    _, *paragraphs = documented(definition)[0].split("\n\n")
    told = (each for each in paragraphs if not each.startswith(("Source: ", *GUIDE)))
    text = "\n\n".join(f"```text\n{each}\n```" if EQUATION.match(each) else each for each in told)
    return folded("The formula and its edges, in full", text) if text else ""


def arguments(function: Callable[..., Any], definition: Callable[..., Any]) -> str:
    """Return a table of the loss's own arguments, and the options that every loss has."""
    own, rows, shared = inspect.signature(definition).parameters, [], []
    for name, text in described(documented(function)[1]["Args"]).items():
        default = inspect.signature(function).parameters[name].default
        written = "" if default is inspect.Parameter.empty else repr(default).replace("'", '"')
        if name not in own and text.split() == COMMON.get(name, "").split():
            shared.append(f"`{name}={written}`")
        elif name not in OF_TORCH:
            rows.append([f"`{name}`", written and f"`{written}`", " ".join(text.split())])
    text = tables.markdown(("argument", "default", "meaning"), rows)
    if shared:
        text += f"\n\n[Options of every loss](../reference/options.md): {', '.join(shared)}."
    return folded("Arguments and options", text)


def folded(title: str, text: str) -> str:
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>'


def measured(loss: str, report: Report) -> str:
    """Return time and memory beside torch, torch.compile and the best other library."""
    labels = dict.fromkeys(row.label for row in report.rows if row.loss == loss and row.suite in ("table", "losses", "variants"))
    if not labels:
        return ""
    reports = [report, *map(load, filter(Path.exists, [reported.DRAFTS]))]  # the latter's are fused with a layer
    labels |= dict.fromkeys(row.label for each in reports[1:] for row in each.rows if row.loss == loss)
    return tables.short(reports, list(labels))


def template_of(declared: Declared) -> str:
    """Return the folder of the kernels that compute a function; empty if plain PyTorch does."""
    if not has_kernel(declared.formula):
        return ""
    call = declared.template and declared.template.call
    name = next((each.name for kind, each in TEMPLATES.items() if kind is call or each.docs is declared.docs), "")
    return {"topk": "divergence"}.get(name, name)


SITES = {"arXiv": "arxiv.org/abs", "doi": "doi.org"}


def facts(declared: Declared) -> str:
    name, template, like = declared.definition.__name__, template_of(declared), in_place_of(declared)
    page = f"../reference/losses_{family_of(declared)}.md#lossforge.losses"
    told = {"function": f"[`{name}`]({page}.{name})"}
    if declared.module:
        told["module"] = f"[`{declared.module.name}`]({page}.{declared.module.name})"
    if like:
        told["in place of"] = f"`{like}`"
    if declared.name:
        reductions = get_args(inspect.signature(declared.definition).parameters["reduction"].annotation)
        told |= {"targets": targets_of(declared), "reductions": ", ".join(f"`{each}`" for each in reductions)}
    if template:
        told["how the kernel reads memory"] = f"[{template}](../know/template_{template}.md)"
    if declared.template and declared.template.fusing and declared.facts.get("domain", "logits") in ("logits", "cosines"):
        told["fused with a linear layer"] = f"`fuse_linear({name})`"
    if paper := declared.facts.get("paper"):
        told["paper"] = re.sub(r"^(arXiv|doi) (.*)", lambda found: f"[{found[0]}](https://{SITES[found[1]]}/{found[2]})", paper)
    return "\n".join(f"- {fact}: {value}" for fact, value in told.items())


def title(function: Callable[..., Any]) -> str:
    """Return the beginning of a docstring's first sentence."""
    first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r", as |, for |, the | \(|; |\. |\.$|: ", first)[0]


def written(declared: Declared) -> str:
    """Return the formula of a docstring in TeX."""
    try:
        return tex(formula(declared.definition))
    except ValueError as problem:
        raise MissingError(
            f"{file_of(declared)}: {declared.definition.__name__}: {problem} in tools/formula_tex.py, or write it otherwise"
        ) from None


def section(declared: Declared, report: Report) -> str:
    name, definition = title_of(declared), declared.definition
    function = getattr(lossforge.losses, definition.__name__)
    parts = [
        f'<a id="{name}"></a>',
        f"## {title(function)}: `{name}`",
        f"$$\n{written(declared)}\n$$",
        *guide(declared),
        facts(declared),
        example(function),
        arguments(function, definition),
        about(definition),
    ]
    if has_kernel(declared.formula) and (figures := measured(name, report)):
        parts += ["**Measured** on one NVIDIA H200, forward + backward ([all](../benchmarks/losses.md)):", figures]
    if rows := [row for row in reported.effect_rows() if f"loss={name}" in row["command"].split()]:
        parts.append(folded("What it did to a model", f"{reported.effect_table(rows)}\n\n[All effects](../benchmarks/effects.md)."))
    return "\n\n".join(filter(None, parts))


def page(family: str, report: Report) -> str:
    parts = [f"# {titles()[family]}"]
    if family in CURVES:
        parts += [f"![loss and gradient of this page's losses](../pictures/losses/{family}.svg)", CURVES[family].caption]
    if len(members(family)) > 3:
        links = ", ".join(f"[`{title_of(each)}`](#{title_of(each)})" for each in members(family))
        parts.append(f"On this page: {links}. [Which loss to take](index.md#which-loss-to-take) compares them with all others.")
    return "\n\n".join([*parts, *(section(each, report) for each in members(family))]) + "\n"


def reference(family: str) -> str:
    """Return the reference of a family: its functions, and then its modules."""
    title = titles()[family]
    functions = [each.definition.__name__ for each in members(family)]
    modules = [each.module.name for each in members(family) if each.module]
    parts = [
        f"# Reference: {title[0].lower()}{title[1:]}",
        f"When to take which, with formulas, curves and figures: [{title}](../losses/{family}.md). [Options that all share](options.md).",
        "## Functions",
        *(f"::: lossforge.losses.{name}" for name in functions),
    ]
    if modules:
        parts += [
            "## Modules",
            "A module keeps the options of its function as attributes, which forward reads at each call, and class weights as buffers.",
            *(f"::: lossforge.losses.{name}" for name in modules),
        ]
    if beside := beside_losses(family, {*functions, *modules}):
        parts += ["## Beside the losses", *(f"::: lossforge.losses.{name}" for name in beside)]
    return "\n\n".join(parts) + "\n"


def beside_losses(family: str, losses: Collection[str]) -> list[str]:
    """Return the public names of a family's file that are neither functions of losses nor modules: records of outputs, and helpers."""
    places = {each.definition.__module__ for each in members(family)}
    public = {name: getattr(lossforge.losses, name) for name in lossforge.losses.__all__}
    return [name for name, found in public.items() if found.__module__ in places and name not in losses]


def _logits(loss: Loss, x: Tensor, y: float) -> tuple[Any, ...]:
    return (x.sigmoid() if loss.domain == "probabilities" else x, torch.full_like(x, y))


def _row(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x), torch.zeros_like(x)], -1)


def _of_row(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    return _row(x), torch.zeros(len(x), dtype=torch.long)


def _likelihood(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    log_p = torch.stack([x, (1 - x.exp()).log()], -1)
    if loss.name == "nll":
        return log_p, torch.zeros(len(x), dtype=torch.long)
    return log_p, torch.tensor([[0.7, 0.3]]).expand(len(x), 2).to(x)


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


def _rotated(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    upright = torch.tensor([0.0, 0.0, 3.0, 1.0, 0.0], dtype=x.dtype).expand(len(x), 5)
    return torch.cat([upright[:, :4], x.unsqueeze(1)], 1), upright


def _regions(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    target = torch.zeros(len(x), 8, 8, dtype=torch.long)
    target[:, :, :2] = 1
    logit = x[:, None, None] * (2 * target - 1)
    return (logit, target) if loss.name == "lovasz_hinge" else (torch.stack([-logit / 2, logit / 2], 1), target)


def _teacher(loss: Loss, x: Tensor) -> tuple[Any, ...]:
    teacher = torch.tensor([[1.0, 0.0, -1.0]], dtype=x.dtype).expand(len(x), 3)
    student = _row(x) - torch.tensor([0.0, 0.0, 1.0], dtype=x.dtype)
    if loss.domain == "probabilities":
        return student.softmax(-1), teacher.softmax(-1)
    return (student, *teacher.log_softmax(1).topk(2, dim=1)) if loss.template.name == "topk" else (student, teacher)


def _pairs(loss: Any, x: Tensor, y: float) -> tuple[Any, ...]:
    """Return unit vectors of which two have the similarity x, and 0 with a third: they belong together where y is 1, else the others do."""
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    anchor, third = torch.cat([one, zero, zero]), torch.cat([zero, zero, one])
    other = torch.cat([x, (1 - x * x).sqrt(), zero])
    labels = torch.tensor([0, 0, 1] if y else [0, 1, 0])
    if loss.name == "proxy_anchor_loss":
        return other.unsqueeze(0), torch.stack([anchor, third]), torch.tensor([0 if y else 1])
    if loss.name == "gist_embed_loss":
        apart = torch.eye(2, dtype=x.dtype)
        return anchor.unsqueeze(0), torch.stack([other, third] if y else [third, other]), apart[:1], apart
    return torch.stack([anchor, other, third]), labels


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
    "rotated": Curves(
        "Loss and gradient over the angle of a box of 3 by 1 that is turned about its centre, away from an equal one.",
        *(_rotated, "angle in radians", -3.0, 3.0),
    ),
    "dice": Curves(
        "Loss and gradient over the logit of the correct class at every pixel. A quarter of the pixels are in the region.", _regions
    ),
    "divergence": Curves(
        "Loss and gradient over the student's logit of the first of three classes; the teacher has 1, 0, -1.", _teacher, high=8.0
    ),
    "self_distillation": Curves(
        "Loss and gradient over the student's logit of the first of three classes; the teacher has 1, 0, -1.", _teacher, low=-2.0, high=3.0
    ),
    "contrastive": Curves(
        "Loss and gradient over the logit of one pair: that belongs together (line) and that does not (dashes).",
        _logits,
        targets=(1.0, 0.0),
    ),
    "metric_learning": Curves(
        "Loss and gradient over the similarity of one pair, where that of all others is 0: of a pair that belongs together (line), and of "
        "one that does not, beside one that does (dashes).",
        *(_pairs, "similarity", -0.98, 0.98, (1.0, 0.0)),
    ),
}


def curve(loss: Any, drawn: Curves, *target: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return abscissae, values and slopes, in float64."""
    x = torch.linspace(drawn.low, drawn.high, POINTS, dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([0.1, 0.45, 0.45], dtype=x.dtype)
    options = {"logit_adjusted_ce": {"log_prior": shares.log()}, "ldam": {"margin": 0.5 * (0.1 / shares) ** 0.25}}.get(loss.name, {})
    values = torch.stack([loss.function(*drawn.make(loss, at.unsqueeze(0), *target), reduction="mean", **options) for at in x])
    slopes = torch.autograd.grad(values.sum(), x)[0]
    slopes[values.isnan()] = torch.nan
    return x.detach(), values.detach(), slopes


class Function(NamedTuple):
    """A public function that is not in the registry, as curves take a loss."""

    name: str
    function: Callable[..., Any]


def drawn_losses(family: str) -> list[Any]:
    """Return the losses of the registry; of a family that has none, its functions."""
    named = [LOSSES[each.name] for each in members(family) if each.name]
    names = [each.definition.__name__ for each in members(family)]
    return named or [Function(name, getattr(lossforge.losses, name)) for name in names]


def draw(family: str) -> None:
    """Draw each loss in a frame of its own, with its gradient."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn, losses = CURVES[family], drawn_losses(family)
    columns = min(2, len(losses))  # so that letters can be read on a telephone
    rows = -(-len(losses) // columns)
    figure = Figure(figsize=(2.1 * columns, 1.9 * rows + 0.5), layout="constrained")
    frames = [*figure.subplots(rows, columns, squeeze=False, sharex=True).flat]
    for loss, axes in zip(losses, frames, strict=False):
        for style, target in zip(("-", "--"), [(each,) for each in drawn.targets] or [()], strict=False):
            x, values, slopes = curve(loss, drawn, *target)
            axes.plot(x, values, style, color="C0", label="loss" if style == "-" else None)
            axes.plot(x, slopes, style, color="C1", label="gradient" if style == "-" else None)
        axes.set_title(loss.name, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in frames[len(losses) :]:
        axes.set_axis_off()
    figure.supxlabel(drawn.label, fontsize=9)
    figure.legend(*frames[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9, frameon=False)
    settings = {"svg.hashsalt": "lossforge", "svg.fonttype": "none", "font.family": "sans-serif", "path.simplify_threshold": 0.2}
    with matplotlib.rc_context(settings):
        save_figure(figure, PICTURES / f"{family}.svg", metadata={"Date": None})


def files() -> dict[Path, str]:
    """Return the two pages of each family: when to take which loss, and the reference."""
    report = load(reported.BENCH)
    pages = {DOCS / "losses" / f"{family}.md": page(family, report) for family in titles()}
    return pages | {DOCS / "reference" / f"losses_{family}.md": reference(family) for family in titles()}


def stale_drawings() -> dict[Path, Callable[[], object]]:
    """Return the curves to draw, which are missing or lack a loss, and what draws each. Their last digits depend on the processor."""
    stale: dict[Path, Callable[[], object]] = {}
    for family in CURVES:
        path = PICTURES / f"{family}.svg"
        drawn = path.read_text(encoding="utf-8") if path.is_file() else ""
        if any(f">{loss.name}<" not in drawn for loss in drawn_losses(family)):
            stale[path] = partial(draw, family)
    return stale

"""A formula alone, in float64: its gradient against differences of its value, its reference against its value."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lossforge.losses.check.report import Report
from lossforge.losses.custom.source import FormulaError
from lossforge.losses.custom.twin import torch_of
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.registry import Loss

SECTION = "formula, in float64"
STEP, TOLERANCE = 6e-6, 1e-5
"""A central difference over this step, relative to x, is right to about 1e-9 of a smooth formula's slope."""


@dataclass(frozen=True)
class Points:
    name: str
    x: Tensor
    y: Tensor
    hyper: tuple[float, ...]


def points(loss: Loss, seed: int) -> Iterator[Points]:
    """Random, extreme and coinciding x and y, for the default hyper-parameters and others."""
    generator = torch.Generator().manual_seed(seed)

    def pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.meshgrid(x, y, indexing="ij")
        return a.flatten(), b.flatten()

    unit = torch.rand(60, generator=generator, dtype=torch.float64)
    random, ends = torch.randn(200, generator=generator, dtype=torch.float64) * 3, torch.tensor([0.0, 1.0], dtype=torch.float64)
    far = torch.tensor([1e-6, 1e-3, 20.0, 50.0, 88.0, 1e3, 1e4, 6e4], dtype=torch.float64)
    far = torch.cat([far, -far])
    if loss.domain == "probabilities":
        random, far = random.sigmoid(), torch.tensor([1e-6, 1e-3, 0.999, 1 - 1e-6], dtype=torch.float64)
    targets = torch.cat([ends, unit[:6]])
    defaults = tuple(float(v or 0.0) for v in loss.hyper.values())
    others = [tuple(v * f for v, f in zip(defaults, factors, strict=True)) for factors in _factors(len(defaults))]
    for hyper in dict.fromkeys([defaults, *others]):
        yield Points("random", *pairs(random, targets), hyper)
        yield Points("far out", *pairs(far, targets), hyper)
        yield Points("x = y", unit, unit, hyper)


def _factors(count: int) -> Iterator[tuple[float, ...]]:
    return itertools.islice(itertools.product((0.5, 1.5), repeat=count), 4)


def check_formula(loss: Loss, report: Report, seed: int) -> None:
    formula = FORMULAS[loss.formula]
    try:
        both = torch_of(formula.kernel)
    except FormulaError as problem:
        report.add(SECTION, "gradient", None, f"{problem}")
        return
    for name in ("random", "far out", "x = y"):
        _compare(name, loss, both, report, seed)
    _reference(loss, both, formula.twin, report, seed)


def _compare(name: str, loss: Loss, both: Callable[..., tuple[Tensor, Tensor]], report: Report, seed: int) -> None:
    count, problem = 0, ""
    for p in points(loss, seed):
        if p.name != name or problem:
            continue
        step = STEP * p.x.abs().clamp(min=1.0 if loss.domain == "logits" else 0.01)
        value, slope = both(p.x, p.y, *p.hyper)
        right = (both(p.x + step, p.y, *p.hyper)[0] - value) / step
        left = (value - both(p.x - step, p.y, *p.hyper)[0]) / step
        central = 0.5 * (left + right)
        slack = TOLERANCE * torch.stack([torch.ones_like(left), left.abs(), right.abs()]).amax(0)
        fits = (slope - central).abs() <= slack
        fits |= (torch.minimum(left, right) - slack <= slope) & (slope <= torch.maximum(left, right) + slack)  # at a kink: any between
        fits &= value.isfinite()
        count += len(fits)
        if not fits.all():
            at = int((~fits).nonzero()[0])
            problem = f"{_where(p, loss, at)}: value {value[at]:.6g}, gradient {slope[at]:.6g}, differences {central[at]:.6g}"
    report.add(SECTION, f"gradient against differences, {name}", not problem, problem or f"{count} points")


def _reference(loss: Loss, both: Callable[..., tuple[Tensor, Tensor]], twin: Callable[..., Tensor], report: Report, seed: int) -> None:
    problem = ""
    for p in points(loss, seed):
        value = both(p.x, p.y, *p.hyper)[0]
        try:
            wanted = twin(p.x, p.y, *p.hyper)
        except FormulaError as missing:
            report.add(SECTION, "reference", None, str(missing))
            return
        fits = (value - wanted).abs() <= 1e-6 * torch.maximum(wanted.abs(), torch.ones_like(wanted))
        if not fits.all() and not problem:
            at = int((~fits).nonzero()[0])
            problem = f"{_where(p, loss, at)}: formula {value[at]:.6g}, reference {wanted[at]:.6g}"
    report.add(SECTION, "reference against the formula", not problem, problem)


def _where(p: Points, loss: Loss, at: int) -> str:
    hyper = "".join(f", {name}={value:g}" for name, value in zip(loss.hyper, p.hyper, strict=True))
    return f"at x={p.x[at]:g}, y={p.y[at]:g}{hyper}"

"""Check a formula without its template, in float64: its gradient against differences of its value, its reference against its value."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.check.report import Report
from lossforge.losses.formulas import FORMULAS, Formula
from lossforge.losses.formulas.error import FormulaError
from lossforge.losses.formulas.source import read
from lossforge.losses.formulas.translate import torch_of
from lossforge.losses.registry import Loss
from lossforge.losses.templates.boxes import BOXES, SPECIAL_PAIRS
from lossforge.losses.templates.elementwise import ELEMENTWISE
from lossforge.losses.templates.rotated import ROTATED, SPECIAL_ROTATED
from lossforge.losses.templates.rowwise import OF_POWERS, ROWWISE
from lossforge.losses.testing import samples

SECTION = "formula, in float64"
STEP, TOLERANCE, ONE_SIDED = 6e-6, 1e-5, 100.0
"""A central difference over STEP, relative to x, is right to about 1e-9 of a smooth formula's slope; a one-sided one to 1e-5."""
ENDS = "0, 1, ties and kinks"
INF, NAN = float("inf"), float("nan")


Both = Callable[..., Sequence[Any]]
"""(variables, hyper-parameters) → value and gradient, with the factors that the formula holds in `Held`."""


class Held:
    """Factors that a formula holds, in the order of its calls of `hold`: kept where it is differentiated, and returned beside it.

    So a difference of the value leaves them as they are, as the gradient does.
    """

    def __init__(self) -> None:
        self.factors: list[Any] = []
        self.returned: int | None = None

    def __call__(self, like: Tensor, x: Any) -> Any:
        if self.returned is None:
            self.factors.append(x)
            return x
        self.returned += 1
        return self.factors[self.returned - 1]

    def keep(self) -> None:
        """Keep the factors of the next computation."""
        self.factors, self.returned = [], None

    def give(self) -> None:
        """Return the kept factors in the next computation."""
        self.returned = 0


@dataclass(frozen=True)
class Points:
    """Arguments of a formula, all of one length, and hyper-parameters."""

    name: str
    values: tuple[Tensor, ...]
    hyper: tuple[float, ...]

    def moved(self, variable: int, step: Tensor) -> tuple[Any, ...]:
        values = [v + step if i == variable else v for i, v in enumerate(self.values)]
        return (*values, *self.hyper)

    def at(self, number: int, loss: Loss) -> str:
        names = read(FORMULAS[loss.formula].kernels.formula).arguments
        values = [f"{name}={v[number]:g}" for name, v in zip(names, self.values, strict=False)]
        values += [f"{name}={value:g}" for name, value in zip(names[len(self.values) :], self.hyper, strict=True)]
        return f"at {', '.join(values)}"


def points(loss: Loss, seed: int) -> Iterator[Points]:
    """Yield random, extreme and equal arguments, for the default hyper-parameters and for others."""
    generator = torch.Generator().manual_seed(seed)
    kinds = POINTS[loss.template](loss, generator)
    for hyper in formula_hyper(loss):
        for name, values in kinds.items():
            yield Points(name, values, hyper)


def formula_hyper(loss: Loss) -> list[tuple[float, ...]]:
    """Return the formula's hyper-parameters as the loss passes them; their number and order differ from those of the loss."""
    formula, sample = FORMULAS[loss.formula], next(samples(loss))
    leading = 2 if loss.template in PAIRS else len(loss.template.variables)  # a reference takes the boxes, not their numbers
    seen: dict[tuple[Any, ...], None] = {}

    def recorded(*args: Any) -> Any:
        seen[args[leading:]] = None
        return formula.reference(*args)

    FORMULAS[loss.formula] = Formula(recorded, formula.device)
    try:
        for options in ({}, *(loss.options or _others(loss))):
            loss.reference(sample.x, sample.target, **{**sample.kwargs, **options})
    finally:
        FORMULAS[loss.formula] = formula
    return [hyper for hyper in seen if not any(isinstance(value, Tensor) for value in hyper)]


def _others(loss: Loss) -> Iterator[dict[str, float]]:
    """Yield hyper-parameters other than the defaults, for a loss whose entry lists none."""
    defaults = {name: value for name, value in loss.hyper.items() if value is not None}
    for factors in itertools.islice(itertools.product((0.5, 1.5), repeat=len(defaults)), 4):
        yield {name: value * factor for (name, value), factor in zip(defaults.items(), factors, strict=True)}


def _elements(loss: Loss, generator: torch.Generator) -> dict[str, tuple[Tensor, ...]]:
    def pairs(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.flatten() for t in torch.meshgrid(x, y, indexing="ij"))

    unit = torch.rand(60, generator=generator, dtype=torch.float64)
    random, ends = torch.randn(200, generator=generator, dtype=torch.float64) * 3, torch.tensor([0.0, 1.0], dtype=torch.float64)
    far = torch.tensor([1e-6, 1e-3, 20.0, 50.0, 88.0, 1e3, 1e4, 6e4], dtype=torch.float64)
    far = torch.cat([far, -far])
    if loss.domain == "probabilities":
        random, far = random.sigmoid(), torch.tensor([1e-6, 1e-3, 0.999, 1 - 1e-6], dtype=torch.float64)
    targets = torch.cat([ends, unit[:6]])
    kinks = ends if loss.domain == "probabilities" else torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    at_ends = pairs(kinks, torch.cat([ends, torch.tensor([0.5], dtype=torch.float64)]))
    return {"random": pairs(random, targets), "far out": pairs(far, targets), "x = y": (unit, unit), ENDS: at_ends}


def _rows(loss: Loss, generator: torch.Generator) -> dict[str, tuple[Tensor, ...]]:
    z = torch.randn(200, generator=generator, dtype=torch.float64).abs() * 3
    far = torch.tensor([1e-4, 1e-2, 20.0, 80.0, 1e3, 1e4], dtype=torch.float64)
    return {"random": (z,), "far out": (far,), ENDS: (torch.tensor([0.0, 1.0], dtype=torch.float64),)}


def _rows_and_powers(loss: Loss, generator: torch.Generator) -> dict[str, tuple[Tensor, ...]]:
    """Return z with sums of powers: at the ends 1, the sum where one class has the probability 1."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for name, (z,) in _rows(loss, generator).items():
        s = torch.ones_like(z) if name == ENDS else 0.05 + torch.rand(len(z), generator=generator, dtype=torch.float64)
        found[name] = z, s
    return found


def _boxes(loss: Loss, generator: torch.Generator) -> dict[str, tuple[Tensor, ...]]:
    corner, side = (torch.rand(2, 300, 2, generator=generator, dtype=torch.float64) + low for low in (0.0, 0.05))
    corners = [t for box in zip(corner, corner + side, strict=True) for point in box for t in point.unbind(-1)]
    special = torch.tensor([[*first, *second] for first, second in SPECIAL_PAIRS.values()], dtype=torch.float64)
    return {
        "random": tuple(corners),
        "far out": tuple(1e3 * t for t in corners),
        "equal boxes": (*corners[:4], *corners[:4]),
        ENDS: special.unbind(1),
    }


def _rotated(loss: Loss, generator: torch.Generator) -> dict[str, tuple[Tensor, ...]]:
    """Boxes whose sides are not near eps, where roots and sides have a kink."""
    numbers = torch.rand(10, 200, generator=generator, dtype=torch.float64) + 0.5
    far = numbers * torch.tensor(2 * [30.0, 30, 30, 30, 1], dtype=torch.float64).unsqueeze(1)
    equal = torch.cat([numbers[:5], numbers[:5]])
    special = torch.tensor([[*first, *second] for first, second in SPECIAL_ROTATED.values()], dtype=torch.float64)
    return {"random": numbers.unbind(0), "far out": far.unbind(0), "equal boxes": equal.unbind(0), ENDS: special.unbind(1)}


POINTS = {ELEMENTWISE: _elements, ROWWISE: _rows, OF_POWERS: _rows_and_powers, BOXES: _boxes, ROTATED: _rotated}
PAIRS = (BOXES, ROTATED)


def check_formula(loss: Loss, report: Report, seed: int) -> None:
    formula = FORMULAS[loss.formula]
    try:
        both, held = _inlined(formula, len(loss.template.variables))
    except FormulaError as problem:
        report.add(SECTION, "gradient", None, f"{problem}")
        return
    found = list(points(loss, seed))
    for name in dict.fromkeys(p.name for p in found):
        if report.failures:  # most likely for the same reason
            break
        _compare(name, loss, both, held, report, [p for p in found if p.name == name])
    _reference(loss, both, held, formula.reference, report, found)
    if ":" not in loss.name:  # the reference of a custom loss is its formula, unless it says otherwise
        _infinite(loss, both, held, formula.reference, report)


def _inlined(formula: Formula, leading: int) -> tuple[Both, Held]:
    """Return (variables, hyper-parameters) → value and gradient, by the device function that a kernel inlines for these hyper-parameters,
    and the factors that it holds.

    Raises:
        FormulaError: an operation has no counterpart in torch; the message names it.
    """
    held, functions = Held(), formula.kernels
    general = torch_of(functions.formula, held)
    if functions.special is None or functions.applies is None:
        return general, held
    special, applies = torch_of(functions.special, held), torch_of(functions.applies)

    def both(*args: Any) -> Sequence[Any]:
        first, *others = args[leading:]
        return (special if applies(torch.tensor(first, dtype=torch.float64), *others) else general)(*args)

    return both, held


def _compare(name: str, loss: Loss, both: Both, held: Held, report: Report, found: Sequence[Points]) -> None:
    count, problem = 0, ""
    for p, variable in itertools.product(found, range(loss.template.slopes)):
        held.keep()
        value, *slopes = both(*p.values, *p.hyper)
        slope = slopes[variable] + torch.zeros_like(value)
        (right, known_right), (left, known_left) = (_difference(loss, both, held, p, variable, value, sign) for sign in (1, -1))
        if loss.template is BOXES:  # a box without width is flipped on one side, so its slope along that axis is a choice
            begin, end, begin_2, end_2 = p.values[variable % 2 :: 2]
            known_right = known_left = known_right & known_left & (begin < end) & (begin_2 < end_2)
        right, left = torch.where(known_right, right, left), torch.where(known_left, left, right)
        central = 0.5 * (left + right)
        slack = TOLERANCE * torch.stack([torch.ones_like(left), left.abs(), right.abs()]).nan_to_num().amax(0)
        if name == ENDS:
            slack *= ONE_SIDED
        fits = (slope - central).abs() <= slack
        # at a kink any slope between the one-sided differences is right
        fits |= (torch.minimum(left, right) - slack <= slope) & (slope <= torch.maximum(left, right) + slack)
        fits |= ~(known_right | known_left) & ~slope.isnan()  # any number is right where the slope is infinite or bounded
        fits &= ~value.isnan() if name == ENDS else value.isfinite()
        count += len(fits)
        if not (fits.all() or problem):
            at = int((~fits).nonzero()[0])
            of = f" {variable + 1}" if loss.template.slopes > 1 else ""
            numbers = f"value {value[at]:.6g}, gradient{of} {slope[at]:.6g}, differences {central[at]:.6g}"
            problem = f"{p.at(at, loss)}: {numbers}"
    report.add(SECTION, f"gradient against differences, {name}", not problem, problem or f"{count} points")


def _difference(loss: Loss, both: Both, held: Held, p: Points, variable: int, value: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Return the difference quotient to one side, and where it is known: inside the domain, and at ends the same for a smaller step.

    value: at p.
    """
    x = p.values[variable]
    step = STEP * x.abs().clamp(min=min(1.0, x.abs().max().item()))
    inside = torch.ones_like(x, dtype=torch.bool)
    if loss.domain == "probabilities":
        room = torch.where((x > 0) & (x < 1), torch.minimum(x, 1 - x), 1.0)
        step, inside = torch.minimum(step, 1e-3 * room), (x + sign * 1e-9 >= 0) & (x + sign * 1e-9 <= 1)
        inside |= x == p.values[1 - variable]  # a kink at the domain's end: the slope may be one from outside, if there is one
    if loss.template in (ROWWISE, OF_POWERS):
        inside = (x > 0) | (sign > 0)

    def quotient(step: Tensor) -> Tensor:
        held.give()
        return sign * (both(*p.moved(variable, sign * step))[0] - value) / step

    found = quotient(step)
    if p.name == ENDS:
        inside = inside & found.isfinite() & ((found - quotient(0.1 * step)).abs() <= 1e-3 * (1 + found.abs()))
    return found, inside


def _by_reference(loss: Loss, reference: Callable[..., Tensor], p: Points) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return value and gradients of the reference.

    Raises:
        FormulaError: an operation has no counterpart in torch; the message names it.
    """
    leaves = [v.clone().requires_grad_(i < loss.template.slopes) for i, v in enumerate(p.values)]
    values, half = leaves, len(leaves) // 2
    if loss.template in PAIRS:
        values = [torch.stack(leaves[:half], -1), torch.stack(leaves[half:], -1)]
    value = reference(*values, *p.hyper)
    gradients = torch.autograd.grad(value.sum(), leaves[: loss.template.slopes], materialize_grads=True)
    return value.detach(), gradients


def _reference(loss: Loss, both: Both, held: Held, reference: Callable[..., Tensor], report: Report, found: Sequence[Points]) -> None:
    problem = ""
    for p in found:
        held.keep()
        value, *slopes = both(*p.values, *p.hyper)
        try:
            wanted, gradients = _by_reference(loss, reference, p)
        except FormulaError as missing:
            report.add(SECTION, "reference", None, str(missing))
            return
        fits = ((value - wanted).abs() <= 1e-6 * torch.maximum(wanted.abs(), torch.ones_like(wanted))) | (value == wanted)
        if not (fits.all() or problem):
            at = int((~fits).nonzero()[0])
            problem = f"{p.at(at, loss)}: formula {value[at]:.6g}, reference {wanted[at]:.6g}"
        for slope, gradient in zip(slopes, gradients, strict=True):
            slope = slope + torch.zeros_like(gradient)
            off = gradient.isnan() & ~slope.isnan()
            if p.name in ("random", "far out"):  # at a kink each may take its own slope
                off |= slope.isfinite() & gradient.isfinite() & ((slope - gradient).abs() > TOLERANCE * slope.abs().clamp(min=1.0))
            if off.any() and not problem:
                at = int(off.nonzero()[0])
                problem = f"{p.at(at, loss)}: the reference's gradient is {gradient[at]:.6g}, the formula's {slope[at]:.6g}"
    report.add(SECTION, "reference against the formula", not problem, problem)


def _infinite(loss: Loss, both: Both, held: Held, reference: Callable[..., Tensor], report: Report) -> None:
    """Check that the reference and the formula agree where an input is infinite or nan, in value and gradient."""
    if loss.template not in INFINITE:
        return
    problem = ""
    for hyper in formula_hyper(loss):
        p = Points("infinite", INFINITE[loss.template](loss), hyper)
        held.keep()
        value, *slopes = both(*p.values, *p.hyper)
        wanted, gradients = _by_reference(loss, reference, p)
        pairs = [("value", value, wanted), *(("gradient", *pair) for pair in zip(slopes, gradients, strict=True))]
        for name, got, expected in pairs:
            got = torch.as_tensor(got).to(expected).expand_as(expected)
            off = ~torch.isclose(got, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
            if loss.template is ROWWISE and name == "gradient":  # a part of the gradient in the logits, which is nan where z is
                off &= ~(p.values[0].isnan() | (got.isfinite() & expected.isfinite()))
            if off.any() and not problem:
                at = int(off.nonzero()[0])
                problem = f"{p.at(at, loss)}: the reference's {name} is {expected[at]:.6g}, the formula's {got[at]:.6g}"
    report.add(SECTION, "reference against the formula, inf and nan", not problem, problem)


def _infinite_elements(loss: Loss) -> tuple[Tensor, ...]:
    x, y = torch.tensor([INF, -INF, NAN], dtype=torch.float64), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    return tuple(t.flatten() for t in torch.meshgrid(x, y, indexing="ij"))


def _infinite_rows(loss: Loss) -> tuple[Tensor, ...]:
    return (torch.tensor([INF, NAN], dtype=torch.float64),)


def _infinite_boxes(loss: Loss) -> tuple[Tensor, ...]:
    """Each number of a pair in turn."""
    pair = torch.tensor([[0.0, 0.0, 2.0, 3.0, 1.0, 1.0, 4.0, 2.0]], dtype=torch.float64)
    numbers = torch.tensor([INF, -INF, NAN], dtype=torch.float64)
    return torch.cat([torch.where(torch.eye(8, dtype=torch.bool), number, pair) for number in numbers]).unbind(1)


INFINITE = {ELEMENTWISE: _infinite_elements, ROWWISE: _infinite_rows, BOXES: _infinite_boxes}
"""Infinite inputs of a formula. A row's z is infinite where the logit of its class is -inf, and nan where another logit is inf."""

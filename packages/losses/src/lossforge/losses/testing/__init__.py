"""Samples of every loss in the registry, and its exact value, for tests and checks: a registered loss needs no test file of its own."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.base.record import Make, Sample
from lossforge.losses.registry import Loss

BOUNDS = {
    torch.float32: 3e-6,
    torch.bfloat16: 2.0**-7,  # the interpreter truncates where hardware rounds: one unit in the last place
    torch.float16: 2.0**-10,
}
"""How much further from float64 than plain torch in the same dtype a result may be, relative to its norm."""


@dataclass(frozen=True)
class Result:
    value: Tensor
    gradient: Tensor | None


def run(
    function: Callable[..., Any], sample: Sample, upstream: Tensor | None = None, dtype: torch.dtype | None = None, **options: Any
) -> Result:
    """Value and gradient of a call whose x requires grad; with `dtype`, all of it in that dtype."""
    sample = sample.tensors(lambda t: t.to(dtype or t.dtype))
    x = sample.x.detach().to(dtype or sample.x.dtype).requires_grad_()
    value = function(x, sample.target, **{**sample.kwargs, **options})
    value = value if isinstance(value, Tensor) else value.loss
    value.backward(torch.ones_like(value) if upstream is None else upstream.to(value.dtype))
    return Result(value.detach(), x.grad)


def error(got: Tensor, exact: Tensor) -> float:
    """‖got - exact‖ / ‖exact‖, absolute where exact is 0; nan and inf must agree, else inf."""
    got, exact = got.double(), exact.double()
    special = ~exact.isfinite()
    if not torch.equal(got[special].nan_to_num(), exact[special].nan_to_num()) or not torch.equal(got.isnan(), exact.isnan()):
        return float("inf")
    difference, size = (got - exact)[~special].norm().item(), exact[~special].norm().item()
    return difference / size if size else difference


def samples(loss: Loss, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Iterator[Sample]:
    """Yield calls that together touch every target, weight, option and layout of the loss's template."""
    make, template = Make(device, dtype, loss.domain, seed, third_argument(loss)), loss.template.samples
    yield from offered(loss, template(make))
    if "negative_only" in inspect.signature(loss.function).parameters:
        yield from _diagonal(make)
    plain = next(template(make))
    for options in loss.options:
        moved = {k: v.to(device, dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
        named = {k: "per class" if isinstance(v, Tensor) else v for k, v in options.items()}
        yield Sample(f"options {named}", plain.x, plain.target, {**plain.kwargs, **moved})


def third_argument(loss: Loss) -> str:
    """Return the name of the third argument, where a call must give it."""
    required = [name for name, p in inspect.signature(loss.function).parameters.items() if p.default is p.empty]
    return "".join(required[2:3])


def has_inplace(loss: Loss) -> bool:
    """Return whether the gradient may be written over the logits."""
    return loss.has_kernel and "inplace" in inspect.signature(loss.function).parameters


def offered(loss: Loss, calls: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the calls without what the loss does not offer."""
    for sample in calls:
        smooth = "label_smoothing" not in loss.without and not ("weight" in sample.kwargs and "label_smoothing with weight" in loss.without)
        kwargs = {k: v for k, v in sample.kwargs.items() if k not in loss.without and (smooth or k != "label_smoothing")}
        if sample.name in loss.without or ("target_b" in sample.kwargs and "target_b" not in kwargs):
            continue
        if "probabilities" not in loss.without or sample.target is None or not sample.target.is_floating_point():
            yield Sample(sample.name, sample.x, sample.target, kwargs)


def plain_sample(loss: Loss, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Sample:
    """Return the simplest call of a loss: with class indices where it takes them, else the first of its template."""
    found = list(samples(loss, device, dtype))
    return next((s for s in found if s.name == "class index"), found[0])


def _diagonal(make: Make) -> Iterator[Sample]:
    yield Sample("diagonal", make.logits(9, 7), None)
    yield Sample("diagonal, a shard", make.logits(5, 24), None, {"offset": 8, "weight": make.unit(5, 1)})
    yield Sample("diagonal, a shard of columns", make.logits(24, 5), None, {"offset": -8})
    yield Sample("diagonal, along the rows", make.logits(9, 7), None, {"offset": -1, "dim": 0})
    yield Sample("diagonal, transposed", make.logits(8, 16).t(), None, {"normalizer": 5})
    yield Sample("diagonal, sliced", make.logits(6, 32)[:, ::2], None, {"offset": 3})
    yield Sample("diagonal, more than a tile", make.logits(17, 130), None, {"offset": 113})
    yield Sample("no diagonal", make.logits(9, 7), None, {"negative_only": True})

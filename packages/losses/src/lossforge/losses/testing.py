"""Samples of every loss in the registry, and its exact value, for tests and checks: a registered loss needs no test file of its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.registry import Loss


@dataclass(frozen=True)
class Sample:
    """One call of a loss: function(x, target, **kwargs)."""

    name: str
    x: Tensor
    target: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self, change: Callable[[Tensor], Tensor]) -> "Sample":
        """The same call with every floating tensor but x changed."""

        def changed(v: Any) -> Any:
            return change(v) if isinstance(v, Tensor) and v.is_floating_point() else v

        return Sample(self.name, self.x, changed(self.target), {k: changed(v) for k, v in self.kwargs.items()})


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


class _Make:
    """Random tensors on a device, always the same."""

    def __init__(self, device: str, dtype: torch.dtype, domain: str, seed: int) -> None:
        self.device, self.dtype, self.domain = device, dtype, domain
        self.generator = torch.Generator().manual_seed(seed)

    def logits(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator) * 2
        return (x.sigmoid() if self.domain == "probabilities" else x).to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device, self.dtype)

    def index(self, low: int, classes: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, classes, shape, generator=self.generator).to(self.device, dtype)


def samples(loss: Loss, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Iterator[Sample]:
    """Calls that together touch every target, weight, option and layout of the loss's template."""
    make, template = _Make(device, dtype, loss.domain, seed), _SAMPLES[loss.template]
    yield from template(make)
    plain = next(template(make))
    for options in loss.options:
        yield Sample(f"options {options}", plain.x, plain.target, options)


def _elementwise(make: _Make) -> Iterator[Sample]:
    yield Sample("dense", make.logits(7, 33), make.unit(7, 33))
    yield Sample("one dimension", make.logits(1037), make.unit(1037))
    yield Sample("no dimension", make.logits(), make.unit())
    yield Sample("transposed", make.logits(6, 5).t(), make.unit(5, 6))
    yield Sample("both transposed", make.logits(6, 5).t(), make.unit(6, 5).t())
    yield Sample("sliced", make.logits(6, 10)[:, ::2], make.unit(6, 5))
    yield Sample("expanded", make.logits(6, 1).expand(6, 5), make.unit(1, 5).expand(6, 5))
    yield Sample("channels last", make.logits(2, 3, 4, 5).to(memory_format=torch.channels_last), make.unit(2, 3, 4, 5))
    yield Sample("four strides", make.logits(3, 4, 4, 6)[:, ::2, :, ::2].permute(3, 0, 2, 1)[:, :, 1:3], make.unit(3, 3, 2, 2))
    index = make.index(-1, 7, 9)
    index[4] = -2
    yield Sample("class index", make.logits(9, 7), index)
    yield Sample("class index, int32", make.logits(9, 7), index.int())
    index = make.index(-2, 5, 2, 3, 4)
    yield Sample("class index, middle dimension", make.logits(2, 5, 3, 4), index, {"dim": 1})
    yield Sample("class index, middle dimension last in memory", make.logits(2, 3, 4, 5).permute(0, 3, 1, 2), index, {"dim": 1})
    yield Sample("mixup pair", make.logits(2, 4, 7), make.index(-2, 7, 2, 4), {"target_b": make.index(-2, 7, 2, 4), "lam": 0.3})
    yield Sample(
        "mixup pair, λ a sample", make.logits(3, 4, 7), make.index(0, 7, 3, 4), {"target_b": make.index(0, 7, 3, 4), "lam": make.unit(3)}
    )
    yield Sample("normalizer", make.logits(9, 7), make.index(-1, 7, 9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(9, 7), make.unit(9, 7), {"normalizer": 5})


def _rowwise(make: _Make) -> Iterator[Sample]:
    index = make.index(0, 10, 7)
    index[2] = -100
    yield Sample("class index", make.logits(7, 10), index)
    yield Sample("class index, int32", make.logits(7, 10), index.int())
    yield Sample("class index, uint8", make.logits(7, 10), make.index(0, 10, 7).byte())
    yield Sample("one class", make.logits(3, 1), make.index(0, 1, 3))
    yield Sample("two classes", make.logits(3, 2), make.index(0, 2, 3))
    yield Sample("one row", make.logits(1001), make.index(0, 1001))
    yield Sample("many classes", make.logits(2, 9001), make.index(0, 9001, 2))
    yield Sample("row stride", make.logits(5, 20)[:, :11], make.index(0, 11, 5))
    yield Sample("class stride", make.logits(5, 20)[:, ::2], make.index(0, 10, 5))
    yield Sample("transposed", make.logits(11, 5).t(), make.index(0, 11, 5))
    image = make.index(0, 5, 2, 3, 4)
    image[0, 1] = -100
    yield Sample("image", make.logits(2, 5, 3, 4), image)
    square = make.index(0, 5, 2, 4, 8)
    square[0, 1, ::3] = -100
    yield Sample("image, rows at once", make.logits(2, 5, 4, 8), square)
    square = make.index(0, 70, 1, 4, 8)
    square[0, 1, ::3] = -100
    yield Sample("image, rows at once, many classes", make.logits(1, 70, 4, 8), square)
    yield Sample("image, channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), image)
    yield Sample("image, sliced", make.logits(2, 5, 3, 8)[..., ::2], image)
    yield Sample("image, targets transposed", make.logits(2, 5, 3, 4), make.index(0, 5, 2, 4, 3).transpose(1, 2))
    yield Sample("class weights", make.logits(7, 10), index, {"weight": make.unit(10)})
    yield Sample("class weights and smoothing", make.logits(7, 10), index, {"weight": make.unit(10), "label_smoothing": 0.2})
    yield Sample("smoothing, many classes", make.logits(2, 9001), make.index(0, 9001, 2), {"label_smoothing": 0.1})
    yield Sample("probabilities", make.logits(7, 10), make.logits(7, 10).softmax(1))
    yield Sample("probabilities, many classes", make.logits(2, 9001), make.logits(2, 9001).softmax(1))
    every = {"weight": make.unit(5), "label_smoothing": 0.2}
    yield Sample("probabilities, image", make.logits(2, 5, 3, 4), make.logits(2, 5, 3, 4).softmax(1), every)
    yield Sample("mixup pair", make.logits(7, 10), index, {"target_b": make.index(0, 10, 7), "lam": 0.3})
    yield Sample("mixup pair, image", make.logits(2, 5, 3, 4), image, {**every, "target_b": make.index(0, 5, 2, 3, 4), "lam": make.unit(2)})
    yield Sample("normalizer", make.logits(7, 10), index, {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(7, 10), index, {"normalizer": 5})


def _overlap(make: _Make) -> Iterator[Sample]:
    index = make.index(0, 5, 2, 3, 4)
    index[0, 1] = -100
    yield Sample("class index", make.logits(2, 5, 3, 4), index)
    yield Sample("class index, uint8, one channel", make.logits(2, 5, 3, 4), make.index(0, 5, 2, 1, 3, 4).byte(), {"ignore_index": 3})
    yield Sample("dense", make.logits(2, 5, 3, 4), make.unit(2, 5, 3, 4))
    yield Sample("no pixels", make.logits(4, 5), make.index(0, 5, 4))
    yield Sample("volume", make.logits(2, 3, 2, 3, 4), make.index(0, 3, 2, 2, 3, 4))
    yield Sample("several programs", make.logits(2, 3, 40, 40), make.index(0, 3, 2, 40, 40))
    yield Sample("whole tiles", make.logits(1, 4, 32, 64), make.unit(1, 4, 32, 64))
    yield Sample("one class", make.logits(2, 1, 3, 4), make.unit(2, 1, 3, 4))
    yield Sample("many classes", make.logits(2, 600, 5, 14), make.index(0, 600, 2, 5, 14))
    yield Sample("many classes, dense", make.logits(1, 600, 3), make.unit(1, 600, 3), {"batch": True})
    yield Sample("channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), index)
    yield Sample("targets transposed", make.logits(2, 5, 3, 4), make.index(0, 5, 2, 4, 3).transpose(1, 2))
    yield Sample("cropped", make.logits(2, 5, 5, 6)[:, 1:4, 1:4, 2:5], make.unit(2, 3, 5, 6)[:, :, 2:, 3:])
    yield Sample("three strides", make.logits(2, 3, 4, 6, 8)[:, :, :2, :3, ::2], make.index(0, 3, 2, 2, 3, 4))
    yield Sample("batch", make.logits(2, 5, 3, 4), index, {"batch": True})
    yield Sample("without background", make.logits(2, 5, 3, 4), index, {"include_background": False})
    every = {"weight": make.unit(5), "include_background": False}
    yield Sample("class weights", make.logits(2, 5, 3, 4), index, {"weight": make.unit(5)})
    yield Sample("class weights, batch", make.logits(2, 5, 3, 4), make.unit(2, 5, 3, 4), {**every, "batch": True})
    yield Sample("present only", make.logits(2, 5, 3, 4), index.clamp(max=2), {**every, "present_only": True})
    sigmoid = {"activation": "sigmoid"}
    yield Sample("sigmoid", make.logits(2, 5, 3, 4), index, sigmoid)
    yield Sample("sigmoid, dense", make.logits(2, 11, 3, 4), make.unit(2, 11, 3, 4), sigmoid)
    mask = make.index(0, 2, 2, 50, 50)
    mask[:, 3] = 255
    yield Sample("mask", make.logits(2, 1, 50, 50), mask, {**sigmoid, "ignore_index": 255})
    yield Sample("mask, batch", make.logits(2, 1, 3, 4), make.index(0, 2, 2, 3, 4), {**sigmoid, "batch": True, "weight": make.unit(1)})


_SAMPLES: dict[str, Callable[[_Make], Iterator[Sample]]] = {"elementwise": _elementwise, "rowwise": _rowwise, "overlap": _overlap}

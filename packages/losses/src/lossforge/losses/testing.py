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
        yield Sample(f"options {options}", plain.x, plain.target, {**plain.kwargs, **options})


def plain_sample(loss: Loss, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Sample:
    """The simplest call of a loss: with class indices where it takes them."""
    name = "class index" if loss.takes_indices else "dense"
    return next(s for s in samples(loss, device, dtype) if s.name == name)


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


def _divergence(make: _Make) -> Iterator[Sample]:
    labels = make.index(0, 10, 7)
    labels[2] = -100
    weight = make.unit(7)
    weight[3] = 0
    yield Sample("dense", make.logits(7, 10), make.logits(7, 10))
    yield Sample("teacher in another dtype", make.logits(7, 10), make.logits(7, 10).to(_OTHER[make.dtype]))
    yield Sample("one class", make.logits(3, 1), make.logits(3, 1))
    yield Sample("one row", make.logits(1001), make.logits(1001))
    yield Sample("many classes", make.logits(2, 20_001), make.logits(2, 20_001))
    yield Sample("many classes, aligned", make.logits(2, 20_480), make.logits(2, 20_480), {"weight": make.unit(2)})
    yield Sample("row stride", make.logits(5, 20)[:, :11], make.logits(5, 30)[:, 8:19])
    yield Sample("class stride", make.logits(5, 20)[:, ::2], make.logits(5, 10))
    yield Sample("transposed", make.logits(11, 5).t(), make.logits(5, 11))
    yield Sample("expanded", make.logits(5, 11), make.logits(11).expand(5, 11))
    yield Sample("weights", make.logits(7, 10), make.logits(7, 10), {"weight": weight})
    yield Sample("mask", make.logits(7, 10), make.logits(7, 10), {"weight": weight > 0.3})
    yield Sample("labels", make.logits(7, 10), make.logits(7, 10), {"labels": labels})
    both = {"labels": labels.int(), "weight": weight, "ignore_index": 3}
    yield Sample("labels and weights", make.logits(7, 10), make.logits(7, 10), both)
    yield Sample("image", make.logits(2, 5, 3, 4), make.logits(2, 5, 3, 4))
    yield Sample("image, weights", make.logits(2, 5, 3, 4), make.logits(2, 5, 3, 4), {"weight": make.unit(2, 3, 4)})
    image = make.index(0, 5, 2, 4, 8)
    image[0, 1, ::3] = -100
    yield Sample("image, rows at once", make.logits(2, 5, 4, 8), make.logits(2, 5, 4, 8), {"labels": image})
    yield Sample("image, rows at once, many classes", make.logits(1, 70, 4, 8), make.logits(1, 70, 4, 8), {"labels": image[:1]})
    yield Sample("image, channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), make.logits(2, 5, 3, 4))
    yield Sample("image, sliced", make.logits(2, 5, 3, 8)[..., ::2], make.logits(2, 5, 4, 3).transpose(2, 3))
    divisor = torch.tensor(3.0, device=make.device)
    yield Sample("normalizer", make.logits(7, 10), make.logits(7, 10), {"normalizer": divisor, "labels": labels})
    yield Sample("normalizer, number", make.logits(7, 10), make.logits(7, 10), {"normalizer": 5})


def _topk(make: _Make) -> Iterator[Sample]:
    def sample(name: str, x: Tensor, k: int, kwargs: dict[str, Any] | None = None) -> Sample:
        """The teacher's k largest of log-probabilities of its own."""
        dim = 0 if x.ndim == 1 else 1
        values, indices = make.logits(*x.shape).float().log_softmax(dim).topk(k, dim)
        return Sample(name, x, indices, {"values": values.to(make.dtype), **(kwargs or {})})

    weight, labels = make.unit(7), make.index(0, 10, 7)
    weight[3], labels[2] = 0, -100
    yield sample("dense", make.logits(7, 10), 4)
    yield sample("one entry", make.logits(7, 10), 1)
    yield sample("all entries", make.logits(3, 8), 8)
    yield sample("one row", make.logits(1001), 20)
    yield sample("many classes", make.logits(2, 9001), 33)
    yield sample("many classes, aligned, tail", make.logits(2, 20_480), 16, {"tail": True, "weight": make.unit(2)})
    yield sample("row stride", make.logits(5, 20)[:, :11], 3)
    yield sample("transposed", make.logits(11, 5).t(), 3)
    yield sample("labels", make.logits(7, 10), 4, {"labels": labels})
    yield sample("weights", make.logits(7, 10), 4, {"weight": weight, "labels": labels.int(), "ignore_index": 3})
    image = make.index(0, 5, 2, 4, 8)
    image[0, 1, ::3] = -100
    yield sample("image", make.logits(2, 5, 3, 4), 2)
    yield sample("image, rows at once", make.logits(2, 5, 4, 8), 2, {"labels": image})
    yield sample("image, rows at once, many classes", make.logits(1, 70, 4, 8), 5, {"labels": image[:1], "tail": True})
    yield sample("image, channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), 2)
    yield sample("normalizer", make.logits(7, 10), 4, {"normalizer": torch.tensor(3.0, device=make.device)})
    absent = sample("absent entries", make.logits(7, 10), 4)
    absent.target[1:3, 2:] = -1
    absent.target[4] = -1
    yield absent


_OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}
_SAMPLES: dict[str, Callable[[_Make], Iterator[Sample]]] = {
    "elementwise": _elementwise,
    "rowwise": _rowwise,
    "divergence": _divergence,
    "topk": _topk,
}

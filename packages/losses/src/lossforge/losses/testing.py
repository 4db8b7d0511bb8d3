"""Samples of every loss in the registry, and its exact value, for tests and checks: a registered loss needs no test file of its own."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lossforge.losses.registry import Loss

BOUNDS = {
    torch.float32: 3e-6,
    torch.bfloat16: 2.0**-7,  # the interpreter truncates where hardware rounds: one unit in the last place
    torch.float16: 2.0**-10,
}
"""How much further from float64 than plain torch in the same dtype a result may be, relative to its norm."""


@dataclass(frozen=True)
class Sample:
    """One call of a loss: function(x, target, **kwargs)."""

    name: str
    x: Tensor
    target: Tensor | None
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
        of_domain = {"probabilities": torch.sigmoid, "log-probabilities": torch.nn.functional.logsigmoid}.get(self.domain)
        return (x if of_domain is None else of_domain(x)).to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device, self.dtype)

    def boxes(self, *shape: int) -> Tensor:
        """Corners of valid boxes, of which many overlap; as (cx, cy, w, h) they are valid too."""
        low, sides = (torch.rand((*shape, 2), generator=self.generator) for _ in range(2))
        return torch.cat([low * 100, low * 100 + sides * 60 + 1], -1).to(self.device, self.dtype)

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=self.dtype)

    def index(self, low: int, classes: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, classes, shape, generator=self.generator).to(self.device, dtype)


def samples(loss: Loss, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Iterator[Sample]:
    """Calls that together touch every target, weight, option and layout of the loss's template."""
    make, template = _Make(device, dtype, loss.domain, seed), _SAMPLES[loss.template]
    yield from offered(loss, template(make))
    if "negative_only" in inspect.signature(loss.function).parameters:
        yield from _diagonal(make)
    plain = next(template(make))
    for options in loss.options:
        moved = {k: v.to(device, dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
        named = {k: "per class" if isinstance(v, Tensor) else v for k, v in options.items()}
        yield Sample(f"options {named}", plain.x, plain.target, {**plain.kwargs, **moved})


def offered(loss: Loss, calls: Iterable[Sample]) -> Iterator[Sample]:
    """The calls without what the loss does not offer."""
    for sample in calls:
        smooth = "label_smoothing" not in loss.without and not ("weight" in sample.kwargs and "label_smoothing with weight" in loss.without)
        kwargs = {k: v for k, v in sample.kwargs.items() if smooth or k != "label_smoothing"}
        if "probabilities" not in loss.without or sample.target is None or not sample.target.is_floating_point():
            yield Sample(sample.name, sample.x, sample.target, kwargs)


def plain_sample(loss: Loss, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Sample:
    """The simplest call of a loss: with class indices where it takes them, else the first of its template."""
    found = list(samples(loss, device, dtype))
    return next((s for s in found if s.name == "class index"), found[0])


def large_sample(loss: Loss, rows: int, classes: int, device: str, dtype: torch.dtype) -> Sample:
    """The loss's usual call, of random logits: class indices where it takes them, else a teacher's logits, or pairs of boxes."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    if loss.template == "boxes":
        pairs = [torch.cat([low, low + 60 * torch.rand_like(low) + 1], -1) for low in 100 * torch.rand(2, 64 * rows, 2, device=device)]
        return Sample("pairs", pairs[0].to(dtype), pairs[1].to(dtype))
    if loss.template == "distribution":
        x = normal(rows * classes // 16, 16)
        return Sample("dense", x.to(dtype), 15 * torch.rand(len(x), device=device))
    x = normal(rows, classes)
    x = {"logits": x, "probabilities": x.sigmoid(), "log-probabilities": x.log_softmax(1)}[loss.domain].to(dtype)
    if loss.template == "divergence":
        return Sample("dense", x, normal(rows, classes).to(dtype))
    if loss.template == "topk":
        values, indices = normal(rows, classes).log_softmax(1).topk(16, 1)
        return Sample("dense", x, values.to(dtype), {"indices": indices})
    return Sample("class index", x, torch.randint(0, classes, (rows,), device=device))


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
    index = torch.cat([make.index(0, 1501, 2), make.index(-2, 0, 3)])
    yield Sample("class index, rows longer than a tile", make.logits(5, 1501), index)
    yield Sample("class index, scores, rows longer than a tile", make.logits(5, 1501), index, {"score": make.unit(5)})
    pair = {"target_b": make.index(-2, 1501, 5), "lam": make.unit(5)}
    yield Sample("mixup pair, rows longer than a tile", make.logits(5, 1501), index, pair)
    index = make.index(-2, 5, 2, 3, 4)
    yield Sample("class index, middle dimension", make.logits(2, 5, 3, 4), index, {"dim": 1})
    yield Sample("class index, middle dimension last in memory", make.logits(2, 3, 4, 5).permute(0, 3, 1, 2), index, {"dim": 1})
    yield Sample("class index, scores", make.logits(9, 7), make.index(-2, 7, 9), {"score": make.unit(9)})
    yield Sample("class index, scores, middle dimension", make.logits(2, 5, 3, 4), index, {"dim": 1, "score": make.unit(2, 4, 3).mT})
    yield Sample("mixup pair", make.logits(2, 4, 7), make.index(-2, 7, 2, 4), {"target_b": make.index(-2, 7, 2, 4), "lam": 0.3})
    yield Sample(
        "mixup pair, λ a sample", make.logits(3, 4, 7), make.index(0, 7, 3, 4), {"target_b": make.index(0, 7, 3, 4), "lam": make.unit(3)}
    )
    yield Sample("normalizer", make.logits(9, 7), make.index(-1, 7, 9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(9, 7), make.unit(9, 7), {"normalizer": 5})


def _diagonal(make: _Make) -> Iterator[Sample]:
    yield Sample("diagonal", make.logits(9, 7), None)
    yield Sample("diagonal, a shard", make.logits(5, 24), None, {"offset": 8, "weight": make.unit(5, 1)})
    yield Sample("diagonal, a shard of columns", make.logits(24, 5), None, {"offset": -8})
    yield Sample("diagonal, along the rows", make.logits(9, 7), None, {"offset": -1, "dim": 0})
    yield Sample("diagonal, transposed", make.logits(8, 16).t(), None, {"normalizer": 5})
    yield Sample("diagonal, sliced", make.logits(6, 32)[:, ::2], None, {"offset": 3})
    yield Sample("diagonal, more than a tile", make.logits(17, 130), None, {"offset": 113})
    yield Sample("no diagonal", make.logits(9, 7), None, {"negative_only": True})


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


SPECIAL_PAIRS = {
    "equal": ([10, 20, 50, 80], [10, 20, 50, 80]),
    "two edges shared": ([0, 0, 10, 10], [0, 0, 20, 10]),
    "touching at an edge": ([0, 0, 10, 10], [10, 2, 20, 12]),
    "touching at a corner": ([0, 0, 10, 10], [10, 10, 20, 30]),
    "disjoint": ([0, 0, 10, 10], [40, 50, 60, 90]),
    "nested": ([0, 0, 60, 60], [20, 10, 30, 40]),
    "no width": ([5, 0, 5, 10], [0, 2, 10, 20]),
    "no height": ([0, 2, 10, 20], [2, 8, 8, 8]),
    "a point in a box": ([5, 5, 5, 5], [0, 0, 10, 10]),
    "equal points": ([3, 4, 3, 4], [3, 4, 3, 4]),
    "two points": ([1, 1, 1, 1], [3, 4, 3, 4]),
    "equal lines": ([5, 0, 5, 10], [5, 0, 5, 10]),
}
"""Where minima, maxima and quotients change their branch."""


def _boxes(make: _Make) -> Iterator[Sample]:
    yield Sample("pairs", make.boxes(23), make.boxes(23))
    special1, special2 = (make.tensor(list(boxes)) for boxes in zip(*SPECIAL_PAIRS.values(), strict=True))
    yield Sample("special pairs", torch.cat([special1, make.boxes(17)]), torch.cat([special2, make.boxes(17)]))
    yield Sample("one pair", make.boxes(), make.boxes())
    yield Sample("several tiles", make.boxes(300), make.boxes(300))
    yield Sample("fractions of an image", make.boxes(23) / 256, make.boxes(23) / 256)
    scale = 300 if make.dtype == torch.float16 else 1e6
    yield Sample("huge coordinates", make.boxes(23) * scale, make.boxes(23) * scale)
    yield Sample("transposed", _fields_first(make.boxes(21)), make.boxes(21))
    yield Sample("both transposed", _fields_first(make.boxes(21)), _fields_first(make.boxes(21)))
    own, others = make.boxes(9), make.boxes(9)
    beside = torch.cat([others[:, :2], own, others[:, 2:]], 1)[:, 2:6]
    yield Sample("coordinates beside others", beside, make.boxes(9).repeat(1, 2)[:, :4])
    yield Sample("every other coordinate", make.boxes(9).repeat_interleave(2, 1)[:, ::2], make.boxes(9))
    yield Sample("expanded", make.boxes(6, 1).expand(6, 5, 4), make.boxes(5).expand(6, 5, 4))
    image = _fields_first(make.boxes(2, 3, 5).flatten(1, 2)).unflatten(1, (3, 5))
    yield Sample("image", image, make.boxes(2, 3, 5))
    yield Sample("anchors of an image", make.boxes(2, 3, 4, 5).permute(0, 2, 3, 1, 4), make.boxes(2, 4, 5, 3))
    yield Sample("four strides", make.boxes(4, 4, 4, 6)[::2, ::2, ::2, ::2], make.boxes(2, 2, 2, 3))
    yield Sample("weights", make.boxes(9), make.boxes(9), {"weight": make.unit(9)})
    yield Sample("a weight a row", make.boxes(3, 5), make.boxes(3, 5), {"weight": make.unit(3, 1)})
    yield Sample("weights, transposed", make.boxes(3, 5).transpose(0, 1), make.boxes(5, 3), {"weight": make.unit(3, 5).t()})
    yield Sample("normalizer", make.boxes(9), make.boxes(9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.boxes(9), make.boxes(9), {"normalizer": 5, "weight": make.unit(9)})


def _fields_first(boxes: Tensor) -> Tensor:
    """The same boxes (..., P, 4), stored as (..., 4, P)."""
    return boxes.mT.contiguous().mT


def _distribution(make: _Make) -> Iterator[Sample]:
    def at(bins: int, *shape: int) -> Tensor:
        return make.unit(*shape) * (bins - 1)

    yield Sample("dense", make.logits(9, 7), at(7, 9))
    yield Sample("sides of boxes", make.logits(5, 4, 16), at(16, 5, 4))
    yield Sample("on bins", make.logits(4, 8, 5), torch.arange(32).view(4, 8).remainder(5).to(at(5, 1)))
    yield Sample("one distribution", make.logits(16), at(16))
    yield Sample("two bins", make.logits(3, 2), at(2, 3))
    yield Sample("several tiles", make.logits(300, 16), at(16, 300))
    yield Sample("several tiles, odd bins", make.logits(300, 17), at(17, 300))
    yield Sample("many bins", make.logits(3, 601), at(601, 3))
    yield Sample("most bins", make.logits(2, 4096), at(4096, 2))
    yield Sample("targets of float32", make.logits(9, 16), at(16, 9).float())
    yield Sample("transposed", make.logits(16, 21).t(), at(16, 21))
    yield Sample("bins beside others", make.logits(9, 40)[:, 3:19], at(16, 18)[::2])
    yield Sample("every other bin", make.logits(9, 32)[:, ::2], at(16, 9))
    yield Sample("expanded", make.logits(6, 1, 8).expand(6, 5, 8), at(8, 5).expand(6, 5))
    yield Sample("anchors of an image", make.logits(2, 4, 8, 6).transpose(2, 3), at(8, 2, 6, 4).mT)
    yield Sample("four strides", make.logits(4, 4, 4, 6, 8)[::2, ::2, ::2, ::2], at(8, 2, 2, 2, 3))
    yield Sample("weights", make.logits(9, 7), at(7, 9), {"weight": make.unit(9)})
    yield Sample("a weight a box", make.logits(5, 4, 16), at(16, 5, 4), {"weight": make.unit(5, 1)})
    yield Sample("normalizer", make.logits(9, 7), at(7, 9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(9, 7), at(7, 9), {"normalizer": 5, "weight": make.unit(9)})


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
    yield Sample("one class", make.logits(2, 1, 3, 4), make.unit(2, 1, 3, 4), {"activation": "sigmoid"})
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
        return Sample(name, x, values.to(make.dtype), {"indices": indices, **(kwargs or {})})

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
    absent.kwargs["indices"][1:3, 2:] = -1
    absent.kwargs["indices"][4] = -1
    yield absent


_OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}
_SAMPLES: dict[str, Callable[[_Make], Iterator[Sample]]] = {
    "elementwise": _elementwise,
    "rowwise": _rowwise,
    "nll": _rowwise,
    "boxes": _boxes,
    "distribution": _distribution,
    "overlap": _overlap,
    "divergence": _divergence,
    "topk": _topk,
}

"""Loss and gradients of a linear layer's logits, a chunk of rows or of classes at a time.

A chunk's logits are one matrix product into memory that every chunk takes in turn. The loss's own kernel goes over them, or its plain-torch
reference where no kernel runs, and writes their gradient G in their place. Two more products make it the gradients of the layer's input,
G · weight, and of its weight, Gᵀ · input.

`forward` goes by rows, whose softmax it needs, and does all of that where the gradient is wanted at once: three products. Else `backward`
computes the logits again: four. It knows what forward kept of the rows, and so may go by classes. By rows, the weight's gradient is summed
over the chunks, which in half precision takes float32 memory of its size; by classes the input's is, and the weight's is one product
a chunk. So `backward` goes by classes where there are more of them than rows.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import KINDS, DivergenceCall, ElementCall, Kind, RowCall
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear.call import Head, of_classes, of_rows
from lossforge.losses.linear.products import UNIT, add_products, add_transposed, logits_of, new_logits, room, sums_of_classes, write_product
from lossforge.losses.reference import reference, row_weights, which_count

Several = tuple[Tensor | None, ...]
HALF = (torch.float16, torch.bfloat16)
MEMORY = 2**30
"""Bytes of logits at a time, where there is enough: below 2,048 rows of a vocabulary, products lose speed on an H200."""
ALIGNED = 64
"""Rows or classes a chunk are a multiple of it, but for the last chunk's."""


@functools.cache
def free_memory(device: torch.device) -> int:
    """Return the bytes that torch could take of a GPU when it was asked first."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def memory_for(x: Tensor) -> int:
    """Return the bytes of logits that are computed at a time."""
    return min(MEMORY, free_memory(x.device) // 4) if x.is_cuda else MEMORY // 4


def rows_a_chunk(call: Any, spare: int, saved: int) -> int:
    """Return how many rows are computed at a time: all of them where that takes no more memory than chunks would.

    spare: bytes of a gradient that the logits of a chunk may lie in, until it is written. saved: of a sum over chunks that one needs not.
    """
    rows = max(call.input.shape[0], 1)
    if call.chunk:
        return min(call.chunk, rows)
    a_row = room(call.head.shape[0], call.input) * call.input.element_size()
    several = _evenly(rows, max(memory_for(call.input), spare) // a_row)
    teachers = int(call.teacher_layer is not None)
    of_several = (teachers + (several * a_row > spare)) * several * a_row
    return rows if (1 + teachers) * rows * a_row <= saved + of_several else several


def classes_a_chunk(call: Any) -> int:
    """Return how many classes are computed at a time: those of half the memory, as the products take all rows, or of call.chunk rows'."""
    rows, classes = max(call.input.shape[0], 1), call.head.shape[0]
    if call.chunk:
        return min(-(-call.chunk * classes // rows // UNIT) * UNIT, classes)
    return _evenly(classes, memory_for(call.input) // 2 // (rows * call.input.element_size()))


def _evenly(whole: int, most: int) -> int:
    """Return into parts of how many the whole is cut, as even as multiples of ALIGNED let; no more than `most`, but at least ALIGNED."""
    parts = -(-whole // max(most, ALIGNED))
    return min(-(-whole // parts // ALIGNED) * ALIGNED, whole)


class Gradients:
    """The gradients of a layer's input, weight and bias, summed over chunks of rows; any may be None.

    wide: the weight's gradient is of half precision, and summed in float32. It is written at the end; until then its own memory is free for
    the logits of a chunk.
    """

    def __init__(self, call: Any, gradients: Sequence[Tensor | None]) -> None:
        self.input, self.weight, self.bias = gradients
        self.layer: Head = call.layer
        of_weight = self.weight
        narrow = of_weight is not None and of_weight.dtype in HALF
        self.wide = narrow and (call.accumulate == 1 or (call.accumulate == -1 and self._fits()))
        size = of_weight.numel() if self.wide and of_weight is not None else 0
        self.rows = rows_a_chunk(call, 2 * size if of_weight is None or of_weight.is_contiguous() else 0, 4 * size)
        several = self.rows < call.input.shape[0]
        self.wide = self.wide and several
        self.sum = of_weight
        if self.wide and of_weight is not None:
            self.sum = torch.empty(of_weight.shape, dtype=torch.float32, device=of_weight.device)
        self.bias_sum = None if self.bias is None else torch.zeros(self.bias.shape, dtype=_wide(self.bias.dtype), device=self.bias.device)
        self.first = True

    def _fits(self) -> bool:
        weight = self.weight
        return weight is not None and (not weight.is_cuda or 4 * weight.numel() <= free_memory(weight.device) // 2)

    @property
    def any(self) -> bool:
        return not (self.input is None and self.weight is None and self.bias is None)

    def memory(self) -> Tensor:
        """Return memory for the logits of a chunk."""
        x, weight, classes = self.layer.input, self.weight, self.layer.weight.shape[0]
        shape = self.rows, room(classes, x)
        size = shape[0] * shape[1]
        if self.wide and weight is not None and weight.dtype == x.dtype and weight.is_contiguous() and size <= weight.numel():
            return weight.view(-1)[:size].view(shape)[:, :classes]
        return new_logits(self.rows, classes, x)

    def add(self, start: int, end: int, logits: Tensor) -> None:
        """Add what the gradient of a chunk's logits makes."""
        x = self.layer.input[start:end]
        if self.input is not None:
            write_product(self.input[start:end], logits, self.layer.weight)
        if self.sum is not None:
            add_transposed(self.sum, logits, x, self.first)
        if self.bias_sum is not None:
            self.bias_sum += sums_of_classes(logits, self.bias_sum.dtype)
        self.first = False

    def finish(self) -> None:
        if self.wide and self.weight is not None and self.sum is not None:
            self.weight.copy_(self.sum)
        if self.bias is not None and self.bias_sum is not None:
            self.bias.copy_(self.bias_sum)


class GradientsByClasses:
    """The same over chunks of classes: the input's gradient is summed, in float32 where it is of half precision."""

    def __init__(self, call: Any, gradients: Sequence[Tensor | None]) -> None:
        self.input, self.weight, self.bias = gradients
        self.layer: Head = call.layer
        self.classes = classes_a_chunk(call)
        of_input = self.sum = self.input
        if of_input is not None and of_input.dtype in HALF:
            self.sum = torch.empty(of_input.shape, dtype=torch.float32, device=of_input.device)

    def memory(self) -> Tensor:
        """Return memory for the logits of a chunk."""
        x = self.layer.input
        return new_logits(x.shape[0], self.classes, x)

    def add(self, start: int, end: int, logits: Tensor) -> None:
        """Add what the gradient of a chunk's logits makes."""
        x, weight, _ = self.layer.of_classes(start, end)
        if self.sum is not None:
            add_products(self.sum, logits, weight, start == 0)
        if self.weight is not None:
            add_transposed(self.weight[start:end], logits, x, True)
        if self.bias is not None:
            self.bias[start:end] = sums_of_classes(logits, _wide(self.bias.dtype))

    def finish(self) -> None:
        if self.input is not None and self.sum is not None and self.sum is not self.input:
            self.input.copy_(self.sum)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Chunks:
    """The template's calls, a chunk each, with their logits in memory: of a sum or of each row, so that the parts add up to the whole."""

    def __init__(self, call: Any) -> None:
        self.call, whole = call, call.whole
        self.each = whole.reduction == "none"
        divisor, scale = (None, whole.loss_scale) if self.each else _divisor(whole)
        self.all = whole._replace(normalizer=divisor, loss_scale=scale, reduction="none" if self.each else "sum")
        self.teacher = call.teacher_layer
        self.by_kernel = call.by_kernel
        self.formulas = FORMULAS[call.loss].kernels if self.by_kernel else None

    def _of_teacher(self, memory: Tensor) -> Tensor | None:
        rows, classes = memory.shape
        return None if self.teacher is None else new_logits(rows, classes, self.teacher.input)

    def by_rows(self, memory: Tensor) -> Iterator[tuple[int, int, Any]]:
        others = self._of_teacher(memory)
        for start, end in _ranges(self.call.input.shape[0], len(memory)):
            logits = logits_of(self.call.layer.of_rows(start, end), memory[: end - start])
            target = None
            if self.teacher is not None and others is not None:
                target = logits_of(self.teacher.of_rows(start, end), others[: end - start])
            yield start, end, of_rows(self.all, start, end, logits, target)

    def by_classes(self, memory: Tensor) -> Iterator[tuple[int, int, Any]]:
        others = self._of_teacher(memory)
        for start, end in _ranges(self.call.head.shape[0], memory.shape[1]):
            logits = logits_of(self.call.layer.of_classes(start, end), memory[:, : end - start])
            target = None
            if self.teacher is not None and others is not None:
                target = logits_of(self.teacher.of_classes(start, end), others[:, : end - start])
            yield start, end, of_classes(self.all, start, end, logits, target)

    @property
    def kind(self) -> Kind:
        """The template's own."""
        return KINDS[type(self.all)]

    @property
    def template(self) -> Any:
        return kernels.of_folder(self.kind.folder) if self.by_kernel else _Reference


def _ranges(whole: int, each: int) -> Iterator[tuple[int, int]]:
    for start in range(0, whole, each):
        yield start, min(start + each, whole)


class _Reference:
    """A template's `forward` and `backward` by its plain-torch reference."""

    @staticmethod
    def forward(call: Any, formulas: Any, gradients: Sequence[Tensor | None], keep: bool, alone: bool = False) -> Several:
        (gradient,) = gradients
        x = call.x.detach().requires_grad_(gradient is not None)
        with torch.set_grad_enabled(gradient is not None):
            results = reference(call._replace(x=x))
        if gradient is not None and results[0] is not None:
            gradient.copy_(torch.autograd.grad(results[0], x)[0])
        kind = KINDS[type(call)]
        return *[None if t is None else t.detach() for t in results], *(None,) * len(kind.kept)

    @staticmethod
    def backward(call: Any, formulas: Any, kept: Several, arriving: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> None:
        x = call.x.detach().requires_grad_()
        with torch.enable_grad():
            results = reference(call._replace(x=x))
        pairs = [(r, g) for r, g in zip(results, arriving, strict=False) if r is not None and g is not None]
        gradients[0].copy_(torch.autograd.grad([r for r, _ in pairs], x, [g for _, g in pairs])[0])


def _divisor(call: Any) -> tuple[Tensor | None, float]:
    """Return what a scalar result is divided by where the device knows it, and multiplied by."""
    if call.normalizer is not None or call.reduction == "sum":
        return call.normalizer, call.loss_scale
    rows, classes = call.x.shape
    if isinstance(call, RowCall):
        return (_counted_rows(call), call.loss_scale) if call.counted else (None, call.loss_scale / rows)
    if isinstance(call, ElementCall):
        if not call.counted:
            return None, call.factor / (rows * classes)
        return which_count(call).sum(dtype=torch.float32) * classes, call.factor
    if not call.counted:
        return None, call.loss_scale / rows
    weight = torch.ones((), device=call.x.device) if call.weight is None else call.weight.to(_wide(call.x.dtype))
    return (weight if call.labels is None else torch.where(call.labels == call.ignore_index, 0.0, weight)).sum(), call.loss_scale


def _counted_rows(call: RowCall) -> Tensor:
    """Return the class weights of the rows not ignored, or their number where all rows count alike."""
    if call.mean_of_rows or (call.weight is None and call.lam is None):
        return which_count(call).sum(dtype=torch.float32)
    return row_weights(call, None if call.weight is None else call.weight.to(_wide(call.x.dtype))).sum()


def forward(call: Any, formulas: None, gradients: Sequence[Tensor | None], keep: bool, alone: bool = False) -> Several:
    """Results and what backward takes, in the order of the call's names; gradients into `gradients` where they are given."""
    sums = Gradients(call, gradients)
    chunks = Chunks(call)
    own = KINDS[type(call)]
    found = {name: _memory_of(shape, call.input) for name, shape in zip((*own.results, *own.kept), call.shapes(keep), strict=True)}
    for start, end, chunk in chunks.by_rows(sums.memory()):
        results = chunks.template.forward(chunk, chunks.formulas, [chunk.x if sums.any else None], keep)
        for name, each in zip((*chunks.kind.results, *chunks.kind.kept), results, strict=True):
            whole = found.get(name)
            if whole is None or each is None:
                continue
            if whole.ndim == 0:
                whole += each
            else:
                _rows_of(name, whole, start, end).copy_(each)
        if sums.any:
            sums.add(start, end, chunk.x)
    sums.finish()
    return tuple(found.values())


def _memory_of(shape: Any, x: Tensor) -> Tensor | None:
    if shape is None:
        return None
    if isinstance(shape, Tensor):
        return torch.empty(shape.shape, dtype=shape.dtype, device=x.device)
    size, dtype = shape
    return (torch.empty if size else torch.zeros)(size, dtype=dtype, device=x.device)


def _rows_of(name: str, t: Tensor, start: int, end: int) -> Tensor:
    return t[:, start:end] if name == "stats" else t[start:end]


def backward(call: Any, formulas: None, kept: Several, arriving: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Write the gradients for what arrives at the results; what is kept may be None, and is then computed again."""
    own = KINDS[type(call)]
    known = dict(zip((*own.kept, *own.saved), kept, strict=True))
    chunks = Chunks(call)
    names = (*chunks.kind.kept, *chunks.kind.saved)
    template = chunks.template
    if goes_by_classes(call, known, gradients):
        by_classes = GradientsByClasses(call, gradients)
        for start, end, chunk in chunks.by_classes(by_classes.memory()):
            which = {"columns": (start, call.head.shape[0])} if isinstance(chunk, RowCall) else {}
            template.backward(chunk, chunks.formulas, [known.get(name) for name in names], arriving, [chunk.x], **which)
            by_classes.add(start, end, chunk.x)
        by_classes.finish()
        return
    sums = Gradients(call, gradients)
    for start, end, chunk in chunks.by_rows(sums.memory()):
        of_chunk: list[Tensor | None] = []
        for name in names:
            t = known.get(name)
            of_chunk.append(None if t is None else _rows_of(name, t, start, end).contiguous())
        given = [t if t is None or t.ndim == 0 else t[start:end] for t in arriving]
        template.backward(chunk, chunks.formulas, of_chunk, given, [chunk.x])
        sums.add(start, end, chunk.x)
    sums.finish()


def goes_by_classes(call: Any, known: Mapping[str, Tensor | None], gradients: Sequence[Tensor | None]) -> bool:
    """Whether backward goes by classes. Kernels do, that know the rows' statistics; where the weight has no gradient, there is no sum to
    avoid, nor where one chunk holds all."""
    rows, classes = call.input.shape[0], call.head.shape[0]
    knows = call.record in (RowCall, DivergenceCall) and known.get("stats") is not None
    return knows and gradients[1] is not None and rows < classes and classes_a_chunk(call) < classes

"""Loss and gradients of a linear layer's logits, a chunk of rows at a time: the logits of all rows never exist at once.

A chunk's logits are one matrix product into memory that every chunk takes in turn. The loss's own kernel goes over them, or its plain-torch
reference where no kernel runs, and writes their gradient G in their place. Two more products make it the gradients of the layer's input,
G · weight, and of its weight, the sum of Gᵀ · input over the chunks.

`forward` does all of that where the gradient is wanted at once: three products. Else `backward` computes the logits again: four.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import KINDS, ElementCall, Kind, RowCall
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.linear.call import Head, part
from lossforge.losses.linear.products import add_product, logits_of, new_logits, room, write_product
from lossforge.losses.reference import reference, row_weights, which_count

Several = tuple[Tensor | None, ...]
MEMORY = 2**30
"""Bytes of logits at a time, where there is enough: below 2,048 rows of a vocabulary, products lose speed on an H200."""
ALIGNED = 64
"""Rows a chunk are a multiple of it, but for the last chunk's."""


@functools.cache
def free_memory(device: torch.device) -> int:
    """Return the bytes that torch could take of a GPU when it was asked first."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def rows_a_chunk(call: Any, spare: int) -> int:
    """Return how many rows are computed at a time. spare: bytes of a gradient that their logits may lie in, until it is written."""
    rows = max(call.input.shape[0], 1)
    if call.chunk:
        return min(call.chunk, rows)
    a_row = room(call.head.shape[0], call.input) * call.input.element_size()
    memory = min(MEMORY, free_memory(call.input.device) // 4) if call.input.is_cuda else MEMORY // 4
    most = max(max(memory, spare) // a_row, ALIGNED)
    chunks = -(-rows // most)
    even = -(-rows // chunks)
    return min(-(-even // ALIGNED) * ALIGNED, rows)


class Gradients:
    """The gradients of a layer's input, weight and bias, summed over chunks; any may be None.

    wide: the weight's gradient is of half precision, and summed in float32. It is written at the end; until then its own memory is free for
    the logits of a chunk.
    """

    def __init__(self, call: Any, gradients: Sequence[Tensor | None]) -> None:
        self.input, self.weight, self.bias = gradients
        self.layer: Head = call.layer
        of_weight = self.weight
        narrow = of_weight is not None and of_weight.dtype in (torch.float16, torch.bfloat16)
        self.wide = narrow and (call.accumulate == 1 or (call.accumulate == -1 and self._fits()))
        spare = of_weight.nbytes if self.wide and of_weight is not None and of_weight.is_contiguous() else 0
        self.rows = rows_a_chunk(call, spare)
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
            add_product(self.sum, logits.t(), x, self.first)
        if self.bias_sum is not None:
            self.bias_sum += logits.sum(0, dtype=self.bias_sum.dtype)
        self.first = False

    def finish(self) -> None:
        if self.wide and self.weight is not None and self.sum is not None:
            self.weight.copy_(self.sum)
        if self.bias is not None and self.bias_sum is not None:
            self.bias.copy_(self.bias_sum)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Chunks:
    """The template's calls, a chunk of rows each: of a sum or of each row, so that the parts add up to the whole."""

    def __init__(self, call: Any, gradients: Gradients) -> None:
        self.call, self.gradients, whole = call, gradients, call.whole
        self.each = whole.reduction == "none"
        divisor, scale = (None, whole.loss_scale) if self.each else _divisor(whole)
        self.all = whole._replace(normalizer=divisor, loss_scale=scale, reduction="none" if self.each else "sum")
        self.teacher = call.teacher_layer
        self.by_kernel = call.by_kernel
        self.formulas = FORMULAS[call.loss].kernels if self.by_kernel else None

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        memory, rows = self.gradients.memory(), self.gradients.rows
        of_teacher = None if self.teacher is None else new_logits(rows, memory.shape[1], self.teacher.input)
        for start in range(0, self.call.input.shape[0], rows):
            end = min(start + rows, self.call.input.shape[0])
            logits = logits_of(self.call.layer, start, end, memory)
            target = None
            if self.teacher is not None and of_teacher is not None:
                target = logits_of(self.teacher, start, end, of_teacher)
            yield start, end, part(self.all, start, end, logits, target)

    @property
    def kind(self) -> Kind:
        """The template's own."""
        return KINDS[type(self.all)]

    @property
    def template(self) -> Any:
        return kernels.of_folder(self.kind.folder) if self.by_kernel else _Reference


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
    chunks = Chunks(call, sums)
    own = KINDS[type(call)]
    found = {name: _memory_of(shape, call.input) for name, shape in zip((*own.results, *own.kept), call.shapes(keep), strict=True)}
    for start, end, chunk in chunks:
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
    sums = Gradients(call, gradients)
    chunks = Chunks(call, sums)
    own = KINDS[type(call)]
    known = dict(zip((*own.kept, *own.saved), kept, strict=True))
    for start, end, chunk in chunks:
        of_rows: list[Tensor | None] = []
        for name in (*chunks.kind.kept, *chunks.kind.saved):
            t = known.get(name)
            of_rows.append(None if t is None else _rows_of(name, t, start, end).contiguous())
        given = [t if t is None or t.ndim == 0 else t[start:end] for t in arriving]
        chunks.template.backward(chunk, chunks.formulas, of_rows, given, [chunk.x])
        sums.add(start, end, chunk.x)
    sums.finish()

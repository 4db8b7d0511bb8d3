"""Loss and gradients of a linear layer's logits, a chunk of rows or of classes at a time.

A chunk's logits are one matrix product into memory that every chunk takes in turn. The loss's own kernel goes over them, or its plain-torch
reference where no kernel runs, and writes their gradient G in their place. Two more products make it the gradients of the layer's input,
G · weight, and of its weight, Gᵀ · input.

`forward` goes by rows, whose softmax it needs, and does all of that where the gradient is wanted at once: three products. Else `backward`
computes the logits again: four. It knows what forward kept of the rows, and so may go by classes. By rows, the weight's gradient is summed
over the chunks, which in half precision takes float32 memory of its size; by classes the input's is, and the weight's is one product
a chunk. So `backward` goes by classes where there are more of them than rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import FROM_WEIGHT, Head
from lossforge.kernels.plans import applied, by_plan, call_key, computed, in_order, layouts, narrowed
from lossforge.kernels.torch_internals import constant_in_graphs
from lossforge.losses.base.record import FusedTemplate, Several, Template
from lossforge.losses.engine.linear.call import of_classes, of_rows
from lossforge.losses.engine.linear.products import (
    HALF,
    UNIT,
    add_products,
    add_transposed,
    logits_of,
    new_logits,
    of_counting_rows,
    room,
    sums_of_classes,
    write_product,
)
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates import TEMPLATES, reference

MEMORY = 2**30
"""Bytes of logits at a time, where there is enough: below 2,048 rows of a vocabulary, products lose speed on an H200."""
SHARE = 32
"""The part of a GPU's memory that exponentials may take, where it is more."""
ALIGNED = 64
"""Rows or classes a chunk are a multiple of it, but for the last chunk's."""
ADDRESS = 16
"""Bytes. Descriptors of the product address memory that begins at a multiple of it."""


@constant_in_graphs
@functools.cache
def free_memory(device: torch.device) -> int:
    """Return the bytes that torch could take of a GPU when it was asked first."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@constant_in_graphs
def whole_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory."""
    whole: int = torch.cuda.get_device_properties(device).total_memory
    return whole


def memory_for(x: Tensor, exponentials: bool = False) -> int:
    """Return the bytes of logits that are computed at a time; for a meta tensor, those of a GPU that has enough.

    exponentials: in place of logits. Where the weight's gradient was summed over chunks of them, a call took 3 to 8 % longer; so on a large
        GPU they have more memory.
    """
    if x.is_meta:
        return MEMORY
    if not x.is_cuda:
        return MEMORY // 4
    most = max(MEMORY, whole_memory(x.device) // SHARE) if exponentials else MEMORY
    return min(most, free_memory(x.device) // 4)


def is_wide(layer: Head) -> bool:
    """Return whether chunks of logits are kept in float32, and their gradient in half precision."""
    return layer.logits != FROM_WEIGHT and layer.input.dtype in HALF


class Rows(NamedTuple):
    """How many rows are computed at a time.

    Attributes:
        chunk: whose logits are in memory at once; 0 where no chunk can have the rows that it must not part.
        group: whose gradient of the logits is, of which the gradients of input and weight are one product each: a chunk, or whole chunks
            where the logits lie beside their gradient.
        summed: whether the weight's gradient is summed over groups, in float32.
    """

    chunk: int
    group: int
    summed: bool


def rows_a_group(call: Any, spare: int, saved: int, wide: bool, exponentials: bool = False, unit: int = ALIGNED) -> int:
    """Return the rows of a group: all of them where that takes no more memory than several groups would.

    Args:
        spare: bytes of the weight's gradient, which the gradient of a group's logits may lie in until the weight's is written.
        saved: bytes saved when one group suffices.
        wide: whether the logits lie beside their gradient, in float32.
        exponentials: whether exponentials stand in place of logits.
        unit: what a group's rows are a multiple of.
    """
    rows = max(call.x.input.shape[0], 1)
    if call.x.chunk:
        return min(call.x.chunk, rows)
    a_row = room(call.x.weight.shape[0], call.x.input) * call.x.input.element_size()
    several = _evenly(rows, max(memory_for(call.x.input, exponentials or wide), spare) // a_row, unit)
    beside = 0 if wide or teacher_of(call) is None else a_row
    of_several = several * beside + (several * a_row if several * a_row > spare else 0)
    return rows if rows * (beside + a_row) <= saved + of_several else several


def rows_of_float32(call: Any) -> int:
    """Return the rows of a chunk whose logits are kept in float32: all, or ALIGNED times a power of 2, which most numbers of tokens are
    multiples of."""
    rows = max(call.x.input.shape[0], 1)
    if call.x.chunk:
        return min(call.x.chunk, rows)
    most = memory_for(call.x.input) // (4 * room(call.x.weight.shape[0], call.x.input))
    return rows if rows <= most else min(ALIGNED * 2 ** max((most // ALIGNED).bit_length() - 1, 0), rows)


def classes_a_chunk(call: Any) -> int:
    """Return how many classes are computed at a time: those of half the memory, as the products take all rows, or of call.x.chunk rows'."""
    rows, classes = max(call.x.input.shape[0], 1), call.x.weight.shape[0]
    if call.x.chunk:
        return min(-(-call.x.chunk * classes // rows // UNIT) * UNIT, classes)
    return _evenly(classes, memory_for(call.x.input) // 2 // (rows * (call.x.input.element_size() + 4 * is_wide(call.x))))


def _evenly(whole: int, most: int, unit: int = ALIGNED) -> int:
    """Return the size of equal parts of `whole`, a multiple of `unit` of at most `most`, but at least `unit`."""
    parts = -(-whole // max(most // unit * unit, unit))
    return min(-(-whole // parts // unit) * unit, whole)


def rows_of_chunks(call: Any, of_weight: Tensor | None, wide: bool, together: int = 1, exponentials: bool = False, chunk: int = 0) -> Rows:
    """Return how many rows are computed at a time.

    Args:
        of_weight: the weight's gradient, or what has its layout and dtype; None where it is not wanted.
        wide, exponentials: as in rows_a_group.
        together: how many rows after one another a chunk must not part.
        chunk: rows of a chunk of logits in float32, where they are decided.
    """
    size, rows = 0, call.x.input.shape[0]
    if of_weight is not None and of_weight.dtype in HALF and call.x.accumulate:
        fits = not of_weight.is_cuda or 4 * of_weight.numel() <= free_memory(of_weight.device) // 2
        size = of_weight.numel() if call.x.accumulate == 1 or fits else 0
    spare = 2 * size if of_weight is None or of_weight.is_contiguous() else 0
    chunk = (chunk or rows_of_float32(call)) if wide else 0
    chunk = chunk // together * together if chunk < rows else chunk
    if wide and (not chunk or of_weight is None):  # a weight without a gradient gains nothing by a group
        return Rows(chunk, chunk, False)
    group = rows_a_group(call, spare, 4 * size, wide, exponentials, chunk or ALIGNED)
    group = group // together * together if group < rows else group
    return Rows(chunk or group, group, group < rows and size > 0)


Summing = Callable[[Tensor, Tensor], Any]
"""Starts to sum a part over processes, and to store the sum in the first tensor: lossforge.losses.engine.parallel.exchange.sum_into."""


class OfInput:
    """The gradient of a layer's input, None where it is not wanted.

    Of classes that are spread over processes it is the sum of theirs, which starts once this process's part is complete. Products that
    follow run beside it.

    Attributes:
        sum: what the products write: the gradient itself, or the part of it, which is never rounded to half precision.
    """

    def __init__(self, gradient: Tensor | None, summing: Summing | None, wide: bool = False) -> None:
        """wide: write a gradient of half precision in float32 first, as a part of the processes' sum is always written."""
        self.gradient, self.summing = gradient, summing
        self.sum, self.exchange = gradient, None
        if gradient is None:
            return
        ready = summing is None or gradient.is_contiguous()
        if not ready or (gradient.dtype in HALF and (wide or summing is not None)):
            self.sum = computed(_empty_wide, gradient)

    def complete(self) -> None:
        """Start to sum over the processes: `sum` is complete."""
        if self.summing is not None and self.gradient is not None and self.sum is not None:
            self.exchange = self.summing(self.gradient, self.sum)

    def finish(self) -> None:
        if self.exchange is not None:
            self.exchange.wait()
        elif self.gradient is not None and self.sum is not None and self.sum is not self.gradient:
            applied(Tensor.copy_, self.gradient, self.sum)


class Gradients:
    """The gradients of a layer's input, weight and bias, summed over groups of rows; any may be None.

    wide: the logits of a chunk are kept in float32, beside their gradient.
    group, summed: of Rows. The weight's gradient is written at the end; until then its own memory is free for the gradient of a group's
    logits, or, of one group that has all rows, for the logits of a chunk in float32.
    gradient: memory of the gradient of a group's logits.
    """

    gradient: Tensor

    def __init__(
        self,
        call: Any,
        gradients: Sequence[Tensor | None],
        exponentials: bool = False,
        together: int = 1,
        summing: Summing | None = None,
        chunk: int = 0,
    ) -> None:
        """together, chunk: of `rows_of_chunks`, which must allow so many rows together."""
        of_input, self.weight, self.bias = gradients
        self.input = OfInput(of_input, summing)
        self.layer: Head = call.x
        self.wide = is_wide(call.x) and not exponentials
        of_weight = self.weight
        self.rows, self.group, self.summed = rows_of_chunks(call, of_weight, self.wide, together, exponentials, chunk)
        self.sum = of_weight
        if self.summed and of_weight is not None:
            self.sum = computed(_empty_wide, of_weight)
        self.bias_sum: Tensor | None = None
        self.first = True

    def memory(self) -> tuple[Tensor, Tensor]:
        """Return memory for the logits of a chunk and for the gradient of a group's: two, where the logits are kept in float32 and a
        gradient is wanted, else the same."""
        x, classes = self.layer.input, self.layer.weight.shape[0]
        if self.input.gradient is None and self.weight is None and self.bias is None:
            self.gradient = new_logits(self.rows, classes, x, torch.float32 if self.wide else None)
            return self.gradient, self.gradient
        spare = self._in_weight(self.group, x.dtype) if self.summed else None
        self.gradient = new_logits(self.group, classes, x) if spare is None else spare
        if not self.wide:
            return self.gradient, self.gradient
        logits = self._in_weight(self.rows, torch.float32) if spare is None else None
        return new_logits(self.rows, classes, x, torch.float32) if logits is None else logits, self.gradient

    def _in_weight(self, rows: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory for logits in that of the weight's gradient, if it is free until the end, and large enough."""
        x, weight, classes = self.layer.input, self.weight, self.layer.weight.shape[0]
        if weight is None or weight.dtype != x.dtype or not weight.is_contiguous() or not (self.summed or self.group >= x.shape[0]):
            return None
        shape = rows, room(classes, x)
        if shape[0] * shape[1] * dtype.itemsize > weight.numel() * weight.element_size():
            return None
        found: Tensor = computed(functools.partial(_first_of, shape, classes, dtype), weight)
        return found

    def add(self, end: int, factors: Tensor | None = None) -> None:
        """Add what the gradient of a group's logits makes, times a factor a row if there are some, once its last chunk has ended."""
        start = (end - 1) // self.group * self.group
        if end - start < self.group and end < self.layer.input.shape[0]:
            return
        logits = narrowed(self.gradient, 0, 0, end - start)
        x = narrowed(self.layer.input, 0, start, end)
        if self.input.sum is not None:
            of_rows = narrowed(self.input.sum, 0, start, end)
            if of_rows.dtype == logits.dtype:
                write_product(of_rows, logits, self.layer.weight)
            else:
                add_products(of_rows, logits, self.layer.weight, True)
            if factors is not None:
                kernels.load("linear.launch").scale_rows(of_rows, of_rows, factors)
            if end == len(self.layer.input):
                self.input.complete()
        if self.sum is not None:
            if factors is None:
                x = of_counting_rows(x)
            else:
                given, x = x, computed(torch.empty_like, x)
                kernels.load("linear.launch").scale_rows(x, given, factors, True)
            add_transposed(self.sum, logits, x, self.first)
        if self.bias is not None:
            sums = sums_of_classes(logits, _wide(self.bias.dtype), factors)
            self.bias_sum = sums if self.bias_sum is None else computed(torch.add, self.bias_sum, sums)
        self.first = False

    def finish(self) -> None:
        if self.summed and self.weight is not None and self.sum is not None:
            applied(Tensor.copy_, self.weight, self.sum)
        if self.bias is not None and self.bias_sum is not None:
            applied(Tensor.copy_, self.bias, self.bias_sum)
        self.input.finish()


class GradientsByClasses:
    """The same over chunks of classes: the input's gradient is summed, in float32 where it is of half precision."""

    def __init__(self, call: Any, gradients: Sequence[Tensor | None], summing: Summing | None = None) -> None:
        of_input, self.weight, self.bias = gradients
        self.input = OfInput(of_input, summing, wide=True)
        self.layer: Head = call.x
        self.classes = classes_a_chunk(call)
        self.x = None if self.weight is None else of_counting_rows(self.layer.input)

    def memory(self) -> tuple[Tensor, Tensor]:
        """Return memory for the logits of a chunk and for their gradient, as Gradients does."""
        x = self.layer.input
        gradient = new_logits(x.shape[0], self.classes, x)
        return (new_logits(x.shape[0], self.classes, x, torch.float32) if is_wide(self.layer) else gradient), gradient

    def add(self, start: int, end: int, logits: Tensor) -> None:
        """Add what the gradient of a chunk's logits makes."""
        if self.input.sum is not None:
            add_products(self.input.sum, logits, narrowed(self.layer.weight, 0, start, end), start == 0)
            if end == len(self.layer.weight):
                self.input.complete()
        if self.weight is not None and self.x is not None:
            add_transposed(narrowed(self.weight, 0, start, end), logits, self.x, True)
        if self.bias is not None:
            applied(Tensor.copy_, narrowed(self.bias, 0, start, end), sums_of_classes(logits, _wide(self.bias.dtype)))

    def finish(self) -> None:
        self.input.finish()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _empty_wide(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=_wide(t.dtype), device=t.device)


def _first_of(shape: tuple[int, int], classes: int, dtype: torch.dtype, t: Tensor) -> Tensor:
    """Return logits in the memory of a tensor's first elements. shape: with the room of their rows."""
    count = shape[0] * shape[1] * dtype.itemsize // t.element_size()
    return t.view(-1)[:count].view(dtype).view(shape)[:, :classes]


class Chunks:
    """The template's calls, a chunk each, with their logits in memory: of a sum or of each row, so that the parts add up to the whole."""

    def __init__(self, call: Any, divisor: Tensor | None, scale: float) -> None:
        """divisor, scale: of `divisor_of`."""
        self.call = call
        self.all = call._replace(normalizer=divisor, loss_scale=scale, reduction="none" if call.reduction == "none" else "sum")
        self.teacher = teacher_of(call)
        self.template: Template[Any] = TEMPLATES[type(call)]
        self.by_kernel = FUSED[type(call)].computed_by_kernel(call)
        self.formulas = FORMULAS[call.loss].kernels if self.by_kernel else None

    def _of_teacher(self, memory: Tensor) -> Tensor | None:
        if self.teacher is None:
            return None
        rows, classes = memory.shape
        return new_logits(rows, classes, self.teacher.input, memory.dtype if is_wide(self.call.x) else None)

    def along(self, axis: int, memory: Tensor, gradient: Tensor) -> Iterator[tuple[int, int, Any, Tensor]]:
        """Yield where each chunk begins and ends, its call, and memory for the gradient of its logits.

        Args:
            axis: 0 for chunks of rows, 1 for chunks of classes.
            memory: of the logits.
            gradient: memory of the gradient of a group's logits, which may be the same. A group is whole chunks.
        """
        others = self._of_teacher(memory)
        part, call_of = ((Head.of_rows, of_rows), (Head.of_classes, of_classes))[axis]
        fusing = FUSED[type(self.call)].fusing
        for start, end in ranges(self.call.x.shape[axis], memory.shape[axis]):
            logits, target = logits_of(part(self.call.x, start, end), narrowed(memory, axis, 0, end - start)), None
            if self.teacher is not None and others is not None:
                target = logits_of(part(self.teacher, start, end), narrowed(others, axis, 0, end - start))
            place = start % gradient.shape[axis]
            to = logits if gradient is memory else narrowed(gradient, axis, place, place + end - start)
            yield start, end, call_of(fusing, self.all, start, end, logits, target), to

    def forward(self, chunk: Any, gradient: Tensor | None, keep: bool) -> Several:
        """Return the results of a chunk and what its backward takes; write the gradient of its logits, perhaps in their place."""
        if not self.by_kernel:
            return _by_reference(chunk, gradient, len(self.template.kept))
        tensors, numbers = self.template.flat(chunk)
        written = () if gradient is None or gradient is chunk.x else (gradient,)
        key = call_key(self.template.name, chunk.loss, tensors, numbers), "forward of a chunk", gradient is None, *layouts(written), keep
        given = *tensors, *written
        found: Several = by_plan(key, given, self.template.launches.forward, lambda: (chunk, self.formulas, [gradient], keep))
        return found

    def backward(self, chunk: Any, kept: Several, grads: Sequence[Tensor | None], gradient: Tensor, **columns: tuple[int, int]) -> None:
        """Write the gradient of a chunk's logits, perhaps in their place."""
        if not self.by_kernel:
            _backward_by_reference(chunk, grads, gradient)
            return
        tensors, numbers = self.template.flat(chunk)
        more = (*kept, *grads) if gradient is chunk.x else (*kept, *grads, gradient)
        key = call_key(self.template.name, chunk.loss, tensors, numbers), *layouts(more), *columns.items()
        backward = functools.partial(self.template.launches.backward, **columns)
        by_plan(key, (*tensors, *more), backward, lambda: (chunk, self.formulas, kept, grads, [gradient]))

    def differentiated(self, chunk: Any, gradient: Tensor, slopes: Callable[[Several], Sequence[Tensor | None]]) -> Several:
        """Return the results of a chunk, and write the gradient of its logits. slopes: from results to their upstream gradients."""
        template = self.template
        results = self.forward(chunk, None, True)
        found = dict(zip((*template.results, *template.kept), results, strict=True))
        kept = tuple([found[name] for name in (*template.kept, *template.saved)])
        self.backward(chunk, kept, slopes(results), gradient)
        return results


def teacher_of(call: Any) -> Head | None:
    """Return the layer that gives a teacher's logits, if one does."""
    return call.target if isinstance(getattr(call, "target", None), Head) else None


def ranges(whole: int, each: int) -> Iterator[tuple[int, int]]:
    for start in range(0, whole, each):
        yield start, min(start + each, whole)


def _by_reference(call: Any, gradient: Tensor | None, kept: int) -> Several:
    """Do what a template's `forward` does by its plain-torch reference."""
    x = call.x.detach().requires_grad_(gradient is not None)
    with torch.set_grad_enabled(gradient is not None):
        results = reference(call._replace(x=x))
    if gradient is not None and results[0] is not None:
        gradient.copy_(torch.autograd.grad(results[0], x)[0])
    return *[None if t is None else t.detach() for t in results], *(None,) * kept


def _backward_by_reference(call: Any, grads: Sequence[Tensor | None], gradient: Tensor) -> None:
    """Do what a template's `backward` does."""
    x = call.x.detach().requires_grad_()
    with torch.enable_grad():
        results = reference(call._replace(x=x))
    pairs = [(r, g) for r, g in zip(results, grads, strict=False) if r is not None and g is not None]
    gradient.copy_(torch.autograd.grad([r for r, _ in pairs], x, [g for _, g in pairs])[0])


def product_of(call: Any) -> Any:
    """Return lossforge.kernels.linear, which computes the loss inside the matrix product, if it takes the call; else None."""
    own = FUSED[type(call)]
    if not (own.fusing.product and own.computed_by_kernel(call)):
        return None
    product = kernels.load("linear.launch")
    return product if product.computes(call) else None


def addressable(layer: Head) -> Head:
    """Return the layer with a weight that the product can address, a copy where it cannot address the layer's own."""
    weight = layer.weight
    if weight.is_contiguous() and weight.data_ptr() % ADDRESS == 0:
        return layer
    return dataclasses.replace(layer, weight=weight.clone(memory_format=torch.contiguous_format))


def by_product(function: Callable[..., Any], call: Any, more: Several, *arguments: Any) -> Any:
    """Return what a function of lossforge.kernels.linear makes of a call, by the call's plan.

    more: the tensors among its further arguments.
    """
    own = FUSED[type(call)]
    tensors, numbers = own.flat(call)
    static = [each for each in arguments if isinstance(each, (bool, int))]
    key = call_key(own.name, call.loss, tensors, numbers), function.__name__, *layouts(more), *static
    return by_plan(key, (*tensors, *more), function, lambda: (call, *arguments))


def divisor_of(call: Any) -> tuple[Tensor | None, float]:
    """Return what a scalar result is divided by where the device knows it, and multiplied by."""
    own = FUSED[type(call)]
    if call.reduction == "none":
        return None, call.loss_scale
    if call.normalizer is not None or call.reduction == "sum":
        return call.normalizer, call.loss_scale
    factor: float = own.fusing.factor(call)
    if not call.counted:
        number: Any = own.fusing.divisor(call)
        return None, factor / number
    if own.fusing.product and own.computed_by_kernel(call):
        return kernels.load(own.module).divisor_of(call), factor
    tensors, numbers = own.flat(call)
    places = [i for i, t in enumerate(tensors) if t is not None]
    counted = functools.partial(_counted, own, call.loss, len(tensors), places, numbers)
    return computed(counted, *[t for t in tensors if t is not None]), factor


def _counted(own: FusedTemplate[Any], loss: str, count: int, places: Sequence[int], numbers: Sequence[Any], *present: Tensor) -> Tensor:
    """Return the divisor of a call, whose tensors are those present in their places among `count`."""
    tensors: list[Tensor | None] = [None] * count
    for place, t in zip(places, present, strict=True):
        tensors[place] = t
    found = own.fusing.divisor(own.of(loss, tuple(tensors), numbers))
    assert isinstance(found, Tensor)
    return found


class Slopes(Protocol):
    """What makes a scalar of the rows' results, with the gradients that arrive at these.

    Attributes:
        together: how many rows after one another a chunk must not part.
        of_entropy: whether a gradient arrives at the entropies, too.
    """

    together: int
    of_entropy: bool

    def of_rows(self, start: int, end: int, results: Several) -> Sequence[Tensor | None]:
        """Return the gradients that arrive at the results of a chunk, which is the rows from start to end."""


def forward(
    call: Any, formulas: None, gradients: Sequence[Tensor | None], keep: bool, alone: bool = False, slopes: Slopes | None = None
) -> Several:
    """Return results and what backward takes, in the order of the template's names; gradients into `gradients` where they are given.

    slopes: of a call with a result a row, what arrives at these. Without it the result is the scalar that is differentiated.
    """
    chunks = Chunks(call, *divisor_of(call))
    own = FUSED[type(call)]
    found = Found(call, keep, (*chunks.template.results, *chunks.template.kept))
    product, differentiated = product_of(call), any(g is not None for g in gradients)
    if product is not None and not differentiated:
        for start, end in ranges(call.x.input.shape[0], product.rows_a_launch(call)):
            chunk = of_rows(own.fusing, chunks.all, start, end, call.x.of_rows(start, end), None)
            found.enter(start, end, by_product(product.forward, chunk, (), chunks.formulas, keep))
        return found.all()
    exponentials = goes_by_exponentials(call, slopes)
    sums = Gradients(call, gradients, exponentials, 1 if slopes is None else slopes.together)
    if exponentials:
        memory, _ = sums.memory()
        assert product is not None
        for start, end in ranges(call.x.input.shape[0], len(memory)):
            chunk = of_rows(own.fusing, chunks.all, start, end, call.x.of_rows(start, end), None)
            to = narrowed(memory, 0, 0, end - start)
            given = chunks.formulas, keep, to, slopes is not None
            *results, factors = by_product(product.exponentials_of, chunk, (to,), *given)
            found.enter(start, end, results)
            if slopes is not None:
                arrived = slopes.of_rows(start, end, results)[0]
                assert arrived is not None
                factors = sloped(factors, arrived)
            sums.add(end, factors)
        sums.finish()
        return found.all()
    for start, end, chunk, to in chunks.along(0, *sums.memory()):
        if slopes is None:
            results = chunks.forward(chunk, to if differentiated else None, keep)
        else:
            results = chunks.differentiated(chunk, to, functools.partial(slopes.of_rows, start, end))
        found.enter(start, end, results)
        if differentiated:
            sums.add(end)
    sums.finish()
    return found.all()


def sloped(factors: Tensor, slopes: Tensor) -> Tensor:
    """Return the rows' factors times what arrives at their losses: nothing in an ignored row, at which anything may arrive."""
    return torch.where(factors == 0, 0.0, factors * slopes)


class Found:
    """Results of all rows and what is kept for backward, by name: those of one chunk, or of several.

    names: of what a chunk gives, in its order.
    """

    def __init__(self, call: Any, keep: bool, names: Sequence[str]) -> None:
        self.call, self.keep, self.names = call, keep, names
        self.whole: dict[str, Tensor | None] | None = None

    def _memory(self) -> dict[str, Tensor | None]:
        x = self.call.x.input
        return {name: shape if shape is None else computed(functools.partial(_memory_of, shape), x) for name, shape in self._asked()}

    def _asked(self) -> Iterator[tuple[str, Any]]:
        """Yield what was asked for by name, with its shape and dtype."""
        own = FUSED[type(self.call)]
        yield from zip((*own.results, *own.kept), own.shapes(self.call, self.keep), strict=True)

    def enter(self, start: int, end: int, results: Sequence[Tensor | None]) -> None:
        """Add the results of some rows to those of all, or copy them there."""
        of_chunk = dict(zip(self.names, results, strict=True))
        if end - start == self.call.x.shape[0]:
            asked = ((name, of_chunk[name], shape) for name, shape in self._asked())
            self.whole = {name: None if t is None or shape is None else _as(shape, t) for name, t, shape in asked}
            return
        self.whole = self._memory() if self.whole is None else self.whole
        for name, whole in self.whole.items():
            each = of_chunk[name]
            if whole is None or each is None:
                continue
            if whole.ndim == 0:
                applied(Tensor.add_, whole, each)
            else:
                applied(Tensor.copy_, _rows_of(name, whole, start, end), each)

    def all(self) -> Several:
        """Return them in the order of the template's names."""
        return tuple((self._memory() if self.whole is None else self.whole).values())


def goes_by_exponentials(call: Any, slopes: Any = None) -> bool:
    """Return whether forward stores exponentials of the logits, of which the gradient of a row is a multiple, but for an entropy's.

    slopes: what has `of_entropy`, of a call whose rows' results an objective takes, with the bits that they have without one.
    """
    product = product_of(call)
    entropy = slopes is not None and slopes.of_entropy
    return product is not None and product.exponentiates(call, same_bits=slopes is not None) and not entropy


def _memory_of(shape: Any, x: Tensor) -> Tensor:
    if isinstance(shape, Tensor):
        return torch.empty(shape.shape, dtype=shape.dtype, device=x.device)
    size, dtype = shape
    return (torch.empty if size else torch.zeros)(size, dtype=dtype, device=x.device)


def _as(shape: Any, t: Tensor) -> Tensor:
    """Return a result in the dtype that it is asked for."""
    dtype = shape.dtype if isinstance(shape, Tensor) else shape[1]
    return t if t.dtype == dtype else computed(functools.partial(torch.Tensor.to, dtype=dtype), t)


def _rows_of(name: str, t: Tensor, start: int, end: int) -> Tensor:
    return narrowed(t, 1 if name == "stats" else 0, start, end)


def backward(
    call: Any,
    formulas: None,
    kept: Several,
    grad_outputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    summing: Summing | None = None,
) -> None:
    """Write the gradients for those of the results; what is kept may be None, and is then computed again."""
    own, chunks = FUSED[type(call)], Chunks(call, *divisor_of(call))
    known = dict(zip((*own.kept, *own.saved), kept, strict=True))
    names = (*chunks.template.kept, *chunks.template.saved)
    stats = known.get("stats")
    if stats is not None and (product := product_of(call)) is not None:
        by_classes = GradientsByClasses(call, gradients, summing)
        entropy = known.get("entropy")
        of_rows = stats, entropy, *grad_outputs
        (shares,) = by_product(product.shares_of, chunks.all, of_rows, chunks.formulas, stats, entropy, grad_outputs)
        ordered, memory = product.ordered(chunks.all), product.new_slopes(call, by_classes.classes)
        for start, end in ranges(call.x.weight.shape[0], by_classes.classes):
            to = narrowed(memory, 1, 0, end - start)
            by_product(product.slopes_of, ordered, (shares, to), grad_outputs[3] is not None, start, shares, to)
            by_classes.add(start, end, to)
        by_classes.finish()
        return
    if goes_by_classes(call, known, gradients):
        by_classes = GradientsByClasses(call, gradients, summing)
        for start, end, chunk, to in chunks.along(1, *by_classes.memory()):
            which = {"columns": (start, call.x.weight.shape[0])} if own.fusing.product else {}
            chunks.backward(chunk, tuple([known.get(name) for name in names]), grad_outputs, to, **which)
            by_classes.add(start, end, to)
        by_classes.finish()
        return
    sums = Gradients(call, gradients, summing=summing)
    for start, end, chunk, to in chunks.along(0, *sums.memory()):
        of_chunk: list[Tensor | None] = []
        for name in names:
            t = known.get(name)
            of_chunk.append(None if t is None else in_order(_rows_of(name, t, start, end)))
        given = [t if t is None or t.ndim == 0 else narrowed(t, 0, start, end) for t in grad_outputs]
        chunks.backward(chunk, tuple(of_chunk), given, to)
        sums.add(end)
    sums.finish()


def goes_by_classes(call: Any, known: Mapping[str, Tensor | None], gradients: Sequence[Tensor | None]) -> bool:
    """Return whether backward goes by classes: kernels that know the rows' statistics do, to avoid the sum of the weight's gradients over
    chunks. A weight without a gradient has no such sum, and neither has a call that one chunk holds. The cross entropy beside a divergence
    needs all classes of a row, because its kernel finds the label's there."""
    if getattr(call, "hard_weight", None) is not None:
        return False
    rows, classes = call.x.input.shape[0], call.x.weight.shape[0]
    knows = FUSED[type(call)].fusing.by_classes and known.get("stats") is not None
    return knows and gradients[1] is not None and rows < classes and classes_a_chunk(call) < classes


class Engine(NamedTuple):
    """What computes fused calls, as a template's launches compute others."""

    forward: Callable[..., Several]
    backward: Callable[..., None]


FUSED: dict[type, FusedTemplate[Any]] = {
    template.call: FusedTemplate.of_template(template, Engine(forward, backward)) for template in TEMPLATES.values() if template.fusing
}
"""The templates of fused calls, by the record of a call."""

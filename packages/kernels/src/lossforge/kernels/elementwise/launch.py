"""Host side of the element-wise template: how its tensors lie in memory, tile sizes, and the launch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, scale_of
from lossforge.kernels.elementwise import targets
from lossforge.kernels.elementwise.call import ElementwiseCall
from lossforge.kernels.elementwise.kernel import WARP, Formula, Inlined, Outputs, Space, Weights, elementwise_kernel
from lossforge.kernels.engine.launch import Launch, addressed, new_like, sum_slots
from lossforge.kernels.engine.layout import Results, Strided, Tensors, broadcast, collapse, constants, per_row, strided
from lossforge.kernels.engine.reduce import Scaling, count, counts_itself
from lossforge.kernels.tiles import COUNTED, PROGRAMS, element_tiles, most_registers


class Geometry(NamedTuple):
    """The launch's elements as (n0, n1, n2), and each tensor's strides there; none where it lies in the order of the elements."""

    n1: int
    n2: int
    columns: int | None
    strides: list[tuple[int, ...]]

    def space(self, n: int, block: int, stages: int = 1) -> Space:
        """Return the n elements in tiles, without columns."""
        return Space(self.n1, self.n2, COLUMNS=None, FLAT=self.flat, BIG=self.big(n, block), BLOCK=block, STAGES=stages)

    @property
    def flat(self) -> bool:
        return not any(self.strides)

    def big(self, n: int, block: int) -> bool:
        """Whether 32 bits do not hold the coordinates of a tile, or an offset that follows from them."""
        n0 = block // self.columns + 2 if self.columns is not None else n // (self.n1 * self.n2)
        reach = max((n0 * s[0] + self.n1 * s[1] + self.n2 * s[2] for s in self.strides if s), default=0)
        return max(reach, 0 if self.columns is not None else n) >= 2**31


def geometry(shape: Sequence[int], strides: Sequence[Sequence[int]], class_dim: int | None) -> Geometry | None:
    """Join the dimensions of tensors of one shape (some broadcast, with stride 0), the class dimension staying the middle one.

    None where more than three dimensions remain.
    """
    if class_dim is None:
        sizes, steps = collapse(shape, strides)
    else:
        before, outer = collapse(shape[:class_dim], [s[:class_dim] for s in strides])
        after, inner = collapse(shape[class_dim + 1 :], [s[class_dim + 1 :] for s in strides])
        if len(before) > 1 or len(after) > 1:
            return None
        sizes = [*(before or [1]), shape[class_dim], *(after or [1])]
        steps = [[*(o or [0]), s[class_dim], *(i or [0])] for o, s, i in zip(outer, strides, inner, strict=True)]
    if len(sizes) > 3:
        return None
    missing = 3 - len(sizes)
    _, n1, n2 = sizes = sizes + [1] * missing
    in_order = [n1 * n2, n2, 1]
    found: list[tuple[int, ...]] = []
    for s in steps:
        step = s + [0] * missing
        found.append(() if all(n == 1 or a == b for n, a, b in zip(sizes, step, in_order, strict=True)) else tuple(step))
    return Geometry(n1, n2, n1 if n2 == 1 and n1 <= 65536 else None, found)


class Wanted(NamedTuple):
    """What a launch is to give beside what the call says: value · scale / divisor, and its gradients into those tensors that are given.

    divisor: 0-d; counted: in its place the launch counts the elements of rows not ignored. grad_output: of each element, or 0-d. Without it
    there is a value: each element's into `out`, else their sum.
    """

    scale: float
    divisor: Tensor | None = None
    counted: bool = False
    grad_output: Tensor | None = None
    out: Tensor | None = None
    gradients: Tensors = ()

    @property
    def upstream(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what arrives at each element, and what arrives at all."""
        return (self.grad_output, None) if self.grad_output is not None and self.grad_output.ndim else (None, self.grad_output)

    @property
    def total(self) -> bool:
        return self.out is None and self.grad_output is None

    def scaling(self, call: Any) -> Scaling:
        return constants(Scaling(self.scale, self.divisor, self.upstream[1], call.empty_is_zero))


C = TypeVar("C", bound=Any)


@dataclass(frozen=True)
class OneLaunch(Generic[C]):
    """Forward and backward of a template whose one launch gives the value, the gradients of the first tensors, or both.

    make: the launch, None where the layouts cannot be addressed. shape: of the values, to which a weight broadcasts. prepare: from a call
    to the one that is launched.
    """

    make: Callable[[C, Wanted, Formulas], Launch | None]
    shape: Callable[[C], Sequence[int]]
    prepare: Callable[[C], C] = lambda call: call

    def start(self, call: C, formulas: Formulas, gradients: Tensors, grad_output: Tensor | None, out: Tensor | None) -> tuple[Tensor, ...]:
        """Launch, and return the total where it was asked for."""
        call, shape = self.prepare(call), self.shape(call)
        wanted = Wanted(scale_of(call, math.prod(shape)), call.normalizer, False, grad_output, out, tuple(gradients))
        return addressed(self.make, call, wanted, formulas, expands={"weight": shape}).start()

    def forward(self, call: C, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
        """Compute the loss as engine.template.Launches says, with a gradient of each tensor."""
        out = new_like(call[1], call.shapes(keep)[0]) if call.reduction == "none" else None
        totals = self.start(call, formulas, gradients, None, out)
        return (totals[0] if out is None else out,)

    def backward(self, call: C, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
        """Write the gradients as engine.template.Launches says."""
        self.start(call, formulas, gradients, grad_outputs[0], None)


def launch_of_tiles(
    kernel: Any, call: Any, wanted: Wanted, given: tuple[Any, Strided, Outputs], formulas: Formulas, space: Space, n: int, **options: int
) -> Launch:
    """Return the launch of a kernel that calls kernel.every_tile for n elements. given: inputs, weight, outputs."""
    special = formulas.special if isinstance(formulas.special, tuple) else (formulas.special,)
    arguments = (
        *given,
        tuple(call.hyper),
        wanted.scaling(call),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula, formulas.terms, formulas.slopes),
        Formula(*special),
        formulas.applies,
        constants(space),
        n,
    )
    grid = (min(triton.cdiv(n, space.BLOCK), PROGRAMS),)
    return Launch(kernel, grid, arguments, totals=int(wanted.total), **options)


GROUP = 8  # neighbouring elements of a row, of which the row's target is read once


def _loader(call: ElementwiseCall) -> Callable[..., Any]:
    if call.target is None:
        return targets.diagonal
    if not call.by_class:
        return targets.dense
    if call.target_b is not None:
        return targets.mixup
    return targets.class_index if call.lam is None else targets.scored


def _make(call: ElementwiseCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    """None where the dimensions of the tensors do not join into three."""
    x, target, group_weight = call.x, call.target, call.group_weight
    class_dim = call.dim % (x.ndim or 1)
    by_row = target is None or call.by_class
    background = formulas.binary
    binary = background if by_row and call.target_b is None and call.lam is None else None
    formulas = binary or formulas
    rows = (target, call.target_b, call.lam) if call.by_class else ()
    upstream, _ = wanted.upstream
    each = (x, target, call.target_b, call.lam, call.weight, call.group, call.parameter, upstream, wanted.out, wanted.gradients[0])
    strides = [
        per_row(t.shape, t.stride(), x.shape, class_dim) if any(t is row for row in rows) else broadcast(t.shape, t.stride(), x.shape)
        for t in each
        if t is not None
    ]
    g = geometry(x.shape, strides, class_dim if by_row else None)
    if g is None:
        return None
    steps = iter(g.strides)
    x_, target_, target_b, lam, weight, group, parameter, *outputs = [strided(t, steps) for t in each]
    n = x.numel()
    columns = None if g.flat and not by_row else g.columns
    read = 2 + sum(t is not None for t in (call.weight, call.parameter, call.target_b, call.lam))
    grouped = by_row and columns is not None and columns % GROUP == 0
    special = formulas.special is not None
    tiles = element_tiles(n, x.itemsize, read, call.by_class, target is None, grouped, special, formulas.heavy)
    told_apart = call.by_class and call.target_b is None and columns is not None and tiles.block // columns + 2 <= WARP.value
    if not told_apart or (x.itemsize == 4 and columns is not None and columns <= tiles.block):
        background = None  # float32 of 80 classes was 2 % slower with both branches on an H200
    inlined = Inlined(
        general=Formula(formulas.formula, background=background and background.formula),
        special=Formula(formulas.special, background=background and background.special),
        applies=formulas.applies,
        load_target=_loader(call),
        BINARY=binary is not None,
    )
    flat, big = g.flat and not by_row, g.big(n, tiles.block)
    space = Space(g.n1, g.n2, COLUMNS=columns, FLAT=flat, BIG=big, BLOCK=tiles.block, G=GROUP if grouped else 1, STAGES=tiles.stages)
    arguments = (
        x_,
        targets.Targets(target_, target_b, lam, x.shape[class_dim] if by_row else 0, call.ignore_index),
        Weights(weight, group, group_weight, group_weight.shape[0] if group_weight is not None else 0),
        parameter,
        Outputs(*outputs),
        tuple(call.hyper),
        wanted.scaling(call),
        sum_slots() if wanted.total else None,
        constants(inlined),
        constants(space),
        n,
        call.offset,
        target.numel() if wanted.counted and target is not None else 0,
    )
    meta = {"COUNT": COUNTED if wanted.counted else 0, "num_warps": tiles.warps, **most_registers(tiles.warps, tiles.programs)}
    return Launch(elementwise_kernel, (min(triton.cdiv(n, tiles.block), PROGRAMS),), arguments, totals=int(wanted.total), **meta)


def _start(call: ElementwiseCall, wanted: Wanted, formulas: Formulas) -> tuple[Tensor, ...]:
    expands = dict.fromkeys(("weight", "group", "parameter"), call.x.shape)
    if call.target is not None:
        expands |= dict.fromkeys(("target_b", "lam"), call.target.shape)
    return addressed(_make, call, wanted, formulas, expands=expands).start()


def _divisor(call: ElementwiseCall) -> Tensor | None:
    if not call.counted:
        return call.normalizer
    assert call.target is not None
    classes = call.x.shape[call.dim]
    return count(call.target, classes, call.ignore_index, target_b=call.target_b, scale=float(classes))


def _scale(call: ElementwiseCall) -> float:
    known = call.mean and call.normalizer is None and not call.counted
    return float(call.factor / call.x.numel() if known else call.factor)


def forward(call: ElementwiseCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
    """Compute the loss and its divisor as engine.template.Launches says."""
    itself = alone and call.counted and call.target is not None and counts_itself(call.target, call.target_b)
    divisor = None if itself else _divisor(call)
    out = new_like(call.x, call.x) if call.reduction == "none" else None
    total = _start(call, Wanted(_scale(call), divisor, itself, out=out, gradients=tuple(gradients)), formulas)
    return total[0] if out is None else out, divisor if call.counted else None


def backward(call: ElementwiseCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """Write the gradient as engine.template.Launches says."""
    divisor = _divisor(call) if kept[0] is None else kept[0]
    _start(call, Wanted(_scale(call), divisor, grad_output=grad_outputs[0], gradients=tuple(gradients)), formulas)

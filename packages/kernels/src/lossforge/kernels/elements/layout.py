"""How the tensors of a launch by tiles of elements, or of rows of several numbers, lie in memory; and such a launch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.elementwise.kernel import Formula, Outputs, Space
from lossforge.kernels.engine.launch import Launch, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, broadcast, collapse, constants, strided
from lossforge.kernels.engine.template import Wanted
from lossforge.kernels.tiles import PROGRAMS


class Wide(NamedTuple):
    """layout.Strided over rows of several numbers, such as boxes. step: stride of the numbers; None: a row's are adjacent in memory."""

    ptr: Any = None
    s0: int | None = None
    s1: int | None = None
    s2: int | None = None
    step: int | None = None


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


def arrange(boxes: Sequence[Any], pairwise: Sequence[Any]) -> tuple[Geometry, list[int | None]] | None:
    """Return the launch's pairs as (n0, n1, n2) with each tensor's strides there, and the coordinates' strides of boxes not in order.

    None where more than three dimensions remain. So for rows of any width in place of boxes.
    """
    *shape, width = boxes[0].shape
    strides: list[Sequence[int]] = []
    steps: list[int | None] = []
    for t in boxes:
        pair, step = t.stride()[:-1], t.stride()[-1]
        whole = step == 1 and all(n == 1 or s % width == 0 for n, s in zip(shape, pair, strict=True))
        strides.append([s // width for s in pair] if whole else pair)
        steps.append(None if whole else step)
    strides += [broadcast(t.shape, t.stride(), shape) for t in pairwise]
    g = geometry(shape, strides, None)
    if g is None:
        return None
    for i, step in enumerate(steps):
        if step is None and g.strides[i]:  # boxes of neighbours, in another order than the launch's
            g.strides[i] = tuple(width * s for s in g.strides[i])
            steps[i] = 1
    return g._replace(columns=None), steps


class Arranged(NamedTuple):
    """Tensors of rows: those with a width, in their order, and those with one element a row; an absent one has no pointer."""

    geometry: Geometry
    wide: list[Wide]
    by_row: list[Strided]
    furthest: int  # the largest stride along a width


def arranged(wide: Tensors, by_row: Tensors) -> Arranged | None:
    """Return the tensors as a kernel sees them; None where their dimensions do not join into three."""
    found = arrange([t for t in wide if t is not None], [t for t in by_row if t is not None])
    if found is None:
        return None
    g, steps = found
    strides, step = iter(g.strides), iter(steps)
    rows = [Wide() if t is None else Wide(*strided(t, strides), next(step)) for t in wide]
    return Arranged(g, rows, [strided(t, strides) for t in by_row], max(s or 0 for s in steps))


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

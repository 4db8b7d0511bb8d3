"""The memory layout of rows: what the launches of the row family read and write, and what decides their tiles."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lossforge.kernels.call import rows_of, scale_of
from lossforge.kernels.classes.rowwise.sweep import Config
from lossforge.kernels.engine.launch import Launch, aligned
from lossforge.kernels.engine.layout import Strided, broadcast, collapse, per_row
from lossforge.kernels.tiles import BackwardTiles, RowTiles, most_registers

Steps = tuple[int, int, int]
"""Strides of outer, rows and classes."""


def as_rows(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, int, int, list[Steps]] | None:
    """Join the dimensions of tensors that were expanded to one shape (N, C, d…).

    Returns (outer, rows, classes, each tensor's strides), or None if N, d… do not join into two dimensions.
    """
    n, classes, *rest = shape
    sizes, steps = collapse([n, *rest], [[s[0], *s[2:]] for s in strides], reorder=False)
    if len(sizes) > 2:
        return None
    missing = 2 - len(sizes)
    outer, rows = [1] * missing + sizes
    steps = [[0] * missing + step for step in steps]
    return outer, rows, classes, [(o, r, s[1]) for (o, r), s in zip(steps, strides, strict=True)]


class RowLayout(NamedTuple):
    """The rows of a launch.

    Attributes:
        outer: indices of the outer dimension.
        rows: of an outer index.
        classes: of a row.
        strided: each tensor with its strides, without a pointer if it is absent.
        adjacent: whether neighbouring rows, not classes, are adjacent in memory.
        wide: whether offsets within a row, or the number of rows, need 64 bits.
        align: elements in 16 bytes, if all tensors can be read and written in such vectors; else 1.
        shift: tiles begin at the last multiple of it at or before class 0.
    """

    outer: int
    rows: int
    classes: int
    strided: list[Strided]
    adjacent: bool
    wide: bool
    align: int
    shift: int

    def launch(
        self, kernel: Any, tiles: RowTiles | BackwardTiles, arguments: tuple[Any, ...], counted: int = 0, totals: int = 0, **constants: Any
    ) -> Launch:
        """Return the launch of a kernel over these rows. With BackwardTiles the grid's second axis runs over the tiles of a row.

        Args:
            kernel: whose last arguments are the rows of an outer index, and the programs for them.
            tiles: of its rows and classes.
            arguments: those before these two.
            counted: number of class indices that a forward launch counts itself.
            totals: sums that the launch returns.
            constants: other fields of its Config.
        """
        blocks = -(-self.rows // tiles.rows)
        grid: tuple[int, ...] = (self.outer * blocks,)
        arguments = (*arguments, self.rows, blocks)
        limits: dict[str, int] = {}
        if isinstance(tiles, RowTiles):
            shift = 1 if tiles.one else self.shift
            limits = most_registers(tiles.warps, tiles.programs)
            arguments = (*arguments, counted)
            constants |= {"VEC": tiles.vector, "ONE_TILE": tiles.one, "COUNT": counted > 0}
        else:
            shift = 1 if tiles.rows > 1 else self.shift
            grid = (*grid, -(-(self.classes + shift - 1) // tiles.classes))
            constants["BACKWARD"] = True
        multiple = 16 if self.adjacent and self.rows % 16 == 0 else 1
        config = Config(tiles.rows, tiles.classes, WIDE=self.wide, ALIGN=self.align, SHIFT=shift, MULTIPLE=multiple, **constants)
        return Launch(kernel, grid, arguments, totals=totals, config=config, num_warps=tiles.warps, **limits)


class Wanted(NamedTuple):
    """What a launch takes and gives beside call and Outputs.

    Attributes:
        divisor: 0-d, or None.
        counted: number of class indices that the launch counts in its place, or 0.
        gradient: the tensor that it writes, or None.
    """

    divisor: Tensor | None
    counted: int
    gradient: Tensor | None


def row_layout(shape: Sequence[int], tensors: Sequence[Any], read: int, written: Any) -> RowLayout | None:
    """Lay out tensors (N, C, d…) of `shape`, or without C, or with another number in its place.

    Args:
        shape: of the logits.
        tensors: of the launch; None if absent.
        read: how many tensors, from the first on, have the classes.
        written: one of the tensors, a gradient, which has the classes too.

    Returns:
        The layout; None if the dimensions other than the classes do not join into two.
    """
    strides: list[Sequence[int]] = []
    for t in tensors:
        if t is not None:
            whole = t.ndim == len(shape)
            expanded = (*shape[:1], t.shape[1], *shape[2:]) if whole else shape
            strides.append(broadcast(t.shape, t.stride(), expanded) if whole else per_row(t.shape, t.stride(), shape, 1))
    joined = as_rows(shape, strides)
    if joined is None:
        return None
    outer, rows, classes, steps = joined
    each = iter(steps)
    found = [None if t is None else next(each) for t in tensors]
    of_classes = [(t, s) for i, (t, s) in enumerate(zip(tensors, found, strict=True)) if s is not None and (i < read or t is written)]
    align, shift = _alignment(of_classes, classes)
    return RowLayout(
        outer=outer,
        rows=rows,
        classes=classes,
        strided=[Strided() if s is None else Strided(t, *s) for t, s in zip(tensors, found, strict=True)],
        adjacent=steps[0][1] == 1 and steps[0][2] != 1 and rows > 1,
        # a tile may extend beyond the row, and a block of rows beyond the last row
        wide=max(max(s[2] for s in steps) * (classes + 65536), rows + 65536) >= 2**31,
        align=align,
        shift=shift,
    )


def _alignment(tensors: Sequence[tuple[Any, Steps]], classes: int) -> tuple[int, int]:
    """Return (align, shift) for tensors that have the classes, from their strides as rows."""
    vector = 16 // min(t.itemsize for t, _ in tensors)
    if not all(aligned(t) and strides[2] == 1 for t, strides in tensors):
        return 1, 1
    _, own = tensors[0]
    if all(n % vector == 0 for n in (classes, *[s for _, strides in tensors for s in strides[:2]])):
        return vector, 1
    same_shift = all((own[k] - strides[k]) % vector == 0 for _, strides in tensors for k in (0, 1))
    return 1, vector if same_shift and classes > 8192 else 1


def mean_of_rows(call: Any) -> float:
    """Return the factor of a loss, divided by the number of rows if that is its divisor."""
    return scale_of(call, rows_of(call.x))

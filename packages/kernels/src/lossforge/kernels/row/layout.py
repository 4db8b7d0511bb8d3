"""How rows lie in memory: what the launches of the row family read and write, and what their tiles follow from."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lossforge.kernels.call import DivergenceCall, RowCall, TopKCall
from lossforge.kernels.engine.launch import Plan, aligned
from lossforge.kernels.engine.layout import Strided, broadcast, collapse, per_row
from lossforge.kernels.row.rows import Logits
from lossforge.kernels.row.sweep import Config
from lossforge.kernels.tiles import BackwardTiles, RowTiles, most_registers

Steps = tuple[int, int, int]
"""Strides of outer, rows, classes."""


def as_rows(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, int, int, list[Steps]] | None:
    """Join the dimensions of tensors already expanded to one shape (N, C, d…): (outer, rows, classes, each tensor's strides there).

    None where N, d… join into more than two dimensions.
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
    """The rows of a launch. strided: of each tensor, without a pointer where it is absent.

    align: 16 bytes in elements where memory is read and written so, 1 where nothing is known. shift: tiles begin at a multiple of it
    before class 0. wide: 32 bits do not hold the offsets within a row, or the number of rows.
    """

    outer: int
    rows: int
    classes: int
    strided: list[Strided]
    adjacent: bool
    wide: bool
    align: int
    shift: int

    def logits(self, x: Strided) -> Logits:
        return Logits(x.ptr, x.s0, x.s1, x.s2, self.classes)

    def plan(
        self, kernel: Any, tiles: RowTiles | BackwardTiles, arguments: tuple[Any, ...], counted: int = 0, totals: int = 0, **constants: Any
    ) -> Plan:
        """Plan a kernel over these rows; with BackwardTiles the grid's second axis walks the classes.

        The kernel's arguments are followed by the rows of an outer index and the programs that they take. counted: class indices that a
        forward launch counts itself.
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
        return Plan(kernel, grid, arguments, totals=totals, config=config, num_warps=tiles.warps, **limits)


def row_layout(shape: Sequence[int], tensors: Sequence[Any], read: int, written: Any) -> RowLayout | None:
    """Lay out tensors (N, C, d…) of `shape`, or without C, or with another number in its place; the first `read` have the classes.

    written: one of them, a gradient, which has the classes too. None where the dimensions beside the classes do not join into two.
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
        # a tile may reach beyond the row, and a block of rows beyond the rows
        wide=max(max(s[2] for s in steps) * (classes + 65536), rows + 65536) >= 2**31,
        align=align,
        shift=shift,
    )


def _alignment(tensors: Sequence[tuple[Any, Steps]], classes: int) -> tuple[int, int]:
    """Return (align, shift) for tensors that have the classes, with their strides as rows."""
    vector = 16 // min(t.itemsize for t, _ in tensors)
    if not all(aligned(t) and strides[2] == 1 for t, strides in tensors):
        return 1, 1
    _, own = tensors[0]
    if all(n % vector == 0 for n in (classes, *[s for _, strides in tensors for s in strides[:2]])):
        return vector, 1
    alike = all((own[k] - strides[k]) % vector == 0 for _, strides in tensors for k in (0, 1))
    return 1, vector if alike and classes > 8192 else 1


def scale_of(call: RowCall | DivergenceCall | TopKCall) -> float:
    """Return what a loss is multiplied by, over its divisor where the host knows it: the number of rows."""
    rows = call.x.numel() // call.x.shape[1]
    known = call.reduction == "mean" and call.normalizer is None and not call.counted
    return float(call.loss_scale / rows if known else call.loss_scale)

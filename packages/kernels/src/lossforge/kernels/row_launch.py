"""Host side of the row-wise template: how rows lie in memory, tile sizes, and the launches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.launch import launch
from lossforge.kernels.layout import Strided, collapse
from lossforge.kernels.reduce import new_sum
from lossforge.kernels.rows import Labels, Logits
from lossforge.kernels.rowwise import Outputs, Upstream, rowwise_backward_kernel, rowwise_kernel


class Tiles(NamedTuple):
    """Rows and classes of a tile, whether a row fits one, and warps."""

    rows: int
    classes: int
    one: bool
    warps: int


def forward_tiles(rows: int, classes: int, rows_adjacent: bool, dense: bool) -> Tiles:
    """rows_adjacent: neighbouring rows, not classes, lie next to each other in memory, as in (N, C, H, W).

    dense: targets of all classes are summed too, which takes twice the registers.
    """
    whole = triton.next_power_of_2(classes)
    if rows_adjacent:
        tile = min(whole, 32 if dense else 64)
        return Tiles(min(triton.next_power_of_2(rows), max(32, (2048 if dense else 4096) // tile)), tile, whole == tile, 4)
    if whole <= 8192:
        tile_rows = min(triton.next_power_of_2(rows), max(1, 2048 // whole))
        elements = whole * tile_rows
        return Tiles(tile_rows, whole, True, 4 if elements <= 2048 else 8 if elements <= 4096 else 16)
    return Tiles(1, 4096, False, 16) if classes <= 49152 else Tiles(1, 8192, False, 32)


def backward_tiles(rows: int, classes: int, rows_adjacent: bool) -> Tiles:
    whole = triton.next_power_of_2(classes)
    if rows_adjacent:
        tile = min(whole, 64)
        return Tiles(min(triton.next_power_of_2(rows), max(32, 4096 // tile)), tile, whole == tile, 4)
    tile = min(whole, 4096)
    return Tiles(min(triton.next_power_of_2(rows), max(1, 2048 // tile)), tile, whole == tile, 4 if tile <= 2048 else 8)


class Rows(NamedTuple):
    """Tensors of shape (N, C, d…) as (outer, rows, classes), with the strides of each."""

    outer: int
    rows: int
    classes: int
    strides: list[tuple[int, int, int]]


def as_rows(tensors: Sequence[Tensor]) -> Rows | None:
    """Tensors already expanded to one shape (N, C, d…). None where N, d… join into more than two dimensions."""
    n, classes, *rest = tensors[0].shape
    strides = [t.stride() for t in tensors]
    sizes, steps = collapse([n, *rest], [[s[0], *s[2:]] for s in strides], reorder=False)
    if len(sizes) > 2:
        return None
    missing = 2 - len(sizes)
    outer, rows = [1] * missing + sizes
    steps = [[0] * missing + step for step in steps]
    return Rows(outer, rows, classes, [(o, r, s[1]) for (o, r), s in zip(steps, strides, strict=True)])


class Spec(NamedTuple):
    """A loss over rows, but for its tensors' memory: the formula and what every launch of it must know.

    target: (N, d…) integers, or probabilities of the shape of x. divisor: 0-d, on the device; total and values are multiplied by
    scale / divisor.
    """

    phi: Callable[..., Any]
    target: Tensor
    target_b: Tensor | None = None
    lam: Tensor | None = None
    weight: Tensor | None = None
    hyper: tuple[float, ...] = ()
    ignore_index: int = -100
    smoothing: float | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    z_loss: float | None = None
    scale: float = 1.0
    divisor: Tensor | None = None
    empty_is_zero: bool = False


class Results(NamedTuple):
    """What was asked of a forward launch: totals 0-d, the rest per row (N, d…), all float32 but `correct`; stats for backward."""

    loss: Tensor | None
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    stats: Tensor | None


class Prepared(NamedTuple):
    x: Logits
    tensors: tuple[Strided, ...]  # class indices, those of a pair, λ, probabilities, gradient
    labels: Labels
    outer: int
    rows_adjacent: bool
    wide: bool


def _prepare(spec: Spec, x: Tensor, gradient: Tensor | None) -> Prepared | None:
    dense = spec.target if spec.target.is_floating_point() else None
    a = None if dense is not None else spec.target
    per_row = [None if t is None else t.unsqueeze(1).expand(x.shape) for t in (a, spec.target_b, spec.lam)]
    tensors = [*per_row, dense, gradient]
    rows = as_rows([x, *(t for t in tensors if t is not None)])
    if rows is None:
        return None
    own, *others = rows.strides
    strides = iter(others)
    strided = tuple(Strided() if t is None else Strided(t, *next(strides)) for t in tensors)
    logits = Logits(x, *own, rows.rows, rows.classes, spec.logit_scale, spec.softcap)
    wide = max(s[2] for s in rows.strides) * (rows.classes + 65536) >= 2**31  # a tile may reach beyond the row
    labels = Labels(spec.weight, spec.ignore_index, spec.smoothing)
    return Prepared(logits, strided, labels, rows.outer, own[1] == 1 and own[2] != 1 and rows.rows > 1, wide)


def _joined(spec: Spec, x: Tensor, gradient: Tensor | None) -> tuple[Spec, Prepared, Tensor | None]:
    """Prepare a launch; where strides cannot be joined, of contiguous copies, with a gradient to copy back."""
    prepared = _prepare(spec, x, gradient)
    if prepared is not None:
        return spec, prepared, gradient
    gradient = None if gradient is None else torch.empty(x.shape, dtype=gradient.dtype, device=x.device)
    copies = {name: t.contiguous() for name in ("target", "target_b", "lam") if (t := getattr(spec, name)) is not None}
    spec = spec._replace(**copies)
    prepared = _prepare(spec, x.contiguous(), gradient)
    assert prepared is not None
    return spec, prepared, gradient


def rowwise(
    spec: Spec,
    x: Tensor,
    *,
    total: bool = True,
    z_loss: bool = False,
    lse: bool = False,
    entropy: bool = False,
    correct: bool = False,
    stats: bool = False,
    gradient: Tensor | None = None,
) -> Results:
    """One launch over logits x (N, C, d…): the loss as a total or per row, the asked further outputs, and the gradient into `gradient`."""
    spec, p, written = _joined(spec, x, gradient)
    tiles = forward_tiles(p.x.rows, p.x.classes, p.rows_adjacent, spec.target.is_floating_point() or spec.smoothing is not None)
    blocks = triton.cdiv(p.x.rows, tiles.rows)
    programs = p.outer * blocks

    def per_row(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty((x.shape[0], *x.shape[2:]), dtype=dtype, device=x.device) if wanted else None

    out = Outputs(
        per_row(not total),
        per_row(z_loss and not total),
        per_row(lse),
        per_row(entropy),
        per_row(correct, torch.bool),
        torch.empty((4, p.outer * p.x.rows), dtype=torch.float32, device=x.device) if stats else None,
    )
    sum = new_sum(programs, x.device) if total else None
    z_sum = new_sum(programs, x.device, second=True) if total and z_loss else None
    launch(
        rowwise_kernel,
        (programs,),
        x.device,
        p.x,
        *p.tensors,
        p.labels,
        out,
        sum,
        z_sum,
        spec.divisor,
        spec.hyper,
        spec.z_loss,
        spec.scale,
        blocks,
        phi=spec.phi,
        ENTROPY=entropy,
        ALL_ROWS=lse or entropy,
        EMPTY_IS_ZERO=spec.empty_is_zero,
        ONE_TILE=tiles.one,
        WIDE=p.wide,
        BR=tiles.rows,
        BC=tiles.classes,
        num_warps=tiles.warps,
    )
    if gradient is not None and written is not None and written is not gradient:
        gradient.copy_(written)
    return Results(
        out.loss if sum is None else sum.total, out.z_loss if z_sum is None else z_sum.total, out.lse, out.entropy, out.correct, out.stats
    )


def rowwise_backward(
    spec: Spec,
    x: Tensor,
    stats: Tensor,
    *,
    loss: Tensor | None,
    z_loss: Tensor | None = None,
    lse: Tensor | None = None,
    entropy: Tensor | None = None,
    row_entropy: Tensor | None = None,
    gradient: Tensor,
) -> None:
    """Write the gradient for the gradients that arrive at a launch's outputs: 0-d for totals, else per row. row_entropy: as returned."""
    spec, p, written = _joined(spec, x, gradient)
    tiles = backward_tiles(p.x.rows, p.x.classes, p.rows_adjacent)
    blocks = triton.cdiv(p.x.rows, tiles.rows)

    def arriving(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.ndim == 0 else t.contiguous()

    upstream = Upstream(
        arriving(loss),
        0 if loss is None or loss.ndim == 0 else 1,
        arriving(z_loss),
        0 if z_loss is None or z_loss.ndim == 0 else 1,
        arriving(lse),
        arriving(entropy),
    )
    launch(
        rowwise_backward_kernel,
        (p.outer * blocks, triton.cdiv(p.x.classes, tiles.classes)),
        x.device,
        p.x,
        *p.tensors,
        p.labels,
        stats,
        row_entropy,
        upstream,
        spec.divisor,
        spec.hyper,
        spec.z_loss,
        spec.scale,
        blocks,
        phi=spec.phi,
        EMPTY_IS_ZERO=spec.empty_is_zero,
        WIDE=p.wide,
        BR=tiles.rows,
        BC=tiles.classes,
        num_warps=tiles.warps,
    )
    if written is not None and written is not gradient:
        gradient.copy_(written)

"""Host side of the similarity template: tiles, the launches, and the matrix products of the gradient.

The gradient of the similarities is stored a block of rows at a time, in memory that every block takes in turn. Two products make it the
gradients of a and of b, whose sum over the blocks is in float32.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT, scale_of
from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, constants
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.features.calls import NONE, SimilarityCall
from lossforge.kernels.features.similarity.kernel import (
    Affine,
    Config,
    Given,
    Guide,
    Kept,
    Labels,
    Parts,
    Side,
    Slopes,
    similarity_gradient_kernel,
    similarity_join_kernel,
    similarity_kernel,
)
from lossforge.kernels.features.similarity.pair_sums import (
    Numbers,
    extremes_kernel,
    pair_sums_gradient_kernel,
    pair_sums_join_kernel,
    pair_sums_kernel,
)
from lossforge.kernels.plans import computed, in_order
from lossforge.kernels.product import add_product
from lossforge.kernels.tiles import FeatureTiles, feature_tiles, most_registers

MEMORY = 2**29
"""Bytes of the block of rows whose gradient is stored."""
UNIT = 16
"""The distance between rows is a multiple of so many elements, so that Triton and tensor cores read whole vectors."""
FEATURES = ("a", "b", "row_guide", "column_guide")
OF_ROWS = ("a", "row_labels", "row_guide", "threshold")
"""The tensors of a call that have a row each of x."""
JOIN = 64
"""Rows or columns that a program joins."""


def _features(t: Tensor) -> Strided:
    return Strided(t, t.stride(0) if t.shape[0] > 1 else t.shape[1])


def _in_tiles(t: Tensor) -> Tensor:
    """Return features in memory that tiles read in whole, aligned vectors: with zeros up to a positive multiple of their depth."""
    depth = feature_tiles(t.itemsize).depth
    missing = max(triton.cdiv(t.shape[1], depth), 1) * depth - t.shape[1]
    if missing:
        return computed(functools.partial(F.pad, pad=(0, missing)), t)
    return t if t.stride(1) == 1 and (t.stride(0) % UNIT == 0 or len(t) == 1) else computed(_copied, t)


def _copied(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _config(call: SimilarityCall, tiles: FeatureTiles, **others: bool) -> Any:
    return constants(
        Config(
            BR=tiles.rows,
            BC=tiles.columns,
            BK=tiles.depth,
            GROUP=tiles.group,
            SKIP=call.skip,
            SIGMOID=call.loss == "sigmoid",
            COLUMNS=call.loss == "both_sides",
            LABELLED=call.labelled,
            DECOUPLED=call.decoupled,
            GUIDED=call.threshold is not None,
            HARD=call.hardness != 0.0,
            CIRCLE=call.loss == "circle",
            MINED=call.mined,
            **others,
        )
    )


def _affine(call: SimilarityCall) -> Affine:
    return Affine(call.logit_scale, call.logit_bias, call.scale, call.bias, call.hardness)


def _given(call: SimilarityCall) -> Given:
    """Return what both kernels read."""
    labels, guide = Labels(call.row_labels, call.column_labels), Guide()
    if call.row_guide is not None and call.column_guide is not None:
        guide = Guide(_features(call.row_guide), _features(call.column_guide), call.threshold, call.row_guide.shape[1])
    return Given(_features(call.a), _features(call.b), _affine(call), labels, guide, call.a.shape[1])


def _sizes(call: SimilarityCall) -> tuple[int, ...]:
    """Return rows, columns, the column of the first row's pair, and how many columns OTHERS speaks of."""
    rows, columns = call.a.shape[0], call.b.shape[0]
    return rows, columns, max(-rows, min(call.offset, columns)), call.pairs  # 32 bits; beyond these, no row has a pair


def _programs(call: SimilarityCall, tiles: FeatureTiles) -> tuple[int, int]:
    """Return tiles down and across."""
    return triton.cdiv(call.a.shape[0], tiles.rows), triton.cdiv(call.b.shape[0], tiles.columns)


def _options(tiles: FeatureTiles, lean: bool) -> dict[str, int]:
    """Return the compiler's options. lean: whether the registers of half a multiprocessor hold a program."""
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, **most_registers(tiles.warps, tiles.programs if lean else 1)}


def _is_lean(call: SimilarityCall) -> bool:
    return call.skip == NONE and call.threshold is None and not call.decoupled and not call.hardness


def _prepared(call: SimilarityCall) -> SimilarityCall:
    """Return the call with tensors that the kernels address."""
    vectors: dict[str, Any] = {name: in_order(getattr(call, name)) for name in ("row_labels", "column_labels", "threshold")}
    features: dict[str, Any] = {name: None if (t := getattr(call, name)) is None else _in_tiles(t) for name in FEATURES}
    return call._replace(**vectors, **features)


def _compute(call: SimilarityCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    if call.in_pairs:
        return _compute_pair_sums(call)
    rows, columns = call.a.shape[0], call.b.shape[0]
    down, across = _programs(call, feature_tiles(call.a.itemsize))
    both, softmax = call.loss == "both_sides", call.loss != "sigmoid"
    own = new_like(call.a, ((rows,), FLOAT) if softmax and not call.labelled else None)
    row_parts, column_parts = _parts(call, own)
    each, *kept = call.shapes(True)
    row_lse, share, column_lse = [new_like(call.a, shape) for shape in kept]
    loss, of_columns = [new_like(call.a, each if one and call.reduction == "none" else None) for one in (True, both)]
    total = _join(call, Side(row_parts, own, row_lse, share, loss), (rows, across, 0, rows))
    if both:
        other = _join(call, Side(column_parts, own, column_lse, None, of_columns), (columns, down, -call.offset, rows))
        total = computed(torch.add, total, other)
    if loss is not None and of_columns is not None:
        loss = computed(torch.add, loss, of_columns)
    return (total if loss is None else loss,), (row_lse, share, column_lse)


def _compute_pair_sums(call: SimilarityCall) -> tuple[Tensors, Tensors]:
    rows = call.a.shape[0]
    tiles = feature_tiles(call.a.itemsize)
    down, across = _programs(call, tiles)
    a, b, labels, numbers = _pairs(call)
    sizes, options = (*_sizes(call)[:3], call.a.shape[1], _config(call, tiles)), _options(tiles, False)
    extremes = None
    if call.mined:
        of_tiles = new_like(call.a, ((2, across, rows), FLOAT))
        Launch(extremes_kernel, (down * across,), (a, b, labels, of_tiles, *sizes), **options).start()
        extremes = computed(_extremes, of_tiles)
    parts = new_like(call.a, ((4, across, rows), FLOAT))
    Launch(pair_sums_kernel, (down * across,), (a, b, labels, numbers, extremes, parts, *sizes), **options).start()
    each, shape, *_ = call.shapes(True)
    lse, loss = new_like(call.a, shape), new_like(call.a, each if call.reduction == "none" else None)
    arguments = (Side(parts, lse=lse, loss=loss), numbers, sum_slots(), call.normalizer, scale_of(call, rows), rows, across)
    constants = call.loss == "circle", call.empty_is_zero, JOIN
    (total,) = Launch(pair_sums_join_kernel, (triton.cdiv(rows, JOIN),), (*arguments, *constants), totals=1, num_warps=4).start()
    return (total if loss is None else loss,), (lse, extremes, None)


def _extremes(of_tiles: Tensor) -> Tensor:
    """Return the smallest of the first plane, and the largest of the second, of all tiles."""
    return torch.stack([of_tiles[0].amin(0), of_tiles[1].amax(0)])


def _pairs(call: SimilarityCall) -> tuple[Any, ...]:
    """Return the arguments that the kernels of pair_sums.py share."""
    given = _given(call)
    return given.a, given.b, given.labels, Numbers(*call.hyper)._replace(negative_ptr=call.negative_weight)


def _parts(call: SimilarityCall, own: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the sums of each tile, of rows and of columns. Store the product of each row's pair in `own` where the columns have it."""
    rows, columns = call.a.shape[0], call.b.shape[0]
    tiles = feature_tiles(call.a.itemsize)
    down, across = _programs(call, tiles)
    planes = 1 if call.loss == "sigmoid" else 4 if call.labelled else 2
    row_parts = new_like(call.a, ((planes, across, rows), FLOAT))
    column_parts = new_like(call.a, ((2, down, columns), FLOAT) if call.loss == "both_sides" else None)
    arguments = (_given(call), Parts(row_parts, column_parts, own), *_sizes(call), _config(call, tiles))
    Launch(similarity_kernel, (down * across,), arguments, **_options(tiles, _is_lean(call))).start()
    return row_parts, column_parts


def parts_of(call: SimilarityCall, own: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Do as _parts, for features in any layout: one part of the columns that a loss has."""
    return _parts(_prepared(call), own)


def _join(call: SimilarityCall, side: Side, places: tuple[int, int, int, int]) -> Tensor:
    """Join the tiles of a side, and return its total. places: rows or columns, tiles, and where their pairs are: see the kernel."""
    scale = (0.5 if call.loss == "both_sides" else 1.0) * scale_of(call, call.a.shape[0])
    arguments = (
        side,
        _affine(call),
        sum_slots(),
        call.normalizer,
        scale,
        *places,
        call.loss == "sigmoid",
        call.decoupled,
        call.empty_is_zero,
        JOIN,
    )
    return Launch(similarity_join_kernel, (triton.cdiv(places[0], JOIN),), arguments, totals=1, num_warps=4).start()[0]


class Block(NamedTuple):
    """Rows `start` to `end` of the gradient of the similarities, without the loss's own factor; its memory is the next block's too.

    of_scale, of_bias: sums, one a tile, of the gradient times the products of features, and of the gradient, where asked for.
    """

    start: int
    end: int
    gradient: Tensor
    of_scale: Tensor | None
    of_bias: Tensor | None


class Upstream(NamedTuple):
    """The upstream gradients of each row's loss, and of each column's where columns have one."""

    rows: Tensor
    columns: Tensor | None


def _blocks(call: SimilarityCall, kept: Tensors, upstream: Upstream | None, totals: tuple[bool, bool]) -> Iterator[Block]:
    """Write the gradient of the similarities a block of rows at a time.

    Args:
        kept: log-sum-exp of rows, shares (of pairs that are mined, extremes) and log-sum-exp of columns, as forward keeps them.
        upstream: None: 1.
        totals: whether each tile's sums for scale and for bias are wanted.
    """
    row_lse, share, column_lse = kept
    rows, columns = call.a.shape[0], call.b.shape[0]
    tiles = feature_tiles(call.a.itemsize)
    width = -(-columns // UNIT) * UNIT
    block = min(max(MEMORY // (width * call.a.itemsize) // tiles.rows, 1) * tiles.rows, rows)
    memory = torch.empty((block, width), dtype=call.a.dtype, device=call.a.device)[:, :columns]
    of_columns = None if upstream is None else upstream.columns
    for start in range(0, rows, block):
        end = min(start + block, rows)
        of_rows = {name: t[start:end] for name in OF_ROWS if (t := getattr(call, name)) is not None}
        part = call._replace(offset=call.offset + start, **of_rows)
        lse, shares = (None if t is None else t[..., start:end].contiguous() for t in (row_lse, share))
        programs, gradient = math.prod(_programs(part, tiles)), memory[: end - start]
        sums = [torch.empty(programs, dtype=torch.float32, device=call.a.device) if wanted else None for wanted in totals]
        own_upstream = None if upstream is None else upstream.rows[start:end]
        config, sizes, of_gradient = _config(part, tiles, EACH=upstream is not None), _sizes(part), _features(gradient)
        arguments: tuple[Any, ...]
        if call.in_pairs:
            kernel, lean = pair_sums_gradient_kernel, False
            arguments = (*_pairs(part), shares, lse, own_upstream, of_gradient, *sizes[:3], call.a.shape[1], config)
        else:
            kernel, lean = similarity_gradient_kernel, upstream is None and call.threshold is None
            lean = lean and not (call.row_labels is not None and call.loss == "both_sides")
            kept_part = Kept(lse, shares, column_lse, own_upstream, of_columns)
            arguments = (_given(part), kept_part, Slopes(of_gradient, *sums), *sizes, config)
        Launch(kernel, (programs,), arguments, **_options(tiles, lean)).start()
        yield Block(start, end, gradient, *sums)


def blocks_of(call: SimilarityCall, kept: Tensors, upstream: Upstream | None, totals: tuple[bool, bool]) -> Iterator[Block]:
    """Do as _blocks, for features in any layout: one part of the columns that a loss has."""
    return _blocks(_prepared(call), kept, upstream, totals)


def _differentiate(call: SimilarityCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    """Write the gradients of a, b, scale and bias, as many as are given."""
    of_a, of_b, of_scale, of_bias = gradients
    columns, depth = call.b.shape
    each = in_order(grad_output) if grad_output is not None and grad_output.ndim == 1 else None
    upstream = None if each is None else Upstream(each, _of_columns(call, each))
    total = None if of_b is None else torch.empty((columns, depth), dtype=torch.float32, device=call.a.device)
    of_products: list[Tensor] = []
    of_all: list[Tensor] = []
    totals = of_scale is not None, of_bias is not None
    factor = _factor(call, grad_output if each is None else None)
    of_similarity = call.logit_scale * factor if call.scale is None else call.logit_scale * call.scale * factor
    for start, end, gradient, for_scale, for_bias in _blocks(call, kept, upstream, totals):
        if for_scale is not None:
            of_products.append(for_scale)
        if for_bias is not None:
            of_all.append(for_bias)
        if of_a is not None:
            product = torch.empty((end - start, depth), dtype=torch.float32, device=call.a.device)
            add_product(product, gradient, call.b, True)
            torch.mul(product[:, : of_a.shape[1]], of_similarity, out=of_a[start:end])
        if total is not None:
            add_product(total, gradient.t(), call.a[start:end], start == 0)
    if of_b is not None and total is not None:
        torch.mul(total[:, : of_b.shape[1]], of_similarity, out=of_b)
    if of_scale is not None:
        of_scale.copy_(torch.cat(of_products).sum() * (call.logit_scale * factor))
    if of_bias is not None:
        of_bias.copy_(torch.cat(of_all).sum() * factor)


def _of_columns(call: SimilarityCall, each: Tensor) -> Tensor | None:
    """Return the upstream gradient of each column's loss, which is that of its row: 0 without one; None where columns have no loss."""
    if call.loss != "both_sides":
        return None
    rows, columns, first, _ = _sizes(call)
    return F.pad(each, (first, columns - rows - first))  # what is less than 0 is cut off


def _factor(call: SimilarityCall, grad_output: Tensor | None) -> Any:
    """Return what multiplies every gradient: the loss's factor over its divisor, times the upstream gradient; a number or 0-d."""
    factor: Any = scale_of(call, call.a.shape[0])
    if call.normalizer is not None:
        divisor = call.normalizer.float()
        factor = factor / divisor
        if call.empty_is_zero:
            factor = torch.where(divisor == 0, 0.0, factor)
    return factor if grad_output is None else factor * grad_output.float()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate, _prepared)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward

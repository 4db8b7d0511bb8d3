"""Host side of the similarity template: tiles, the launches, and the matrix products of the gradient.

The gradient of the similarities is stored a block of rows at a time, in memory that every block takes in turn. Two products make it the
gradients of a and of b, whose sum over the blocks is in float32.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT, scale_of
from lossforge.kernels.engine.launch import Launch, computed, in_order, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, constants
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.product import add_product
from lossforge.kernels.similarity.call import SimilarityCall
from lossforge.kernels.similarity.kernel import (
    NONE,
    Affine,
    Config,
    Kept,
    Labels,
    Parts,
    Side,
    similarity_gradient_kernel,
    similarity_join_kernel,
    similarity_kernel,
)
from lossforge.kernels.tiles import FeatureTiles, feature_tiles, most_registers

MEMORY = 2**29
"""Bytes of the block of rows whose gradient is stored."""
UNIT = 16
"""The distance between rows is a multiple of so many elements, so that Triton and tensor cores read whole vectors."""
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
            **others,
        )
    )


def _affine(call: SimilarityCall) -> Affine:
    return Affine(call.logit_scale, call.logit_bias, call.scale, call.bias)


def _given(call: SimilarityCall) -> tuple[Any, ...]:
    """Return the arguments that both kernels begin with."""
    labels = Labels(call.row_labels, call.column_labels)
    return _features(call.a), _features(call.b), _affine(call), labels


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


def _prepared(call: SimilarityCall) -> SimilarityCall:
    """Return the call with tensors that the kernels address."""
    labels = {name: in_order(getattr(call, name)) for name in ("row_labels", "column_labels")}
    return call._replace(a=_in_tiles(call.a), b=_in_tiles(call.b), **labels)


def _compute(call: SimilarityCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    rows, columns = call.a.shape[0], call.b.shape[0]
    tiles = feature_tiles(call.a.itemsize)
    down, across = _programs(call, tiles)
    labelled, both, softmax = call.row_labels is not None, call.loss == "both_sides", call.loss != "sigmoid"
    planes = (4 if labelled else 2) if softmax else 1
    row_parts = new_like(call.a, ((planes, across, rows), FLOAT))
    column_parts = new_like(call.a, ((2, down, columns), FLOAT) if both else None)
    own = new_like(call.a, ((rows,), FLOAT) if softmax and not labelled else None)
    each, *kept = call.shapes(True)
    row_lse, share, column_lse = [new_like(call.a, shape) for shape in kept]
    loss, of_columns = [new_like(call.a, each if one and call.reduction == "none" else None) for one in (True, both)]
    arguments = (*_given(call), Parts(row_parts, column_parts), own, *_sizes(call), call.a.shape[1], _config(call, tiles))
    Launch(similarity_kernel, (down * across,), arguments, **_options(tiles, call.skip == NONE.value)).start()
    total = _join(call, Side(row_parts, own, row_lse, share, loss), (rows, across, 0, rows))
    if both:
        other = _join(call, Side(column_parts, own, column_lse, None, of_columns), (columns, down, -call.offset, rows))
        total = computed(torch.add, total, other)
    if loss is not None and of_columns is not None:
        loss = computed(torch.add, loss, of_columns)
    return (total if loss is None else loss,), (row_lse, share, column_lse)


def _join(call: SimilarityCall, side: Side, places: tuple[int, int, int, int]) -> Tensor:
    """Join the tiles of a side, and return its total. places: rows or columns, tiles, and where their pairs are: see the kernel."""
    scale = (0.5 if call.loss == "both_sides" else 1.0) * scale_of(call, call.a.shape[0])
    arguments = (side, _affine(call), sum_slots(), call.normalizer, scale, *places, call.loss == "sigmoid", call.empty_is_zero, JOIN)
    return Launch(similarity_join_kernel, (triton.cdiv(places[0], JOIN),), arguments, totals=1, num_warps=4).start()[0]


def _differentiate(call: SimilarityCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    """Write the gradients of a, b, scale and bias, as many as are given."""
    row_lse, share, column_lse = kept
    of_a, of_b, of_scale, of_bias = gradients
    rows, (columns, depth) = call.a.shape[0], call.b.shape
    tiles = feature_tiles(call.a.itemsize)
    each = grad_output is not None and grad_output.ndim == 1
    upstream = in_order(grad_output) if each else None
    width = -(-columns // UNIT) * UNIT
    block = min(max(MEMORY // (width * call.a.itemsize) // tiles.rows, 1) * tiles.rows, rows)
    memory = torch.empty((block, width), dtype=call.a.dtype, device=call.a.device)[:, :columns]
    total = None if of_b is None else torch.empty((columns, depth), dtype=torch.float32, device=call.a.device)
    of_products: list[Tensor] = []
    of_all: list[Tensor] = []
    factor = _factor(call, None if each else grad_output)
    of_similarity = call.logit_scale * factor if call.scale is None else call.logit_scale * call.scale * factor
    for start in range(0, rows, block):
        end = min(start + block, rows)
        part = call._replace(a=call.a[start:end], offset=call.offset + start)
        if call.row_labels is not None:
            part = part._replace(row_labels=call.row_labels[start:end])
        lse, shares = (None if t is None else t[..., start:end] for t in (row_lse, share))
        if of_bias is not None:
            of_all.append(torch.empty(math.prod(_programs(part, tiles)), dtype=torch.float32, device=call.a.device))
        gradient = memory[: end - start]
        of_rows = None if upstream is None else upstream[start:end]
        tensors = (Kept(lse, shares, column_lse), of_rows, upstream, _features(gradient), of_all[-1] if of_all else None)
        arguments = (*_given(part), *tensors, *_sizes(part), start, rows, depth, _config(part, tiles, EACH=each))
        Launch(similarity_gradient_kernel, (math.prod(_programs(part, tiles)),), arguments, **_options(tiles, not each)).start()
        if of_a is not None or of_scale is not None:
            product = torch.empty((end - start, depth), dtype=torch.float32, device=call.a.device)
            add_product(product, gradient, call.b, True)
            if of_a is not None:
                torch.mul(product[:, : of_a.shape[1]], of_similarity, out=of_a[start:end])
            if of_scale is not None:  # Σ g a bᵀ = Σ (g b) a
                of_products.append((product * part.a).sum())
        if total is not None:
            add_product(total, gradient.t(), part.a, start == 0)
    if of_b is not None and total is not None:
        torch.mul(total[:, : of_b.shape[1]], of_similarity, out=of_b)
    if of_scale is not None:
        of_scale.copy_(torch.stack(of_products).sum() * (call.logit_scale * factor))
    if of_bias is not None:
        of_bias.copy_(torch.cat(of_all).sum() * factor)


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

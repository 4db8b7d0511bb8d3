"""Exponentials of all logits, which a graph keeps from forward to backward: so an objective takes three matrix products there, too.

Outside of a graph an objective is called within forward (objective.py), which an operator cannot do. Here it stands in the graph, between
two operators: one gives the rows' losses with their exponentials, the other the gradients from these, by two products, once the slopes of
the objective have arrived. One chunk has all rows. The launches are the same, and so are the bits.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.engine.gradients import new_gradients
from lossforge.losses.engine.linear.engine import Chunks, Gradients, addressable, by_product, divisor_of, product_of, sloped
from lossforge.losses.engine.linear.products import new_logits


class _OfLayer(NamedTuple):
    """What Gradients reads of a call."""

    x: Head


def new_exponentials(layer: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the loss of each row, the exponentials and the rows' factors."""
    rows, classes = layer.shape
    loss, factors = (layer.input.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return loss, new_logits(rows, classes, layer.input), factors


def exponentials(call: RowwiseCall[Head]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, exponentials E of its logits, and its factor v: at a slope s the gradient of the logits is s · v · E."""
    call = call._replace(x=addressable(call.x))
    chunks, product = Chunks(call, *divisor_of(call)), product_of(call)
    rows, classes = call.x.shape
    to = new_logits(rows, classes, call.x.input)
    loss, *_, factors = by_product(product.exponentials_of, chunks.all, (to,), chunks.formulas, False, to, True)
    return loss, to, factors


def of_exponentials(layer: Head, kept: tuple[Tensor, Tensor], slopes: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of input, weight and bias that are wanted. kept: exponentials and factors."""
    to, factors = kept
    rows = len(layer.input)
    written = new_gradients(layer.parts, wanted)
    sums = Gradients(_OfLayer(dataclasses.replace(layer, chunk=rows)), written, True)
    sums.gradient = to
    sums.add(rows, sloped(factors, slopes))
    sums.finish()
    return written

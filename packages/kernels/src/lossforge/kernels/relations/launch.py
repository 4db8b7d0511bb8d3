"""Host side of the loss of relations: the launches."""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.relations.kernel import relations_gradient_kernel, relations_join_kernel, relations_kernel

LANES = 1024
"""Fewest lanes of a tile: several rows of few classes share one."""
IN_FLIGHT = 528 * LANES
"""Lanes of all programs: four tiles of LANES a multiprocessor of an H200."""
BP, BC = 64, 16
"""Programs and classes of a tile that is joined."""


class Walk(NamedTuple):
    """How programs walk over rows: their number, the rows of each, and the constants of a tile."""

    programs: int
    per: int
    constants: dict[str, int]


def _walk(x: Tensor, target: Tensor) -> Walk:
    rows, classes = x.shape
    block = triton.next_power_of_2(classes)
    at_once = max(1, LANES // block)
    lanes = at_once * block
    per = triton.cdiv(triton.cdiv(rows, max(1, IN_FLIGHT // lanes)), at_once) * at_once
    vector = math.gcd(classes, 16 // min(x.itemsize, target.itemsize))
    return Walk(triton.cdiv(rows, per), per, {"R": at_once, "BLOCK": block, "VEC": vector, "num_warps": lanes // 256})


def forward(x: Tensor, target: Tensor, beta: float, gamma: float, temperature: float) -> tuple[Tensor]:
    """Return the loss of logits (N, C), and after it what backward takes of the classes: 1 + 4 C numbers. x, target: contiguous."""
    rows, classes = x.shape
    programs, per, constants = _walk(x, target)
    parts, of_rows = new_like(x, ((5, programs, classes), torch.float32)), new_like(x, ((programs,), torch.float32))
    out = new_like(x, ((1 + 4 * classes,), torch.float32))
    scale = math.log2(math.e) / temperature
    Launch(relations_kernel, (programs,), (x, target, parts, of_rows, rows, per, classes, scale), **constants).start()
    slope = -temperature * gamma / classes if rows > 1 else 0.0  # one row does not vary, but the two launches may round its p differently
    weights = temperature**2 * beta / rows, temperature**2 * gamma / classes, slope
    arguments = (parts, of_rows, sum_slots()._replace(total=out), rows, per, programs, classes, *weights)
    Launch(relations_join_kernel, (triton.cdiv(classes, BC),), arguments, totals=1, BP=BP, BC=BC, num_warps=4).start()
    return (out,)


def backward(x: Tensor, target: Tensor, result: Tensor, grad: Tensor, gradient: Tensor, beta: float, temperature: float) -> None:
    """Write the gradient at x. result: of forward; grad: the gradient at it, whose first number is that of the loss."""
    rows, classes = x.shape
    programs, per, constants = _walk(x, target)
    scale, slope = math.log2(math.e) / temperature, -temperature * beta / rows
    arguments = (x, target, result, grad, gradient, rows, per, classes, scale, slope)
    Launch(relations_gradient_kernel, (programs,), arguments, **constants).start()

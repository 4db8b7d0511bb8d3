"""Host side of the template of routers: tile sizes, and the launches."""

from typing import Any, NamedTuple

import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT, Formulas, RouterCall
from lossforge.kernels.engine.launch import Launch, Launcher, in_order, new_like
from lossforge.kernels.engine.layout import Tensors
from lossforge.kernels.router.kernel import Tokens, router_gradient_kernel, router_kernel, router_total_kernel

ELEMENTS = 1024
"""Of a tile, at least; of four times as many, 100 registers and more of each thread."""
PROGRAMS = 1024
"""That store sums, at most."""


class Tiles(NamedTuple):
    """Tokens and experts of a tile, programs, tiles of a program, and warps."""

    tokens: int
    experts: int
    programs: int
    each: int
    warps: int

    @staticmethod
    def of(call: RouterCall) -> "Tiles":
        count, experts = call.x.shape
        size = triton.next_power_of_2(experts)
        tokens = max(1, ELEMENTS // size)
        whole = triton.cdiv(count, tokens)
        each = triton.cdiv(whole, PROGRAMS)
        return Tiles(tokens, size, triton.cdiv(whole, max(each, 1)), each, 4 if size <= ELEMENTS else 8)


def _tokens(t: Any) -> Tokens:
    token, expert = t.stride()
    return Tokens(t, token, expert, t.shape[1])


class Sums(NamedTuple):
    """What the first launch stores, and the second makes of it."""

    parts: Tensor | None
    loss: Tensor | None
    z_loss: Tensor | None
    coefficients: Tensor | None


def _make(call: RouterCall, sums: Sums) -> Launch:
    tiles = Tiles.of(call)
    arguments = (_tokens(call.x), call.mask, sums.parts, call.x.shape[0], tiles.each)
    return Launch(router_kernel, (tiles.programs,), arguments, BT=tiles.tokens, EP=tiles.experts, K=call.top_k, num_warps=tiles.warps)


def _make_total(call: RouterCall, sums: Sums) -> Launch:
    tiles = Tiles.of(call)
    numbers = (tiles.programs, call.x.shape[1], call.balance, call.z_loss)
    constants = {"EP": tiles.experts, "PARTS": max(1, 2 * ELEMENTS // tiles.experts), "EMPTY_IS_ZERO": call.empty_is_zero}
    return Launch(router_total_kernel, (1,), (*sums, *numbers), **constants, num_warps=tiles.warps)


class Gradient(NamedTuple):
    """What the third launch takes. grad_output: 0-d; None for 1."""

    coefficients: Tensor
    grad_output: Tensor | None
    gradient: Tensor


def _make_gradient(call: RouterCall, g: Gradient) -> Launch:
    tiles = Tiles.of(call)
    arguments = (_tokens(call.x), call.mask, _tokens(g.gradient), g.coefficients, g.grad_output, call.x.shape[0])
    grid = (triton.cdiv(call.x.shape[0], tiles.tokens),)
    return Launch(router_gradient_kernel, grid, arguments, BT=tiles.tokens, EP=tiles.experts, num_warps=tiles.warps)


SUMS, TOTAL, GRADIENT = Launcher(_make), Launcher(_make_total), Launcher(_make_gradient)


def forward(call: RouterCall, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    call = call._replace(mask=in_order(call.mask))
    tiles = Tiles.of(call)
    loss, z_loss, coefficients = (new_like(call.x, shape) for shape in call.shapes(keep))
    sums = Sums(new_like(call.x, ((tiles.programs, 2 * tiles.experts + 2), FLOAT)), loss, z_loss, coefficients)
    SUMS.ready(call, sums).start()
    TOTAL.ready(call, sums).start()
    if gradients[0] is not None and coefficients is not None:
        GRADIENT.ready(call, Gradient(coefficients, None, gradients[0])).start()
    return loss, z_loss, coefficients


def backward(call: RouterCall, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward."""
    (coefficients,), (grad_output,) = kept, grad_outputs
    if coefficients is None:
        *_, coefficients = forward(call, formulas, [None], True)
    assert coefficients is not None
    assert gradients[0] is not None
    call = call._replace(mask=in_order(call.mask))
    GRADIENT.ready(call, Gradient(coefficients, grad_output, gradients[0])).start()

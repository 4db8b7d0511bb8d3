"""Host side of the template of routers: tile sizes, and the launches."""

from typing import NamedTuple

import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT
from lossforge.kernels.engine.launch import Launch, in_order, new_like
from lossforge.kernels.engine.layout import Tensors, as_strided
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.router.call import RouterCall
from lossforge.kernels.router.kernel import router_gradient_kernel, router_kernel, router_total_kernel

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


def _prepared(call: RouterCall) -> RouterCall:
    return call._replace(mask=in_order(call.mask))


def _compute(call: RouterCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    tiles, (tokens, experts) = Tiles.of(call), call.x.shape
    loss, z_loss, coefficients = (new_like(call.x, shape) for shape in call.shapes(keep))
    parts = new_like(call.x, ((tiles.programs, 2 * tiles.experts + 2), FLOAT))
    sizes = {"EP": tiles.experts, "num_warps": tiles.warps}
    arguments = (as_strided(call.x), experts, call.mask, parts, tokens, tiles.each)
    Launch(router_kernel, (tiles.programs,), arguments, BT=tiles.tokens, K=call.top_k, **sizes).start()
    numbers = (tiles.programs, experts, call.balance, call.z_loss)
    constants = {"PARTS": max(1, 2 * ELEMENTS // tiles.experts), "EMPTY_IS_ZERO": call.empty_is_zero}
    Launch(router_total_kernel, (1,), (parts, loss, z_loss, coefficients, *numbers), **constants, **sizes).start()
    return (loss, z_loss), (coefficients,)


def _differentiate(call: RouterCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    tiles, (tokens, experts) = Tiles.of(call), call.x.shape
    arguments = (as_strided(call.x), experts, call.mask, as_strided(gradients[0]), *kept, grad_output, tokens)
    grid = (triton.cdiv(tokens, tiles.tokens),)
    Launch(router_gradient_kernel, grid, arguments, BT=tiles.tokens, EP=tiles.experts, num_warps=tiles.warps).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate, _prepared)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward

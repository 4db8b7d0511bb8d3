"""The template of losses of a router of experts: how evenly it spreads tokens, and how large its logits are.

For logits x (T, E) with p = softmax(x), of which each token takes the k largest, and masks m (T,) of sum M:

    f = Σ m [e is taken] / M,  P = Σ m p / M,  L = balance E Σ f P + z Σ m lse² / M
    dL/dx = m p (a - Σ a p + c lse) with a = balance E f / M, c = 2 z / M

The first launch reads the logits once and stores each program's sums. The second adds these up in their order, and makes the loss, a and c
of them. The third writes the gradient. It reads the logits again, because each token's gradient needs the f of all.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.call import FLOAT
from lossforge.kernels.classes.calls import RouterCall
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import Tensors, as_strided, load_matrix, matrix_address
from lossforge.kernels.engine.reduce import over
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.math import LOG2E, exp2, log
from lossforge.kernels.plans import in_order

TAKEN = tl.constexpr(-(2**63))
"""Key of an expert that a token cannot take, or has taken."""
Routed = namedtuple("Routed", "x here mask p lse")
"""A tile of tokens: logits, which experts exist, and of each token its mask, probabilities and log-sum-exp."""
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


@triton.jit
def read(x, experts, mask_ptr, row, expert, tokens):
    """Read a tile of tokens. Those of mask 0 have logits of 0, so that what they hold does not matter."""
    inside = row < tokens
    mask = tl.where(inside, 1.0, 0.0)
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + row, mask=inside, other=0.0).to(tl.float32)
    here = expert[None, :] < experts
    tile = load_matrix(x, row, expert, inside[:, None] & here, 0.0)
    tile = tl.where(here, tl.where(mask[:, None] == 0.0, 0.0, tile), float("-inf"))
    top = tl.max(tile, 1)
    e = exp2((tile - top[:, None]) * LOG2E)
    total = tl.sum(e, 1)
    return Routed(tile, here, mask, e / total[:, None], top + log(total))


@triton.jit
def ordered(x, expert, EP: tl.constexpr):
    """Return int64 keys in the order of the logits, of equal ones that of the lower expert last. All are above TAKEN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) + (EP - 1 - expert)[None, :]


@triton.jit
def taken(routed, expert, EP: tl.constexpr, K: tl.constexpr):
    """Return the mask of each token at the K experts that it takes, 0 at the others. Of equal logits the lower expert comes first."""
    free = routed.here & (routed.mask == routed.mask)[:, None]
    key = tl.where(free, ordered(routed.x, expert, EP), TAKEN)
    for _ in tl.static_range(K):
        key = tl.where(key == tl.max(key, 1)[:, None], TAKEN, key)
    return tl.where(free & (key == TAKEN), routed.mask[:, None], 0.0)


@triton.jit(do_not_specialize=("tokens", "tiles"))
def router_kernel(x, experts, mask_ptr, parts_ptr, tokens, tiles, BT: tl.constexpr, EP: tl.constexpr, K: tl.constexpr):
    """Store each program's sums of p and of taken tokens, (2, EP), of lse² and of the mask."""
    expert = tl.arange(0, EP)
    program = tl.program_id(0).to(tl.int64)
    shares, counts = tl.zeros([BT, EP], tl.float32), tl.zeros([BT, EP], tl.float32)
    squares, masks = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    for i in range(tiles):
        routed = read(x, experts, mask_ptr, (program * tiles + i) * BT + tl.arange(0, BT), expert, tokens)
        shares += routed.mask[:, None] * routed.p
        counts += taken(routed, expert, EP, K)
        squares += routed.mask * routed.lse * routed.lse
        masks += routed.mask
    at = parts_ptr + program * (2 * EP + 2)
    tl.store(at + expert, tl.sum(shares, 0))
    tl.store(at + EP + expert, tl.sum(counts, 0))
    tl.store(at + 2 * EP, tl.sum(squares, 0))
    tl.store(at + 2 * EP + 1, tl.sum(masks, 0))


@triton.jit(do_not_specialize=("programs",))
def router_total_kernel(
    parts_ptr,
    loss_ptr,
    z_ptr,
    coefficients_ptr,
    programs,
    experts,
    balance,
    z_loss,
    EP: tl.constexpr,
    PARTS: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
):
    """Add up the programs' sums, PARTS programs at once. coefficients: a of each expert, then c."""
    expert = tl.arange(0, EP)
    shares, counts = tl.zeros([EP], tl.float32), tl.zeros([EP], tl.float32)
    squares, masks = tl.zeros([PARTS], tl.float32), tl.zeros([PARTS], tl.float32)
    for start in range(0, programs, PARTS):
        program = start + tl.arange(0, PARTS)
        inside = program < programs
        at = parts_ptr + program.to(tl.int64) * (2 * EP + 2)
        shares += tl.sum(tl.load(at[:, None] + expert[None, :], mask=inside[:, None], other=0.0), 0)
        counts += tl.sum(tl.load(at[:, None] + EP + expert[None, :], mask=inside[:, None], other=0.0), 0)
        squares += tl.load(at + 2 * EP, mask=inside, other=0.0)
        masks += tl.load(at + 2 * EP + 1, mask=inside, other=0.0)
    inverse = over(1.0, tl.sum(masks, 0), EMPTY_IS_ZERO)
    slope = balance * experts * inverse * (counts * inverse)
    of_z = tl.where(z_loss == 0.0, 0.0, z_loss * inverse * tl.sum(squares, 0))  # squares may be infinite
    tl.store(loss_ptr, tl.sum(slope * shares, 0) + of_z)
    if z_ptr is not None:
        tl.store(z_ptr, of_z)
    tl.store(coefficients_ptr + expert, slope, mask=expert < experts)
    tl.store(coefficients_ptr + experts, 2.0 * z_loss * inverse)


@triton.jit(do_not_specialize=("tokens",))
def router_gradient_kernel(x, experts, mask_ptr, gradient, coefficients_ptr, grad_output_ptr, tokens, BT: tl.constexpr, EP: tl.constexpr):
    expert = tl.arange(0, EP)
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    routed = read(x, experts, mask_ptr, row, expert, tokens)
    slope = tl.load(coefficients_ptr + expert, mask=expert < experts, other=0.0)
    c = tl.load(coefficients_ptr + experts)
    upstream = 1.0
    if grad_output_ptr is not None:
        upstream = tl.load(grad_output_ptr).to(tl.float32)
    common = c * routed.lse - tl.sum(slope[None, :] * routed.p, 1)
    g = routed.p * (slope[None, :] + common[:, None]) * (upstream * routed.mask)[:, None]
    g = tl.where(routed.mask[:, None] == 0.0, 0.0, g)
    tl.store(matrix_address(gradient, row, expert), g, mask=(row < tokens)[:, None] & routed.here)

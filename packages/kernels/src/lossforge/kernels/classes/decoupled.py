"""Decoupled distillation: the divergences of each row's target class against the others, and of these among each other.

p and q are the softmaxes of student and teacher over all classes but the target's. o and r are the target's log-odds, u = σ(o), v = σ(r):

    L = T² (α KL(v ‖ u) + β KL(q ‖ p))
    ∂L/∂x = T (β (p - q) - α (u - v) p), of the target T α (u - v)
    ∂L/∂t = T (β q (ln q - ln p - KL(q ‖ p)) - α w q), of the target T α w, where w = v (1 - v) (r - o)

A program takes BR rows, and their classes in tiles of BC: sums are relative to the largest logits so far. A row with -inf for all classes
but the target's has no softmax of these: β is 0 there. C is a constant, so that the compiler knows which rows begin at multiples of 16
bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.classes.calls import LOG2E
from lossforge.kernels.classes.divergence.rows import log_softmax, step_up, weigh
from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided, longer
from lossforge.kernels.math import LN2, log, logistic, widened
from lossforge.kernels.tiles import RowTiles, divergence_tiles

MOST = 4096
"""Classes that a program reads at once, at most."""


def _tiles(x: Tensor, teacher: Tensor) -> tuple[RowTiles, dict[str, int]]:
    """Return the tiles, and the constants of both kernels that follow from them."""
    classes = x.shape[1]
    tiles = divergence_tiles(min(classes, MOST), min(x.itemsize, teacher.itemsize), rows_adjacent=False, lean=False)
    return tiles, {"C": classes, "BR": tiles.rows, "BC": tiles.classes, "num_warps": tiles.warps}


def forward(x: Tensor, teacher: Tensor, target: Tensor, alpha: float, beta: float, temperature: float) -> tuple[Tensor]:
    """Return the loss of each row, and what backward takes: (9, N). x, teacher: (N, C), contiguous; target: (N,), contiguous."""
    rows = len(x)
    out = new_like(x, ((9, rows), torch.float32))
    tiles, constants = _tiles(x, teacher)
    arguments = (x, teacher, target, out, rows, alpha, beta, temperature, LOG2E / temperature)
    Launch(decoupled_kernel, (triton.cdiv(rows, tiles.rows),), arguments, **constants).start()
    return (out,)


def backward(
    x: Tensor,
    teacher: Tensor,
    target: Tensor,
    results: Tensor,
    grad: Tensor,
    of_x: Tensor | None,
    of_teacher: Tensor | None,
    temperature: float,
) -> None:
    """Write the gradients at x and teacher that are not None. results: of forward; grad: of the losses, (N,)."""
    rows, classes = x.shape
    tiles, constants = _tiles(x, teacher)
    programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(classes, tiles.classes)
    arguments = (x, teacher, target, results, as_strided(grad), of_x, of_teacher, rows, LOG2E / temperature)
    Launch(decoupled_gradient_kernel, (programs,), arguments, **constants).start()


@triton.jit
def rows_of(target_ptr, block, rows, C: tl.constexpr, BR: tl.constexpr):
    """Return the rows of a block, which of them exist, their targets, 0 if out of range, and which targets are in range."""
    row = block.to(tl.int64) * BR + tl.arange(0, BR)
    inside = row < rows
    target = tl.load(target_ptr + row, mask=inside, other=0)
    exists = (target >= 0) & (target < C)
    return row, inside, tl.where(exists, target, 0).to(tl.int32), exists


@triton.jit
def other_logits(ptr, row, inside, c, target, C: tl.constexpr):
    """Load a tile of logits in float32, -inf for the target and outside."""
    tile = tl.load(ptr + (row * C)[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=float("-inf"))
    return tl.where(c[None, :] == target[:, None], float("-inf"), widened(tile))


@triton.jit
def target_logit(ptr, row, inside, target, C: tl.constexpr):
    return tl.load(ptr + row * C + target, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def log_logistic(x, log1p):
    """Return ln σ(x). log1p: ln(1 + e^-|x|)."""
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - log1p


@triton.jit
def log_odds(logit, top, total, temperature):
    """Return the log-odds of the target, the others' log-sum, whether the others are all -inf, and whether the target's logit is not.

    Where all others are -inf, the log-sum is +inf, so that their probabilities are 0.
    """
    nothing = total == 0.0
    ls = tl.where(nothing, float("inf"), log(tl.where(nothing, 1.0, total)))
    odds = (logit - top) / temperature - tl.where(nothing, float("-inf"), ls)
    return odds, ls, nothing, nothing & (logit > float("-inf"))


@triton.jit(do_not_specialize=("rows",))
def decoupled_kernel(
    x_ptr, teacher_ptr, target_ptr, out_ptr, rows, alpha, beta, temperature, rate, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Store (9, rows): the loss, the largest logit and log-sum of both sides, T α (u - v), T β, KL(q ‖ p) and T α w.

    rate: log₂ e / T.
    """
    row, inside, target, exists = rows_of(target_ptr, tl.program_id(0), rows, C, BR)
    own_x, own_t = target_logit(x_ptr, row, inside, target, C), target_logit(teacher_ptr, row, inside, target, C)
    m_x, m_t = tl.full([BR], LOWEST, tl.float32), tl.full([BR], LOWEST, tl.float32)
    s_x, s_t, dot = tl.zeros([BR], tl.float32), tl.zeros([BR], tl.float32), tl.zeros([BR], tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        x, t = other_logits(x_ptr, row, inside, c, target, C), other_logits(teacher_ptr, row, inside, c, target, C)
        top_x, fade_x, step_x, e_x = step_up(m_x, x, rate)
        top_t, fade_t, step_t, e_t = step_up(m_t, t, rate)
        s_x = s_x * fade_x + tl.sum(e_x, 1)
        s_t *= fade_t
        dot = weigh(dot, s_t, fade_t, (m_t - top_t) - (m_x - top_x), e_t, step_t - step_x)
        s_t += tl.sum(e_t, 1)
        m_x, m_t = top_x, top_t
    o, ls_x, nothing_x, alone_x = log_odds(own_x, m_x, s_x, temperature)
    r, ls_t, nothing_t, alone_t = log_odds(own_t, m_t, s_t, temperature)
    kl = tl.where(nothing_x | nothing_t, float("nan"), dot / tl.where(nothing_t, 1.0, s_t) / temperature - ls_t + ls_x)
    among = tl.where(alone_x | alone_t, 0.0, beta)
    kl = tl.where(among == 0.0, 0.0, kl)

    u, u_rest, u_log1p = logistic(o)
    v, v_rest, v_log1p = logistic(r)
    against = tl.where(v == 0.0, 0.0, v * (log_logistic(r, v_log1p) - log_logistic(o, u_log1p)))
    against += tl.where(v_rest == 0.0, 0.0, v_rest * (log_logistic(-r, v_log1p) - log_logistic(-o, u_log1p)))
    slope = v * v_rest
    twist = tl.where(slope == 0.0, 0.0 * against, slope * (r - o))  # nan only where the loss is not finite
    left_out = (alpha == 0.0) & (beta != 0.0)
    against, step = tl.where(left_out, 0.0, alpha * against), tl.where(left_out, 0.0, alpha * (u * v_rest - v * u_rest))
    twist = tl.where(left_out, 0.0, alpha * twist)
    loss = tl.where(exists, temperature * temperature * (against + among * kl), float("nan"))
    among = tl.where(kl == kl, among, float("nan"))
    found = (loss, m_x, ls_x, m_t, ls_t, temperature * step, temperature * among, kl, temperature * twist)
    for i in tl.static_range(len(found)):
        tl.store(out_ptr + i * tl.cast(rows, tl.int64) + row, found[i], mask=inside)


@triton.jit
def kept(results_ptr, row, rows, inside):
    """Load what decoupled_kernel stored of rows but the loss, each (BR, 1)."""
    found = ()
    for i in tl.static_range(1, 9):
        found = longer(found, tl.load(results_ptr + i * tl.cast(rows, tl.int64) + row, mask=inside, other=0.0)[:, None])
    return found


@triton.jit(do_not_specialize=("rows",))
def decoupled_gradient_kernel(
    x_ptr, teacher_ptr, target_ptr, results_ptr, grad, of_x_ptr, of_teacher_ptr, rows, rate,
    C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a tile of the gradient at student and teacher, each if its pointer is given. results_ptr: what decoupled_kernel stored."""
    row, inside, target, exists = rows_of(target_ptr, tl.program_id(0) // tl.cdiv(C, BC), rows, C, BR)
    c = tl.program_id(0) % tl.cdiv(C, BC) * BC + tl.arange(0, BC)
    m_x, ls_x, m_t, ls_t, step, among, kl, twist = kept(results_ptr, row, rows, inside)
    up = tl.where(exists, tl.load(grad.ptr + row * grad.s0, mask=inside, other=0.0), float("nan"))[:, None]
    log_p, p = log_softmax(other_logits(x_ptr, row, inside, c, target, C), m_x, ls_x, rate)
    log_q, q = log_softmax(other_logits(teacher_ptr, row, inside, c, target, C), m_t, ls_t, rate)
    own = c[None, :] == target[:, None]
    at, mask = (row * C)[:, None] + c[None, :], inside[:, None] & (c < C)[None, :]
    if of_x_ptr is not None:
        g = (p - q) * among - p * tl.where(ls_x == float("inf"), 0.0, step)
        tl.store(of_x_ptr + at, tl.where(own, step, g) * up, mask=mask)
    if of_teacher_ptr is not None:
        term = tl.where(q == 0.0, 0.0, q * (log_q - log_p) * LN2) - q * kl
        g = tl.where(among == 0.0, 0.0, term * among) - q * tl.where(ls_t == float("inf"), 0.0, twist)
        tl.store(of_teacher_ptr + at, tl.where(own, twist, g) * up, mask=mask)

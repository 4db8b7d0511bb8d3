"""What the templates' plain-torch forms share: any device and floating dtype, differentiable in every floating argument, as often as
one likes. This is what runs where the kernels do not, and what they are tested against.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base.state import without_autocast


def accurate(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def products(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a · bᵀ + bias, which is not rounded to half precision."""
    with without_autocast(a):
        return F.linear(accurate(a), accurate(b), None if bias is None else accurate(bias))


def logits_of(layer: Head, rounded: bool) -> Tensor:
    """Return a layer's logits. rounded: in the layer's own dtype.

    Where a row does not count, the weight's gradient must not hold 0 · nan: so the product that is differentiated takes 0 in place of what
    is not finite, and the logits of such rows are added without a gradient.
    """
    x, weight, bias = layer.parts
    product = F.linear if rounded else products
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    z = product(x.nan_to_num(0.0, 0.0, 0.0), weight, bias)
    bad = ~x.isfinite().all(-1, keepdim=True)
    return z + torch.where(bad, product(x, weight, bias) - z, 0.0).detach()


def root_of(x: Tensor) -> Tensor:
    """Return √x with the gradient 0 at 0, where torch's is infinite, and nan times 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def or_nan(x: Tensor) -> Tensor:
    """Return x, but nan where it is infinite: what is divided by a sum that overflowed is nan, not 0."""
    return torch.where(x.isinf(), torch.nan, x)


def size_of(x: Tensor, dim: int) -> Tensor:
    """Return the largest size of each vector along `dim`, at least 1, without gradient: over it, no square overflows."""
    return x.new_ones(()) if x.numel() == 0 else torch.linalg.vector_norm(x.detach(), torch.inf, dim, keepdim=True).clamp(min=1)


def unit_rows(x: Tensor, eps: float = 1e-12) -> Tensor:
    """Return the rows of x over their lengths, which are at least eps, in float32 (float64 for float64)."""
    x = accurate(x)
    return F.normalize(x / size_of(x, 1), dim=1, eps=eps)


def softmax(x: Tensor) -> Tensor:
    """Return softmax over dimension 1, the likeliest class as 1 less the others: so a gradient keeps its digits where that is nearly 1."""
    p, classes = x.softmax(1), torch.arange(x.shape[1], device=x.device).view(-1, *(1,) * (x.ndim - 2))
    likeliest = classes == x.detach().argmax(1, keepdim=True)
    others = torch.where(likeliest, 0.0, p)
    return torch.where(likeliest, 1 - others.sum(1, keepdim=True), others)


def one_minus_exp(t: Tensor) -> Tensor:
    """Return 1 - e^-t. torch's derivative of expm1 is its value plus 1, which loses every digit of e^-t where t is large."""
    small = t < 0.5
    return torch.where(small, -torch.expm1(-torch.where(small, t, 0.0)), 1 - torch.exp(-torch.where(small, 1.0, t)))


def largest(x: Tensor, dim: int) -> Tensor:
    """Return the largest logit of each row, with `dim` of size 1; 0 where it is not finite, or there is none."""
    if not x.shape[dim]:
        return x.detach().sum(dim, keepdim=True)
    top = x.detach().amax(dim, keepdim=True)
    return torch.where(top.isfinite(), top, 0.0)


def relative(x: Tensor, dim: int) -> Tensor:
    """Return logits less the largest of their row. Scaled, shifted or summed after that, a common offset costs them no digits."""
    return x - largest(x, dim)


def reduced(values: Tensor, scale: float, divisor: Tensor | None, reduction: str, empty_is_zero: bool) -> Tensor:
    result = values if reduction == "none" else values.sum()
    if reduction == "none" or isinstance(scale, Tensor) or scale != 1.0:  # values of rows get memory of their own
        # by a number, torch.func.jvp gives the sum of float32 a tangent of float64
        result = result * torch.full((), scale, dtype=values.dtype, device=values.device)
    if divisor is None:
        return result
    divisor = divisor.to(values.dtype)
    if not empty_is_zero:
        return result / divisor
    nothing = divisor == 0
    return torch.where(nothing, 0.0 * result, result / torch.where(nothing, 1.0, divisor))


def reduced_call(call: Any, values: Tensor, weight: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """Return the values, times their weights, as a call reduces them. count: what a mean divides by, where that is not their number."""
    if weight is not None:
        values = values * weight.to(values.dtype)
    divisor = call.normalizer
    if divisor is None and call.reduction == "mean":
        divisor = torch.tensor(values.numel(), device=values.device) if count is None else count
    return reduced(values, call.loss_scale, divisor, call.reduction, call.empty_is_zero)


def counted(formula: Callable[..., Tensor], weight: Tensor | None, inputs: Sequence[Tensor], across: int | None = None) -> Tensor:
    """Return the values of a formula of the inputs; 0, with gradient 0, where the weight is 0, whatever the inputs hold there.

    Args:
        weight: of each value; broadcasts to the values. With a gradient of its own it leaves nothing out: a value is the weight's gradient.
        across: the inputs' dimension that a value covers; None: each value is of one element.
    """
    if weight is None or weight.requires_grad:
        return formula(*inputs)
    nothing = weight.to(inputs[0].dtype) == 0
    of_inputs = nothing if across is None else nothing.unsqueeze(across)
    return torch.where(nothing, 0.0, formula(*[torch.where(of_inputs, 0.5, t) for t in inputs]))


def product_with_mask(weight: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Return weights times a mask, 0 where the mask is; None without either."""
    if weight is None or mask is None:
        return mask if weight is None else weight
    return torch.where(mask == 0, 0.0, mask * weight)


def corners(b: Tensor) -> Tensor:
    """Return boxes (cx, cy, w, h) as (x1, y1, x2, y2)."""
    center, half = b[..., :2], b[..., 2:] / 2
    return torch.cat([center - half, center + half], -1)


def row_weight(index: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """Of each row the weight of its class; 0 where it is ignored or out of range."""
    index = index.long()
    classes = len(weight)
    valid = (index >= 0) & (index < classes) & (index != ignore_index)
    return torch.where(valid, weight[index.clamp(0, classes - 1)], 0.0)


def which_count(call: Any) -> Tensor:
    """Return which rows with class indices are not ignored; of a mixup pair, not both."""
    found: Tensor = call.target != call.ignore_index
    return found if call.target_b is None else found | (call.target_b != call.ignore_index)


def with_weight(keep: Tensor, weight: Tensor | None) -> Tensor:
    """Return which of the rows `keep` count.

    A row of weight 0 does not count, unless the weight requires grad: the gradient of a weight is its row's loss.
    """
    return keep if weight is None or weight.requires_grad else keep & (weight != 0)


def row_weights(call: RowwiseCall, weight: Tensor | None) -> Tensor:
    """Return of each row the weight of its class, of a mixup pair both by their shares; without weights 1, 0 where it is ignored."""

    def of(index: Tensor) -> Tensor:
        return (index != call.ignore_index).float() if weight is None else row_weight(index, weight, call.ignore_index)

    if call.target_b is None or call.lam is None:
        return of(call.target)
    return call.lam * of(call.target) + (1 - call.lam) * of(call.target_b)


def weighted(formula: Callable[..., Tensor], hyper: list[float], nll: Tensor, w: Tensor) -> Tensor:
    """φ(nll) · w, 0 where a class of weight 0 has a logit of -inf; each factor keeps its derivative where the other is 0."""
    return formula(torch.where((w == 0) & nll.isinf(), 0.0, nll), *hyper) * w


def focused(z: Tensor, gamma: float) -> Tensor:
    """p^γ z, 0 where p is; z itself at γ = 0."""
    if not isinstance(gamma, Tensor) and gamma == 0:
        return z
    near = z.clamp(max=1e30)
    return torch.exp(-gamma * near) * near

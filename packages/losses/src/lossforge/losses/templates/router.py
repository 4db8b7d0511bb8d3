"""The losses of a router of experts: the plain-torch form."""

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import RouterCall
from lossforge.losses.base.record import SCALAR, Template, TemplateDocs
from lossforge.losses.templates.plain_forms import accurate


def router_reference(a: RouterCall) -> tuple[Tensor | None, ...]:
    """Compute a call in plain torch."""
    x = accurate(a.x)
    mask = torch.ones_like(x[:, 0]) if a.mask is None else a.mask.to(x.dtype)
    x = torch.where(mask.unsqueeze(1) == 0, 0.0, x)
    chosen = x.detach().sort(dim=1, descending=True, stable=True).indices[:, : a.top_k]
    chosen = torch.zeros_like(x).scatter(1, chosen, 1.0)
    total = mask.sum()
    inverse = torch.where(total == 0, 0.0 if a.empty_is_zero else torch.nan, 1 / torch.where(total == 0, 1.0, total))
    taken, share = ((mask.unsqueeze(1) * t).sum(0) * inverse for t in (chosen, x.softmax(1)))
    lse = x.logsumexp(1)
    z_loss = (mask * (a.z_loss * lse) * lse).sum() * inverse  # 0 for a coefficient of 0, where lse² is infinite, too
    loss = a.balance * x.shape[1] * (taken * share).sum() + z_loss
    return loss, z_loss.detach() if a.outputs[0] else None


ROUTER = Template(
    "router",
    "classes.router",
    RouterCall,
    results=("loss", "z_loss"),
    kept=("coefficients",),
    reference=router_reference,
    docs=TemplateDocs(returns=f"{SCALAR}; with outputs LoadBalancingOutput."),
)

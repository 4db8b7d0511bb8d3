"""The divergence of several views of a sample: the plain-torch form."""

import torch
from torch import Tensor

from lossforge.kernels.call import ViewsCall
from lossforge.losses.reference import accurate, reduced
from lossforge.losses.templates.docs import SCALAR, TemplateDocs
from lossforge.losses.templates.record import Template


def views_reference(a: ViewsCall) -> Tensor:
    """Compute a call in plain torch."""
    log_p = accurate(a.x).unflatten(0, (a.splits, -1)).log_softmax(2)
    p = log_p.exp()
    mixture = p.mean(0).clamp(1e-7, 1).log()
    values = (p * torch.where(p == 0, 0.0, log_p - mixture)).sum((0, 2)) / a.splits
    return reduced(values, a.loss_scale, torch.tensor(len(values), device=values.device), "mean", False)


VIEWS = Template(
    "views", ViewsCall, kept=("stats",), reference=views_reference, docs=TemplateDocs(targets="class index", returns=f"{SCALAR}.")
)

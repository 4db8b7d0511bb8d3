"""All checks of a loss."""

import torch

from lossforge.losses.check.formula import VARIABLES, check_formula
from lossforge.losses.check.pytorch import check_pytorch
from lossforge.losses.check.report import Report
from lossforge.losses.check.template import check_edges, check_values
from lossforge.losses.custom.loss import CustomLoss
from lossforge.losses.operators.library import backend
from lossforge.losses.registry import LOSSES, Loss


def check(loss: CustomLoss | Loss | str, *, device: str | None = None, seed: int = 0) -> Report:
    """Compare a loss with float64 and try it wherever PyTorch may.

    The gradient against central differences of the value, in float64, over random, extreme and coinciding inputs (at a kink anything
    between the one-sided differences is right); value and gradient of the kernels against float64 for every layout, kind of target,
    reduction, mode and dtype; edges; opcheck, torch.compile, retained graphs, second derivatives, torch.func, in place, CUDA graphs.

    Args:
        loss: one's own, or the name or entry of one in lossforge.losses.registry.
        device: "cuda" where there is a GPU by default, else "cpu", where kernels run only with TRITON_INTERPRET=1.

    Returns: a Report: print it; it is true where nothing failed.

    Raises:
        TypeError: for what is no loss. KeyError: for a name that the registry does not have.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise KeyError(f"no loss {loss!r} in the registry; it has {', '.join(LOSSES)}")
        loss = LOSSES[loss]
    if isinstance(loss, CustomLoss):
        loss = loss.loss
    if not isinstance(loss, Loss):
        made = "by lossforge.losses.elementwise, rowwise or boxes"
        raise TypeError(f"loss must be one made {made}, or a name or an entry of the registry, got {type(loss).__name__}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    computed = backend(torch.empty(0, device=device))
    report = Report(f"{loss.name} ({loss.template}) on {device}, computed by {computed}")
    if computed == "torch":
        report.add("kernels against float64", "kernels", None, "not run: there is no GPU; set TRITON_INTERPRET=1 to interpret them")
    if loss.template in VARIABLES:
        check_formula(loss, report, seed)
    check_values(loss, report, device, seed)
    if loss.by_rows:
        check_edges(loss, report, device)
    check_pytorch(loss, report, device)
    return report

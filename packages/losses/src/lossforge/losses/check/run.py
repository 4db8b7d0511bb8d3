"""All checks of a loss."""

import torch

from lossforge.losses.check.ahead import check_ahead
from lossforge.losses.check.formula import VARIABLES, check_formula
from lossforge.losses.check.pytorch import check_pytorch
from lossforge.losses.check.report import Report
from lossforge.losses.check.template import check_edges, check_values
from lossforge.losses.custom.loss import CustomLoss
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.state import backend


def run_checks(loss: CustomLoss | Loss | str, device: str | None, seed: int) -> Report:
    """As lossforge.losses.check says."""
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
    if computed != "triton" and ":" in loss.name:  # of one's own; the registry's were compiled by this library's tests
        check_ahead(loss, report)
    check_values(loss, report, device, seed)
    if loss.by_rows:
        check_edges(loss, report, device)
    check_pytorch(loss, report, device)
    return report

"""Run all checks of a loss."""

from collections.abc import Callable

import torch

from lossforge.losses.base.state import backend
from lossforge.losses.check.ahead import check_ahead
from lossforge.losses.check.formula import check_formula
from lossforge.losses.check.pytorch import check_pytorch
from lossforge.losses.check.report import Report
from lossforge.losses.check.template import check_edges, check_values
from lossforge.losses.custom.loss import CustomLoss
from lossforge.losses.registry import LOSSES, Loss


def run_checks(
    loss: CustomLoss | Loss | str, device: str | None, seed: int, quick: bool = False, show: Callable[[str], None] | None = None
) -> Report:
    """Run the checks of lossforge.losses.check. After a failure later parts are not tried, because they would show it again."""
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
    computed = backend(torch.empty(0, device=device)) if loss.has_kernel else "torch"
    report = Report(f"{loss.name} ({loss.template.name}) on {device}, computed by {computed}", show=show or (lambda line: None))
    if computed == "torch" and loss.has_kernel:
        report.add("kernels against float64", "kernels", None, "not run without a GPU; set TRITON_INTERPRET=1 to interpret them")
    if loss.template.variables and loss.has_kernel:
        check_formula(loss, report, seed)
    if computed != "triton" and ":" in loss.name:  # a custom loss; this library's tests compile those of the registry
        check_ahead(loss, report)
    for check in (
        lambda: check_values(loss, report, device, seed, quick),
        lambda: check_edges(loss, report, device) if loss.template.by_rows else None,
        lambda: check_pytorch(loss, report, device, quick),
    ):
        if report.failures:
            report.add("more", "kernels, edges, PyTorch", None, f"not tried: mend {report.failures[0].name!r} first")
            break
        check()
    return report

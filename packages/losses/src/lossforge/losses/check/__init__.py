"""Is a loss right? Its gradient against float64 differences, its kernels against float64, its edges, its place in PyTorch.

In the shell: `python -m lossforge.losses.check module:my_loss` or `path/to/file.py:my_loss`, or a name of the registry; status 1 where a
check fails.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lossforge import kernels
from lossforge.losses.check.report import Finding, Report

if TYPE_CHECKING:
    from lossforge.losses.custom.loss import CustomLoss
    from lossforge.losses.registry import Loss

__all__ = ["Finding", "Report", "check"]


def check(
    loss: "CustomLoss | Loss | str",
    *,
    device: str | None = None,
    seed: int = 0,
    quick: bool = False,
    show: Callable[[str], None] | None = None,
) -> Report:
    """Compare a loss with float64 and try it wherever PyTorch may.

    The gradient against central differences of the value, in float64, over random, extreme and coinciding inputs (at a kink anything
    between the one-sided differences is right); value and gradient of the kernels against float64 for every layout, kind of target,
    reduction, mode and dtype; where there is no GPU, the formula of a loss of one's own compiled for one; edges; opcheck, torch.compile,
    retained graphs, second derivatives, torch.func, in place, CUDA graphs. Where one part fails, those that compare with it are not tried.

    Args:
        loss: one's own, or the name or entry of one in lossforge.losses.registry.
        device: "cuda" where there is a GPU by default, else "cpu", where kernels run only with TRITON_INTERPRET=1.
        seed: of the random inputs.
        quick: leave out half precision, most layouts, opcheck and torch.compile: seconds instead of minutes.
        show: is called with each line of the report as soon as its part has ended, such as print.

    Returns:
        a Report: print it; it is true where nothing failed.

    Raises:
        TypeError: `loss` is no loss.
        KeyError: the registry does not have the name.
        ModuleNotFoundError: Triton is not installed.

    Examples:
        >>> from lossforge.losses.check import check
        >>> print(check("focal"))  # minutes on a CPU
    """
    kernels.load("math")
    from lossforge.losses.check.run import run_checks

    return run_checks(loss, device, seed, quick, show)

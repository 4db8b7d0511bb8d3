"""Check whether a loss is right: its gradient and its kernels against float64, its edge cases, and its use with PyTorch's mechanisms.

In the shell: `python -m lossforge.losses.check module:my_loss`, or `path/to/file.py:my_loss`, or a name of the registry. The exit status is
1 if a check fails.
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
    """Compare a loss with float64, and try it with PyTorch's mechanisms.

    These are checked:

    - the gradient against central differences of the value, in float64, over random, extreme and equal inputs (at a kink any value between
      the one-sided differences is right);
    - value and gradient of the kernels against float64, for every layout, kind of target, reduction, mode and dtype;
    - without a GPU, whether a custom loss's formula compiles for one;
    - edge cases;
    - opcheck, torch.compile, retained graphs, second derivatives, torch.func, in-place gradients and CUDA graphs.

    If a part fails, parts that compare with it are not tried.

    Args:
        loss: a custom loss, or the name or entry of a loss in lossforge.losses.registry.
        device: by default "cuda" if there is a GPU, else "cpu", where kernels run only with TRITON_INTERPRET=1.
        seed: of the random inputs.
        quick: leave out half precision, most layouts, opcheck and torch.compile: seconds instead of minutes.
        show: a function, such as print, that gets each line of the report as soon as its part has ended.

    Returns:
        a Report: print it; it is true if nothing failed.

    Raises:
        TypeError: `loss` is none of these.
        KeyError: the registry does not have the name.
        ModuleNotFoundError: Triton is not installed.

    Examples:
        >>> from lossforge.losses.check import check
        >>> print(check("focal"))  # minutes on a CPU
    """
    kernels.load("math")
    from lossforge.losses.check.run import run_checks

    return run_checks(loss, device, seed, quick, show)

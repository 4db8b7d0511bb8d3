"""Is a loss right? Its gradient against float64 differences, its kernels against float64, its edges, its place in PyTorch.

In the shell: `python -m lossforge.losses.check module:my_loss` or `path/to/file.py:my_loss`, or a name of the registry; status 1 where a
check fails.
"""

from lossforge.losses.check.report import Finding, Report
from lossforge.losses.check.run import check

__all__ = ["Finding", "Report", "check"]

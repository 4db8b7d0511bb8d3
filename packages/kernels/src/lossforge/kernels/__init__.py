"""Fused loss kernels in Triton: templates, the formulas they carry, and their launches on tensors."""

from lossforge.kernels.elementwise import elementwise
from lossforge.kernels.launch import INTERPRETED, launch_counts
from lossforge.kernels.reduce import count, scale_
from lossforge.kernels.row_launch import Results, Spec, rowwise, rowwise_backward

__all__ = ["INTERPRETED", "Results", "Spec", "count", "elementwise", "launch_counts", "rowwise", "rowwise_backward", "scale_"]

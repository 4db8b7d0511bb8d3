"""Fused loss kernels in Triton: templates, the formulas they carry, and their launches on tensors."""

from lossforge.kernels.box_launch import boxes, planned_boxes
from lossforge.kernels.contrastive_launch import Pairs, contrastive, contrastive_backward
from lossforge.kernels.element_launch import Formulas, elementwise, planned_elementwise
from lossforge.kernels.launch import INTERPRETED, launch_counts
from lossforge.kernels.overlap_launch import OverlapSpec, overlap, overlap_gradient, planned_overlap
from lossforge.kernels.reduce import count, counts_itself, scale_
from lossforge.kernels.row_launch import planned_rowwise, rowwise, rowwise_backward
from lossforge.kernels.row_layout import Spec
from lossforge.kernels.rowwise import Outputs

__all__ = [
    "INTERPRETED",
    "Formulas",
    "Outputs",
    "OverlapSpec",
    "Pairs",
    "Spec",
    "boxes",
    "contrastive",
    "contrastive_backward",
    "count",
    "counts_itself",
    "elementwise",
    "launch_counts",
    "overlap",
    "overlap_gradient",
    "planned_boxes",
    "planned_elementwise",
    "planned_overlap",
    "planned_rowwise",
    "rowwise",
    "rowwise_backward",
    "scale_",
]

"""Fused loss kernels in Triton: templates, the formulas they carry, and their launches on tensors."""

import importlib.util

if importlib.util.find_spec("triton") is None:
    raise ModuleNotFoundError(
        "kernels and formulas of one's own need Triton, which is not installed. Install it on Linux: pip install triton. "
        "Without it lossforge.losses computes its own losses in plain PyTorch.",
        name="triton",
    )

from lossforge.kernels.box.launch import boxes, planned_boxes
from lossforge.kernels.divergence.launch import STATS, Divergence, DivergenceSpec, divergence, divergence_backward, planned_divergence
from lossforge.kernels.element.launch import Formulas, elementwise, planned_elementwise
from lossforge.kernels.engine.launch import INTERPRETED, launch_counts
from lossforge.kernels.engine.reduce import count, counts_itself, scale_
from lossforge.kernels.overlap.launch import OverlapSpec, overlap, overlap_gradient, planned_overlap
from lossforge.kernels.pairs.launch import Pairs, contrastive, contrastive_backward
from lossforge.kernels.row.kernel import Outputs
from lossforge.kernels.row.launch import planned_rowwise, rowwise, rowwise_backward
from lossforge.kernels.row.layout import Spec
from lossforge.kernels.topk.launch import TopKSpec, topk_divergence, topk_divergence_backward

__all__ = [
    "INTERPRETED",
    "STATS",
    "Divergence",
    "DivergenceSpec",
    "Formulas",
    "Outputs",
    "OverlapSpec",
    "Pairs",
    "Spec",
    "TopKSpec",
    "boxes",
    "contrastive",
    "contrastive_backward",
    "count",
    "counts_itself",
    "divergence",
    "divergence_backward",
    "elementwise",
    "launch_counts",
    "overlap",
    "overlap_gradient",
    "planned_boxes",
    "planned_divergence",
    "planned_elementwise",
    "planned_overlap",
    "planned_rowwise",
    "rowwise",
    "rowwise_backward",
    "scale_",
    "topk_divergence",
    "topk_divergence_backward",
]

"""What losses share by the way in which they read memory: a file and a record a template."""

from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.call import FROM_WEIGHT, Head, end_of_tensors
from lossforge.losses.base.record import Template
from lossforge.losses.templates.boxes import BOXES
from lossforge.losses.templates.distribution import DISTRIBUTION
from lossforge.losses.templates.divergence import DIVERGENCE, TOPK, VIEWS
from lossforge.losses.templates.elementwise import ELEMENTWISE
from lossforge.losses.templates.lovasz import LOVASZ
from lossforge.losses.templates.margins import MARGINS
from lossforge.losses.templates.multilabel import MULTILABEL
from lossforge.losses.templates.overlap import OVERLAP
from lossforge.losses.templates.plain_forms import logits_of
from lossforge.losses.templates.pointwise import POINTWISE
from lossforge.losses.templates.rotated import ROTATED
from lossforge.losses.templates.router import ROUTER
from lossforge.losses.templates.rowwise import ROWWISE
from lossforge.losses.templates.similarity import CONTRASTIVE, SIMILARITY
from lossforge.losses.templates.vectors import VECTORS

TEMPLATES: dict[type, Template[Any]] = {
    each.call: each
    for each in (
        ELEMENTWISE,
        ROWWISE,
        DIVERGENCE,
        TOPK,
        OVERLAP,
        LOVASZ,
        BOXES,
        ROTATED,
        DISTRIBUTION,
        CONTRASTIVE,
        SIMILARITY,
        ROUTER,
        POINTWISE,
        VECTORS,
        MARGINS,
        MULTILABEL,
        VIEWS,
    )
}
"""The templates by the record of a call."""


def reference(call: Any) -> tuple[Tensor | None, ...]:
    """Return the results of a call, computed in plain torch."""
    layer, dtype = getattr(call, "x", None), torch.float32
    if isinstance(layer, Head):
        rounded, teacher = layer.logits == FROM_WEIGHT, getattr(call, "target", None)
        _, dtype = call.shapes(False)[0]  # of elements, the layer's
        call = call._replace(x=logits_of(layer, rounded))
        if isinstance(teacher, Head):
            call = call._replace(target=logits_of(teacher, rounded))
    found = TEMPLATES[type(call)].reference(_of_dtype(call) if torch.compiler.is_compiling() else call)
    return (found if dtype == torch.float32 else found.to(dtype),) if isinstance(found, Tensor) else found


def _of_dtype(call: Any) -> Any:
    """Return the call with numbers that are tensors in the dtype that the formulas are computed in."""
    end = end_of_tensors(call)
    wide = any(t is not None and t.dtype == torch.float64 for t in call[1:end])

    def value(v: Any) -> Any:
        if isinstance(v, list):
            return [value(each) for each in v]
        return v.to(torch.float64 if wide else torch.float32) if isinstance(v, Tensor) else v

    return type(call)(*call[:end], *[value(v) for v in call[end:]])

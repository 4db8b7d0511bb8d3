"""The losses of a distribution over bins against a position between two of them: the plain-torch form, and samples."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import DistributionCall
from lossforge.losses.base.record import KEPT, SCALAR, Make, Sample, Template
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates import elementwise
from lossforge.losses.templates.plain_forms import accurate, counted, reduced_call, weighted


def distribution_reference(a: DistributionCall) -> Tensor:
    """Compute a call in plain torch."""
    return reduced_call(a, counted(lambda x: _values(a, x), a.weight, [accurate(a.x)], -1), a.weight)


def _values(a: DistributionCall, x: Tensor) -> Tensor:
    target, last = a.target.to(x.dtype), x.shape[-1] - 1
    valid = (target >= 0) & (target <= last)
    low = torch.where(valid, target.detach(), 0.0).floor()
    low = low - (low == last).to(low.dtype)  # no clamp: in torch.jit.trace `last` is a tensor of the CPU
    z = -x.log_softmax(-1)
    values = torch.zeros_like(target)
    for bin, w in ((low, low + 1 - target), (low + 1, target - low)):
        of_bin = z.gather(-1, bin.long().unsqueeze(-1)).squeeze(-1)
        values = values + weighted(FORMULAS[a.loss].reference, a.hyper, of_bin, w)
    return values * torch.where(valid, 1.0, torch.nan).to(x.dtype)


def distribution_samples(make: Make) -> Iterator[Sample]:
    """Yield every weight and layout."""

    def at(bins: int, *shape: int) -> Tensor:
        return make.unit(*shape) * (bins - 1)

    yield Sample("dense", make.logits(9, 7), at(7, 9))
    yield Sample("sides of boxes", make.logits(5, 4, 16), at(16, 5, 4))
    yield Sample("on bins", make.logits(4, 8, 5), torch.arange(32).view(4, 8).remainder(5).to(at(5, 1)))
    yield Sample("one distribution", make.logits(16), at(16))
    yield Sample("two bins", make.logits(3, 2), at(2, 3))
    yield Sample("several tiles", make.logits(300, 16), at(16, 300))
    yield Sample("several tiles, odd bins", make.logits(300, 17), at(17, 300))
    yield Sample("many bins", make.logits(3, 601), at(601, 3))
    yield Sample("most bins", make.logits(2, 4096), at(4096, 2))
    yield Sample("targets of float32", make.logits(9, 16), at(16, 9).float())
    yield Sample("transposed", make.logits(16, 21).t(), at(16, 21))
    yield Sample("bins beside others", make.logits(9, 40)[:, 3:19], at(16, 18)[::2])
    yield Sample("every other bin", make.logits(9, 32)[:, ::2], at(16, 9))
    yield Sample("expanded", make.logits(6, 1, 8).expand(6, 5, 8), at(8, 5).expand(6, 5))
    yield Sample("anchors of an image", make.logits(2, 4, 8, 6).transpose(2, 3), at(8, 2, 6, 4).mT)
    yield Sample("four strides", make.logits(4, 4, 4, 6, 8)[::2, ::2, ::2, ::2], at(8, 2, 2, 2, 3))
    yield Sample("weights", make.logits(9, 7), at(7, 9), {"weight": make.unit(9)})
    yield Sample("a weight a box", make.logits(5, 4, 16), at(16, 5, 4), {"weight": make.unit(5, 1)})
    yield Sample("normalizer", make.logits(9, 7), at(7, 9), {"normalizer": torch.tensor(3.0, device=make.device)})
    yield Sample("normalizer, number", make.logits(9, 7), at(7, 9), {"normalizer": 5, "weight": make.unit(9)})


DISTRIBUTION = Template(
    "distribution",
    "classes.distribution",
    DistributionCall,
    reference=distribution_reference,
    samples=distribution_samples,
    docs=replace(
        elementwise.DOCS,
        returns=f'{SCALAR}; with reduction "none" one value a target, in float32.',
        targets="a position between bins",
        keeping=KEPT,
    ),
)

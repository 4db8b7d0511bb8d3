"""The tensors of a case, seeded and random (zeros run faster), and the fewest bytes that must cross memory for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lossforge.bench.cases import Case

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IGNORE_INDEX = -100
PER_CLASS = ("weight", "log_prior")
TOP = 64
"""Classes of a row of which a teacher's probabilities are known."""


@dataclass(frozen=True)
class Inputs:
    """x: the logits or boxes, a leaf. others: the loss's other tensors by argument name, its second argument as `target` and first."""

    x: Tensor
    others: dict[str, Tensor]

    def rows(self, start: int, stop: int) -> "Inputs":
        """Samples `start` to `stop`; what has an entry a class stays whole."""
        part = {k: t[start:stop] if k not in PER_CLASS else t for k, t in self.others.items()}
        return Inputs(self.x.detach()[start:stop].requires_grad_(), part)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(case.shape, device=device, dtype=torch.float32, generator=generator).to(TORCH_DTYPES[case.dtype])
    return Inputs(x.requires_grad_(), _MAKERS[case.inputs](x.detach(), generator))


def least_bytes(case: Case, inputs: Inputs, mode: str = "one launch") -> int:
    """Fewest bytes between memory and chip.

    mode: "forward": every input read once; "one launch": and the gradient written once; "split": forward and backward as two launches,
    which read the logits twice. Rows that are ignored need not be read.
    """
    x, counted = _bytes(inputs.x), 1.0
    target = inputs.others.get("target")
    if case.loss == "ce" and target is not None and not target.is_floating_point():
        counted = (target != IGNORE_INDEX).sum().item() / target.numel()
    read = round(x * counted)
    once = read + sum(map(_bytes, inputs.others.values()))
    return once + {"forward": 0, "one launch": x, "split": x + read}[mode]


def _bytes(t: Tensor) -> int:
    """Of what the tensor's storage holds: what is expanded counts once."""
    return min(t.untyped_storage().nbytes(), t.numel() * t.element_size())


def _indices(x: Tensor, generator: torch.Generator, dim: int) -> Tensor:
    rows = [n for d, n in enumerate(x.shape) if d != dim]
    return torch.randint(0, x.shape[dim], rows, device=x.device, generator=generator)


def _uniform(shape: torch.Size, x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=x.device, generator=generator).to(x.dtype)


def _classes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _indices(x, generator, 1)}


def _class_weights(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return _classes(x, generator) | {"weight": 0.5 + _uniform(x.shape[1:2], x, generator)}


def _ignored(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Three rows in ten do not count, as padding does."""
    target = _indices(x, generator, 1)
    padding = torch.rand(target.shape, device=x.device, generator=generator) < 0.3
    return {"target": target.masked_fill_(padding, IGNORE_INDEX)}


def _pair(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _indices(x, generator, 1), "target_b": _indices(x, generator, 1)}


def _probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": torch.randn(x.shape, device=x.device, generator=generator).softmax(1).to(x.dtype)}


def _anchors(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """One row in a hundred is an object, the others background."""
    index = _indices(x, generator, x.ndim - 1)
    objects = torch.rand(index.shape, device=x.device, generator=generator) < 0.01
    return {"target": torch.where(objects, index, -1)}


def _dense(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _uniform(x.shape, x, generator)}


def _multi_label(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Three labels in a hundred hold."""
    return {"target": (_uniform(x.shape, x, generator) < 0.03).to(x.dtype)}


def _scored(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    index = _anchors(x, generator)["target"]
    return {"target": index, "score": _uniform(index.shape, x, generator)}


def _positions(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Between the first bin and the last, in float32, since bfloat16 holds few."""
    return {"target": (x.shape[-1] - 1) * torch.rand(x.shape[:-1], device=x.device, generator=generator)}


def _nothing(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {}


def _class_prior(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Class frequencies over three orders of magnitude."""
    return _classes(x, generator) | {"log_prior": (7 * _uniform(x.shape[1:2], x, generator).float()).log_softmax(0).to(x.dtype)}


def _teacher(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype)}


def _distinct_teacher(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """No class is as likely for the teacher as for the student: where rounding decides which is the likelier, a gradient may jump."""
    teacher = _teacher(x, generator)["target"]
    gap = x.double().log_softmax(1) - teacher.double().log_softmax(1)
    return {"target": torch.where(gap.abs() < 1e-4, teacher + 1e-3, teacher)}


def _top_classes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The likeliest classes of a teacher and their log-probabilities."""
    teacher = torch.randn(x.shape, device=x.device, generator=generator).mul_(3).log_softmax(1)
    values, indices = teacher.topk(min(TOP, max(1, x.shape[1] // 4)), dim=1)
    return {"target": values.to(x.dtype), "indices": indices}


def _boxes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Objects of 16 to 400 pixels in an image of 1333 by 800, as (x1, y1, x2, y2); the noise in x becomes predictions near them."""
    pairs = (len(x), 2)
    size = 16 * 25 ** torch.rand(pairs, device=x.device, generator=generator)
    centre = torch.rand(pairs, device=x.device, generator=generator) * torch.tensor([1333.0, 800.0], device=x.device)
    moved, grown = centre + 0.35 * size * x[:, :2], size * (0.2 * x[:, 2:]).exp()
    x.copy_(torch.cat([moved - grown / 2, moved + grown / 2], 1))
    return {"target": torch.cat([centre - size / 2, centre + size / 2], 1).to(x.dtype)}


def _dense_of_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """As in _preference_of_probabilities."""
    x.sigmoid_().clamp_(0.01, 0.99)
    return _dense(x, generator)


def _log_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    x.copy_(x.log_softmax(1))
    return _probabilities(x, generator)


def _classes_of_log_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    x.copy_(x.log_softmax(1))
    return _classes(x, generator)


def _preference_of_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The noise in x becomes probabilities, none so near 0 or 1 that torch bounds their logarithm."""
    x.sigmoid_().clamp_(0.01, 0.99)
    return _preference(x, generator)


def _preference(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _uniform(x.shape, x, generator), "preference": _uniform(x.shape, x, generator)}


_MAKERS: dict[str, Callable[[Tensor, torch.Generator], dict[str, Tensor]]] = {
    "classes": _classes,
    "class weights": _class_weights,
    "ignored": _ignored,
    "pair": _pair,
    "probabilities": _probabilities,
    "anchors": _anchors,
    "dense": _dense,
    "multi-label": _multi_label,
    "scored": _scored,
    "positions": _positions,
    "nothing": _nothing,
    "preference": _preference,
    "preference of probabilities": _preference_of_probabilities,
    "dense of probabilities": _dense_of_probabilities,
    "log-probabilities": _log_probabilities,
    "classes of log-probabilities": _classes_of_log_probabilities,
    "class prior": _class_prior,
    "teacher": _teacher,
    "distinct teacher": _distinct_teacher,
    "top classes": _top_classes,
    "boxes": _boxes,
}

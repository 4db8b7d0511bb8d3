"""The random, seeded tensors of a case (zeros would run faster), and the fewest bytes that a loss must move for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lossforge.bench.cases import Case

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IGNORE_INDEX = -100
PER_CLASS = ("weight", "log_prior", "class_counts", "center")
TOP = 64
"""Classes of each row for which the teacher's probabilities are known."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    Attributes:
        x: the logits or boxes, a leaf.
        others: the loss's other tensors by argument name; its second argument is `target` and comes first.
    """

    x: Tensor
    others: dict[str, Tensor]

    def rows(self, start: int, stop: int) -> "Inputs":
        """Return samples `start` to `stop`. Tensors with an entry for each class are not cut."""
        part = {k: t[start:stop] if k not in PER_CLASS else t for k, t in self.others.items()}
        return Inputs(self.x.detach()[start:stop].requires_grad_(), part)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(case.shape, device=device, dtype=torch.float32, generator=generator).to(TORCH_DTYPES[case.dtype])
    return Inputs(x.requires_grad_(), _MAKERS[case.inputs](x.detach(), generator))


def least_bytes(case: Case, inputs: Inputs, mode: str = "one launch") -> int:
    """Return the fewest bytes between memory and chip. Ignored rows are not counted, because they need not be read.

    Args:
        case: what is computed.
        inputs: its tensors.
        mode: "forward" reads every input once. "one launch" also writes the gradient once. "split" computes forward and backward in two
            launches, which read the logits twice.
    """
    x, counted = _bytes(inputs.x), 1.0
    target = inputs.others.get("target")
    if case.loss == "ce" and target is not None and not target.is_floating_point():
        counted = (target != IGNORE_INDEX).sum().item() / target.numel()
    read = round(x * counted)
    once = read + sum(map(_bytes, inputs.others.values()))
    if case.inputs == "lists of classes" and target is not None:  # a list ends at its first -1
        listed = int((target != -1).long().cumprod(1).sum())
        once += (listed + len(target)) * target.element_size() - _bytes(target)
    return once + {"forward": 0, "one launch": x, "split": x + read}[mode]


def units(case: Case, inputs: Inputs) -> Tensor:
    """Return the unit of each number of x: a derivative times its unit says what a change by that unit does to the loss.

    It is 1, except for rotated boxes. Their positions and sides are pixels and their angles radians, so that the norm of a row of
    derivatives as they are would mean nothing. There the unit of pixels is the geometric mean of the target's sides.
    """
    if case.inputs != "rotated":
        return inputs.x.new_ones(()).expand(inputs.x.shape)
    side = inputs.others["target"][:, 2:4].prod(1, keepdim=True).sqrt()
    return torch.cat([side.expand(-1, 4), torch.ones_like(side)], 1)


def _bytes(t: Tensor) -> int:
    """Return the size of what the tensor's storage holds: an expanded element counts once."""
    return min(t.untyped_storage().nbytes(), t.numel() * t.element_size())


def _indices(x: Tensor, generator: torch.Generator, dim: int) -> Tensor:
    rows = [n for d, n in enumerate(x.shape) if d != dim]
    return torch.randint(0, x.shape[dim], rows, device=x.device, generator=generator)


def _uniform(shape: torch.Size, x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=x.device, generator=generator).to(x.dtype)


def _classes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _indices(x, generator, 1)}


def _cosines(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Turn the noise in x into numbers as small as the cosines of random vectors of 512 numbers."""
    x.div_(512**0.5)
    return _classes(x, generator)


def _class_weights(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return _classes(x, generator) | {"weight": 0.5 + _uniform(x.shape[1:2], x, generator)}


def _ignored(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Ignore three rows in ten, as padding does."""
    target = _indices(x, generator, 1)
    padding = torch.rand(target.shape, device=x.device, generator=generator) < 0.3
    return {"target": target.masked_fill_(padding, IGNORE_INDEX)}


def _pair(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _indices(x, generator, 1), "target_b": _indices(x, generator, 1)}


def _probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": torch.randn(x.shape, device=x.device, generator=generator).softmax(1).to(x.dtype)}


def _anchors(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make one row in a hundred an object, the others background."""
    index = _indices(x, generator, x.ndim - 1)
    objects = torch.rand(index.shape, device=x.device, generator=generator) < 0.01
    return {"target": torch.where(objects, index, -1)}


def _dense(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _uniform(x.shape, x, generator)}


def _multi_label(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Set three labels in a hundred."""
    return {"target": (_uniform(x.shape, x, generator) < 0.03).to(x.dtype)}


def _counts_of(classes: int, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return samples of each class of a long tail, over three orders of magnitude."""
    return (7 * torch.rand(classes, device=x.device, generator=generator)).exp().mul_(10).floor()


def _counted_classes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return _classes(x, generator) | {"class_counts": _counts_of(x.shape[1], x, generator)}


def _counted_multi_label(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return _multi_label(x, generator) | {"class_counts": _counts_of(x.shape[1], x, generator)}


def _lists_of_classes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """List one to eight classes of each row, then -1."""
    target = torch.full(x.shape, -1, dtype=torch.int64, device=x.device)
    most = min(8, x.shape[1])
    drawn = torch.rand(x.shape, device=x.device, generator=generator).topk(most, 1).indices
    count = torch.randint(1, most + 1, (len(x), 1), device=x.device, generator=generator)
    target[:, :most] = torch.where(torch.arange(most, device=x.device) < count, drawn, -1)
    return {"target": target}


def _easy_and_hard_classes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make four rows in five easy: their class has nearly all of the probability, that of the others little. None is near a threshold."""
    target = _indices(x, generator, 1)
    easy = torch.rand(target.shape, device=x.device, generator=generator) < 0.8
    x.clamp_(-2.0, 2.0).scatter_(1, target.unsqueeze(1), torch.where(easy, 6.0, 0.0).to(x.dtype).unsqueeze(1))
    return {"target": target}


def _mask(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": torch.randint(0, 2, x.shape, device=x.device, generator=generator)}


def _router(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make each row's logits differ, because who comes first of two equal ones is not defined; and some experts likelier than others."""
    experts = x.shape[1]
    order = (x.float() + torch.linspace(-1, 1, experts, device=x.device)).argsort(1)
    x.scatter_(1, order, torch.linspace(-4, 4, experts, device=x.device).to(x.dtype).expand_as(x))
    return {}


def _scored(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    index = _anchors(x, generator)["target"]
    return {"target": index, "score": _uniform(index.shape, x, generator)}


def _heatmap(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Set one pixel in ten thousand to a peak."""
    y = _uniform(x.shape, x, generator)
    return {"target": torch.where(y > 0.9999, 1.0, 0.99 * y)}


def _positions(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return positions between the first bin and the last, in float32, because bfloat16 has too few values."""
    return {"target": (x.shape[-1] - 1) * torch.rand(x.shape[:-1], device=x.device, generator=generator)}


def _counts(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": (8 * _uniform(x.shape, x, generator)).floor()}


def _signs(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": (_uniform(x.shape, x, generator) < 0.5).to(x.dtype) * 2 - 1}


def _ranking(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    other = torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype)
    return {"target": other, "label": _signs(x, generator)["target"]}


def _variances(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return _dense(x, generator) | {"var": 0.5 + _uniform(x.shape, x, generator)}


def _triplets(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return vectors as far from those of x as chance has it, so that a margin of 1 is kept by some and not by others."""
    near, far = (torch.randn(x.shape, device=x.device, generator=generator) for _ in range(2))
    return {"target": (x + 2**0.5 * near).to(x.dtype), "negative": far.to(x.dtype)}


def _signed_pairs(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return vectors whose cosines with those of x are about 0.6, above any margin that a case has, and the labels 1 and -1."""
    far = torch.randn(x.shape, device=x.device, generator=generator)
    label = (torch.rand(x.shape[:-1], device=x.device, generator=generator) < 0.5).to(x.dtype) * 2 - 1
    return {"target": (0.6 * x + 0.8 * far).to(x.dtype), "label": label}


def _clean_and_augmented(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Move the logits of the second and third view near those of the first."""
    clean = x[: len(x) // 3].float()
    for view in x[len(clean) :].split(len(clean)):
        view.copy_(0.8 * clean + 0.6 * view.float())
    return {"target": _indices(x, generator, 1)[: len(clean)]}


def _nothing(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {}


def _class_prior(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return class frequencies over three orders of magnitude."""
    return _classes(x, generator) | {"log_prior": (7 * _uniform(x.shape[1:2], x, generator).float()).log_softmax(0).to(x.dtype)}


def _teacher(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype)}


def _labelled_teacher(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return _teacher(x, generator) | {"label": _indices(x, generator, 1)}


def _centred_teacher(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a teacher's logits and the float32 mean of those of earlier batches; cosines, as both heads end in a normalised layer."""
    teacher = _teacher(x.mul_(0.3), generator)["target"] * 0.3
    return {"target": teacher, "center": 0.1 * torch.randn(x.shape[1], device=x.device, generator=generator)}


def _distance_maps(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return signed distances in pixels, negative inside a region, most of them outside."""
    return {"target": 20 * torch.randn(x.shape, device=x.device, generator=generator).abs() - 5}


def _depths(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Turn the noise in x into depths in metres. Three pixels in ten of the target are 0: unknown."""
    x.copy_((0.5 * x).exp())
    known = torch.rand(x.shape, device=x.device, generator=generator) > 0.3
    return {"target": torch.where(known, 0.1 + 10 * torch.rand(x.shape, device=x.device, generator=generator), 0.0)}


def _near_rows(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Move each second row near the one before it, so that no rounding decides which row is nearest."""
    x[1::2].mul_(0.5).add_(x[::2])
    return {}


def _two_halves(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make the rows of the second half views of those of the first."""
    first, second = x.chunk(2)
    second.mul_(0.6).add_(first, alpha=0.8)
    return {}


def _distinct_teacher(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make the teacher's probabilities differ from the student's for every class. Where they are almost equal, rounding decides which is
    larger, and a gradient may jump."""
    teacher = _teacher(x, generator)["target"]
    gap = x.double().log_softmax(1) - teacher.double().log_softmax(1)
    return {"target": torch.where(gap.abs() < 1e-4, teacher + 1e-3, teacher)}


def _top_classes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the teacher's likeliest classes and their log-probabilities."""
    teacher = torch.randn(x.shape, device=x.device, generator=generator).mul_(3).log_softmax(1)
    values, indices = teacher.topk(min(TOP, max(1, x.shape[1] // 4)), dim=1)
    return {"target": values.to(x.dtype), "indices": indices}


def _boxes(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make boxes (x1, y1, x2, y2) of 16 to 400 pixels in an image of 1333 by 800, and turn the noise in x into predictions near them."""
    pairs = (len(x), 2)
    size = 16 * 25 ** torch.rand(pairs, device=x.device, generator=generator)
    centre = torch.rand(pairs, device=x.device, generator=generator) * torch.tensor([1333.0, 800.0], device=x.device)
    moved, grown = centre + 0.35 * size * x[:, :2], size * (0.2 * x[:, 2:]).exp()
    x.copy_(torch.cat([moved - grown / 2, moved + grown / 2], 1))
    return {"target": torch.cat([centre - size / 2, centre + size / 2], 1).to(x.dtype)}


def _rotated(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Make rotated boxes (cx, cy, w, h, angle) as _boxes does, and turn the noise in x into predictions near them.

    A prediction is moved along the sides of its box. Moved along the image's axes by a part of its width, a long box would leave its
    target, where the gradient of `probiou` is below float32's smallest number and cannot be compared.
    """
    pairs = (len(x), 2)
    size = 16 * 25 ** torch.rand(pairs, device=x.device, generator=generator)
    centre = torch.rand(pairs, device=x.device, generator=generator) * torch.tensor([1333.0, 800.0], device=x.device)
    angle = 3.1 * torch.rand((len(x), 1), device=x.device, generator=generator)
    along, across = (0.35 * size * x[:, :2]).split(1, 1)
    moved = centre + torch.cat([along * angle.cos() - across * angle.sin(), along * angle.sin() + across * angle.cos()], 1)
    grown = size * (0.2 * x[:, 2:4]).exp()
    x.copy_(torch.cat([moved, grown, angle + 0.2 * x[:, 4:]], 1))
    return {"target": torch.cat([centre, size, angle], 1).to(x.dtype)}


def _dense_of_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Turn the noise in x into probabilities, as _preference_of_probabilities does."""
    x.sigmoid_().clamp_(0.01, 0.99)
    return _dense(x, generator)


def _log_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    x.copy_(x.log_softmax(1))
    return _probabilities(x, generator)


def _classes_of_log_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    x.copy_(x.log_softmax(1))
    return _classes(x, generator)


def _preference_of_probabilities(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Turn the noise in x into probabilities, none so near 0 or 1 that torch clamps their logarithm."""
    x.sigmoid_().clamp_(0.01, 0.99)
    return _preference(x, generator)


def _preference(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"target": _uniform(x.shape, x, generator), "preference": _uniform(x.shape, x, generator)}


_MAKERS: dict[str, Callable[[Tensor, torch.Generator], dict[str, Tensor]]] = {
    "classes": _classes,
    "cosines": _cosines,
    "class weights": _class_weights,
    "ignored": _ignored,
    "pair": _pair,
    "probabilities": _probabilities,
    "anchors": _anchors,
    "dense": _dense,
    "multi-label": _multi_label,
    "scored": _scored,
    "heatmap": _heatmap,
    "positions": _positions,
    "counts": _counts,
    "signs": _signs,
    "variances": _variances,
    "triplets": _triplets,
    "nothing": _nothing,
    "preference": _preference,
    "preference of probabilities": _preference_of_probabilities,
    "dense of probabilities": _dense_of_probabilities,
    "log-probabilities": _log_probabilities,
    "classes of log-probabilities": _classes_of_log_probabilities,
    "class prior": _class_prior,
    "counted classes": _counted_classes,
    "counted multi-label": _counted_multi_label,
    "lists of classes": _lists_of_classes,
    "easy and hard classes": _easy_and_hard_classes,
    "mask": _mask,
    "router": _router,
    "ranking": _ranking,
    "signed pairs": _signed_pairs,
    "clean and augmented": _clean_and_augmented,
    "teacher": _teacher,
    "distinct teacher": _distinct_teacher,
    "labelled teacher": _labelled_teacher,
    "centred teacher": _centred_teacher,
    "distance maps": _distance_maps,
    "depths": _depths,
    "near rows": _near_rows,
    "two halves": _two_halves,
    "top classes": _top_classes,
    "boxes": _boxes,
    "rotated": _rotated,
}

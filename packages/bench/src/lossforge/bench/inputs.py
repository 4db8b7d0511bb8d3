"""The random, seeded tensors of a case (zeros would run faster), and the fewest bytes that a loss must move for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import Case
from lossforge.bench.record import Inputs, LinearInputs, Others

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IGNORE_INDEX = -100
TOP = 64
"""Classes of each row for which the teacher's probabilities are known."""


@dataclass(frozen=True)
class Draw:
    """Draws the tensors of a case.

    Attributes:
        shape: of the logits or boxes, or of a layer's input without its features.
        dtype: of the logits.
        generator: of the random numbers.
        classes: of a layer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    generator: torch.Generator
    classes: int = 0

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.generator.device, dtype=dtype, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.generator.device, generator=self.generator)

    def like(self) -> Tensor:
        """Return numbers between 0 and 1 in shape and dtype of the logits."""
        return self.uniform(*self.shape).to(self.dtype)

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, device=self.generator.device, generator=self.generator)

    def index(self, dim: int = 1) -> Tensor:
        """Return a class of each row, where dimension `dim` has the classes."""
        return self.below(self.shape[dim], *(n for d, n in enumerate(self.shape) if d != dim))

    def tokens(self) -> Tensor:
        """Return a class of each row of a layer's input."""
        return self.below(self.classes, *self.shape)

    def arange(self, end: int) -> Tensor:
        return torch.arange(end, device=self.generator.device)

    def layer(self, features: int) -> tuple[Tensor, Tensor]:
        """Return input and weight of a layer, such that the logits are about normal."""
        x = self.normal(*self.shape, features, dtype=self.dtype)
        return x, self.normal(self.classes, features, dtype=self.dtype).mul_(features**-0.5)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    if case.fused:
        return make_linear_inputs(case, device, seed)
    draw = Draw(case.shape, TORCH_DTYPES[case.dtype], torch.Generator(device).manual_seed(seed))
    x = draw.normal(*case.shape).to(draw.dtype)
    return Inputs(x.requires_grad_(), _MAKERS[case.inputs](draw, x.detach()))


def make_linear_inputs(case: Case, device: torch.device, seed: int = 0) -> LinearInputs:
    *lead, features, classes = case.shape
    draw = Draw(tuple(lead), TORCH_DTYPES[case.dtype], torch.Generator(device).manual_seed(seed), classes)
    x, head = draw.layer(features)
    of_views, of_features = case.inputs.endswith("views") or case.inputs == "guided features", case.inputs.endswith("features")
    if of_views or case.inputs == "labelled features":
        head = head[: len(x)]  # one of each kind; a case that was cut for a CPU has more
    if of_features or of_views:  # unit vectors, of which pairs are nearer than others
        x = F.normalize(x, dim=1)
        head[: len(x)] += 0.5 * x[: len(head)]
        head = F.normalize(head, dim=1)
    if case.inputs == "large logits":
        x *= 32
    others = _LINEAR_MAKERS[case.inputs](draw, x, head)
    wanted = not case.inputs.endswith("without gradient")
    return LinearInputs(x.requires_grad_(wanted), others, head.requires_grad_(wanted))


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


def _classes(d: Draw, x: Tensor) -> Others:
    return {"target": d.index()}


def _ignored(d: Draw, x: Tensor) -> Others:
    """Ignore three rows in ten, as padding does."""
    target = d.index()
    return {"target": target.masked_fill_(d.uniform(*target.shape) < 0.3, IGNORE_INDEX)}


def _anchors(d: Draw, x: Tensor) -> Others:
    """Make one row in a hundred an object, the others background."""
    index = d.index(x.ndim - 1)
    return {"target": torch.where(d.uniform(*index.shape) < 0.01, index, -1)}


def _multi_label(d: Draw, x: Tensor) -> Others:
    """Set three labels in a hundred."""
    return {"target": (d.like() < 0.03).to(x.dtype)}


def _class_counts(d: Draw) -> Others:
    """Return samples of each class of a long tail, over three orders of magnitude."""
    return {"class_counts": (7 * d.uniform(d.shape[1])).exp().mul_(10).floor()}


def _lists_of_classes(d: Draw, x: Tensor) -> Others:
    """List one to eight classes of each row, then -1."""
    target = torch.full(x.shape, -1, dtype=torch.int64, device=x.device)
    most = min(8, x.shape[1])
    drawn = d.uniform(*x.shape).topk(most, 1).indices
    target[:, :most] = torch.where(d.arange(most) < 1 + d.below(most, len(x), 1), drawn, -1)
    return {"target": target}


def _easy_and_hard_classes(d: Draw, x: Tensor) -> Others:
    """Make four rows in five easy: their class has nearly all of the probability, that of the others little. None is near a threshold."""
    target = d.index()
    easy = d.uniform(*target.shape) < 0.8
    x.clamp_(-2.0, 2.0).scatter_(1, target.unsqueeze(1), torch.where(easy, 6.0, 0.0).to(x.dtype).unsqueeze(1))
    return {"target": target}


def _router(d: Draw, x: Tensor) -> Others:
    """Make each row's logits differ, because who comes first of two equal ones is not defined; and some experts likelier than others."""
    experts = x.shape[1]
    order = (x.float() + torch.linspace(-1, 1, experts, device=x.device)).argsort(1)
    x.scatter_(1, order, torch.linspace(-4, 4, experts, device=x.device).to(x.dtype).expand_as(x))
    return {}


def _scored(d: Draw, x: Tensor) -> Others:
    index = _anchors(d, x)["target"]
    return {"target": index, "score": d.uniform(*index.shape).to(x.dtype)}


def _heatmap(d: Draw, x: Tensor) -> Others:
    """Set one pixel in ten thousand to a peak."""
    y = d.like()
    return {"target": torch.where(y > 0.9999, 1.0, 0.99 * y)}


def _signs(d: Draw, *shape: int) -> Tensor:
    return (d.uniform(*shape).to(d.dtype) < 0.5).to(d.dtype) * 2 - 1


def _triplets(d: Draw, x: Tensor) -> Others:
    """Return vectors as far from those of x as chance has it, so that a margin of 1 is kept by some and not by others."""
    near, far = (d.normal(*x.shape) for _ in range(2))
    return {"target": (x + 2**0.5 * near).to(x.dtype), "negative": far.to(x.dtype)}


def _signed_pairs(d: Draw, x: Tensor) -> Others:
    """Return vectors whose cosines with those of x are about 0.6, above any margin that a case has, and the labels 1 and -1."""
    far = d.normal(*x.shape)
    label = (d.uniform(*x.shape[:-1]) < 0.5).to(x.dtype) * 2 - 1
    return {"target": (0.6 * x + 0.8 * far).to(x.dtype), "label": label}


def _clean_and_augmented(d: Draw, x: Tensor) -> Others:
    """Move the logits of the second and third view near those of the first."""
    clean = x[: len(x) // 3].float()
    for view in x[len(clean) :].split(len(clean)):
        view.copy_(0.8 * clean + 0.6 * view.float())
    return {"target": d.index()[: len(clean)]}


def _teacher(d: Draw, x: Tensor) -> Others:
    return {"target": d.normal(*x.shape).to(x.dtype)}


def _centred_teacher(d: Draw, x: Tensor) -> Others:
    """Return a teacher's logits and the float32 mean of those of earlier batches; cosines, as both heads end in a normalised layer."""
    teacher = _teacher(d, x.mul_(0.3))["target"] * 0.3
    return {"target": teacher, "center": 0.1 * d.normal(x.shape[1])}


def _depths(d: Draw, x: Tensor) -> Others:
    """Turn the noise in x into depths in metres. Three pixels in ten of the target are 0: unknown."""
    x.copy_((0.5 * x).exp())
    known = d.uniform(*x.shape) > 0.3
    return {"target": torch.where(known, 0.1 + 10 * d.uniform(*x.shape), 0.0)}


def _near_rows(d: Draw, x: Tensor) -> Others:
    """Move each second row near the one before it, so that no rounding decides which row is nearest."""
    x[1::2].mul_(0.5).add_(x[::2])
    return {}


def _two_halves(d: Draw, x: Tensor) -> Others:
    """Make the rows of the second half views of those of the first."""
    first, second = x.chunk(2)
    second.mul_(0.6).add_(first, alpha=0.8)
    return {}


def _distinct_teacher(d: Draw, x: Tensor) -> Others:
    """Make the teacher's probabilities differ from the student's for every class. Where they are almost equal, rounding decides which is
    larger, and a gradient may jump."""
    teacher = _teacher(d, x)["target"]
    gap = x.double().log_softmax(1) - teacher.double().log_softmax(1)
    return {"target": torch.where(gap.abs() < 1e-4, teacher + 1e-3, teacher)}


def _top_classes(d: Draw, x: Tensor) -> Others:
    """Return the teacher's likeliest classes and their log-probabilities."""
    teacher = d.normal(*x.shape).mul_(3).log_softmax(1)
    values, indices = teacher.topk(min(TOP, max(1, x.shape[1] // 4)), dim=1)
    return {"target": values.to(x.dtype), "indices": indices}


def _objects(d: Draw, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return sides of 16 to 400 pixels, and centres in an image of 1333 by 800."""
    size = 16 * 25 ** d.uniform(len(x), 2)
    return size, d.uniform(len(x), 2) * torch.tensor([1333.0, 800.0], device=x.device)


def _boxes(d: Draw, x: Tensor) -> Others:
    """Make boxes (x1, y1, x2, y2), and turn the noise in x into predictions near them."""
    size, centre = _objects(d, x)
    moved, grown = centre + 0.35 * size * x[:, :2], size * (0.2 * x[:, 2:]).exp()
    x.copy_(torch.cat([moved - grown / 2, moved + grown / 2], 1))
    return {"target": torch.cat([centre - size / 2, centre + size / 2], 1).to(x.dtype)}


def _rotated(d: Draw, x: Tensor) -> Others:
    """Make rotated boxes (cx, cy, w, h, angle), and turn the noise in x into predictions near them.

    A prediction is moved along the sides of its box. Moved along the image's axes by a part of its width, a long box would leave its
    target, where the gradient of `probiou` is below float32's smallest number and cannot be compared.
    """
    size, centre = _objects(d, x)
    angle = 3.1 * d.uniform(len(x), 1)
    along, across = (0.35 * size * x[:, :2]).split(1, 1)
    moved = centre + torch.cat([along * angle.cos() - across * angle.sin(), along * angle.sin() + across * angle.cos()], 1)
    grown = size * (0.2 * x[:, 2:4]).exp()
    x.copy_(torch.cat([moved, grown, angle + 0.2 * x[:, 4:]], 1))
    return {"target": torch.cat([centre, size, angle], 1).to(x.dtype)}


def _probabilities(x: Tensor) -> Tensor:
    """Turn the noise in x into probabilities, none so near 0 or 1 that torch clamps their logarithm."""
    return x.sigmoid_().clamp_(0.01, 0.99)


def _log_probabilities(x: Tensor) -> Tensor:
    return x.copy_(x.log_softmax(1))


def _distribution(d: Draw, x: Tensor) -> Others:
    return {"target": d.normal(*x.shape).softmax(1).to(x.dtype)}


def _dense(d: Draw, x: Tensor) -> Others:
    return {"target": d.like()}


def _preference(d: Draw, x: Tensor) -> Others:
    return {"target": d.like(), "preference": d.like()}


_MAKERS: dict[str, Callable[[Draw, Tensor], Others]] = {
    "nothing": lambda d, x: {},
    "classes": _classes,
    "cosines": lambda d, x: _classes(d, x.div_(512**0.5)),  # as small as the cosines of random vectors of 512 numbers
    "class weights": lambda d, x: _classes(d, x) | {"weight": 0.5 + d.uniform(d.shape[1]).to(x.dtype)},
    "class prior": lambda d, x: (  # over three orders of magnitude
        _classes(d, x) | {"log_prior": (7 * d.uniform(d.shape[1]).to(x.dtype).float()).log_softmax(0).to(x.dtype)}
    ),
    "counted classes": lambda d, x: _classes(d, x) | _class_counts(d),
    "classes of log-probabilities": lambda d, x: _classes(d, _log_probabilities(x)),
    "lists of classes": _lists_of_classes,
    "easy and hard classes": _easy_and_hard_classes,
    "ignored": _ignored,
    "pair": lambda d, x: {"target": d.index(), "target_b": d.index()},
    "probabilities": _distribution,
    "log-probabilities": lambda d, x: _distribution(d, _log_probabilities(x)),
    "anchors": _anchors,
    "scored": _scored,
    "dense": _dense,
    "dense of probabilities": lambda d, x: _dense(d, _probabilities(x)),
    "preference": _preference,
    "preference of probabilities": lambda d, x: _preference(d, _probabilities(x)),
    "multi-label": _multi_label,
    "counted multi-label": lambda d, x: _multi_label(d, x) | _class_counts(d),
    "mask": lambda d, x: {"target": d.below(2, *x.shape)},
    "heatmap": _heatmap,
    "positions": lambda d, x: {"target": (x.shape[-1] - 1) * d.uniform(*x.shape[:-1])},  # float32: bfloat16 has too few values
    "distance maps": lambda d, x: {"target": 20 * d.normal(*x.shape).abs() - 5},  # in pixels, negative inside a region
    "depths": _depths,
    "counts": lambda d, x: {"target": (8 * d.like()).floor()},
    "signs": lambda d, x: {"target": _signs(d, *x.shape)},
    "ranking": lambda d, x: _teacher(d, x) | {"label": _signs(d, *x.shape)},
    "variances": lambda d, x: _dense(d, x) | {"var": 0.5 + d.like()},
    "triplets": _triplets,
    "signed pairs": _signed_pairs,
    "clean and augmented": _clean_and_augmented,
    "near rows": _near_rows,
    "two halves": _two_halves,
    "router": _router,
    "teacher": _teacher,
    "distinct teacher": _distinct_teacher,
    "labelled teacher": lambda d, x: _teacher(d, x) | {"label": d.index()},
    "centred teacher": _centred_teacher,
    "top classes": _top_classes,
    "boxes": _boxes,
    "rotated": _rotated,
}


def _tokens(d: Draw, x: Tensor, head: Tensor) -> Others:
    return {"target": d.tokens(), "factor": d.uniform(*d.shape)}


def _of_tokens(d: Draw, x: Tensor, head: Tensor) -> Others:
    return {"target": d.tokens()}


def _rollouts(d: Draw, x: Tensor, head: Tensor) -> Others:
    """Draw log-probabilities near the policy's, for the policy that drew the tokens and for the reference."""
    target = d.tokens()
    found = token_logps(x.flatten(0, -2), head, target.flatten()).view(d.shape)
    old, reference = (found + 0.1 * (d.uniform(*d.shape) - 0.5) for _ in range(2))
    return {"target": target, "old": old, "reference": reference, "advantage": 2 * d.uniform(d.shape[0]) - 0.5}


def _linear_teacher(d: Draw, x: Tensor, head: Tensor) -> Others:
    return dict(zip(("teacher_input", "teacher_head"), d.layer(x.shape[-1]), strict=True))


def _near_linear_teacher(d: Draw, x: Tensor, head: Tensor) -> Others:
    """Double the layer's logits, and return a teacher near it, as that of a trained draft model is."""
    of_input, of_head = d.layer(x.shape[-1])
    head.mul_(2)
    return {"teacher_input": 0.7 * x + 0.7 * of_input, "teacher_head": 0.8 * head + 1.2 * of_head}


@torch.no_grad()
def _top_of_teacher(d: Draw, x: Tensor, head: Tensor, step: int = 1024) -> Others:
    """Return log-probabilities and indices of the likeliest classes of a teacher near the layer."""
    teacher = _near_linear_teacher(d, x, head)
    count = min(TOP, max(1, d.classes // 4))
    parts = [F.linear(rows, teacher["teacher_head"]).float().log_softmax(-1).topk(count) for rows in teacher["teacher_input"].split(step)]
    return {"values": torch.cat([part.values for part in parts]), "indices": torch.cat([part.indices for part in parts])}


def _views(d: Draw, x: Tensor, head: Tensor) -> Others:
    """Return, for the views of the first matrix and then of the second, which rows they are and which show the same sample."""
    own = d.arange(2 * len(x))
    return {"own": own, "target": own.roll(len(x))}


def _pairs_of_rows(d: Draw, x: Tensor, head: Tensor) -> Others:
    return {"target": d.arange(len(x))}


_LINEAR_MAKERS: dict[str, Callable[[Draw, Tensor, Tensor], Others]] = {
    "classes": _of_tokens,
    "large logits": _of_tokens,
    "half ignored": lambda d, x, head: {"target": d.tokens().masked_fill_(d.uniform(*d.shape) < 0.5, IGNORE_INDEX)},
    "tokens": _tokens,
    "tokens without gradient": _tokens,
    # both of a pair have the same reference; Liger takes none, and so computes the same loss
    "pairs": lambda d, x, head: {"target": d.tokens(), "reference": -d.uniform(len(x) // 2).repeat(2)},
    "rollouts": _rollouts,
    "dense": lambda d, x, head: {"target": d.uniform(*d.shape, d.classes).to(d.dtype)},
    "nothing without gradient": lambda d, x, head: {},
    "linear teacher": _linear_teacher,
    "near linear teacher": _near_linear_teacher,
    "top classes of a teacher": _top_of_teacher,
    "labelled linear teacher": lambda d, x, head: _linear_teacher(d, x, head) | _of_tokens(d, x, head),
    "teacher": lambda d, x, head: {"teacher": d.normal(*d.shape, d.classes, dtype=d.dtype)},
    "features": _pairs_of_rows,
    # about every second row has the label of another one
    "labelled features": lambda d, x, head: _pairs_of_rows(d, x, head) | {"labels": d.below(max(1, len(x) // 2), len(x))},
    "guided features": lambda d, x, head: _views(d, x, head) | {"guide": F.normalize(d.normal(2 * len(x), 64, dtype=d.dtype), dim=1)},
    "proxies and features": lambda d, x, head: {"own": d.arange(len(x)), "labels": d.below(len(x), d.classes)},
    "views": _views,
    "labelled views": lambda d, x, head: _views(d, x, head) | {"labels": d.below(1000, len(x)).repeat(2)},
}


@torch.no_grad()
def token_logps(rows: Tensor, head: Tensor, target: Tensor, step: int = 1024) -> Tensor:
    parts = zip(rows.split(step), target.split(step), strict=True)
    return torch.cat([-F.cross_entropy(F.linear(x, head).float(), t, reduction="none") for x, t in parts])

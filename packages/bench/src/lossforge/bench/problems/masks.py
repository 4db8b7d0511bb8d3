"""`python -m lossforge.bench.problems.masks [FILE]`: losses of masks and distances, Sinkhorn, DETR's criterion, beside plain torch.

They read several tensors, or are no losses, so that they are no cases of the bench. Value and gradients are compared with float64 before
a time is taken: `errors`; what has no gradient is compared with the first contender: `agrees`, a relative error. The distances are
beside scipy on the CPU, the criterion beside transformers' where that is installed. FILE gets the rows as JSON. Without a GPU the problems
are small, and times are those of the host.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.problems import Found, Problem, main, relative
from lossforge.losses import (
    DetrCriterion,
    distance_transform,
    hausdorff_loss,
    plain_torch,
    point_mask_loss,
    prototype_mask_loss,
    sample_uncertain_points,
    sinkhorn_center,
)

HALVES = (torch.float32, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def named(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def at(masks: Tensor, points: Tensor) -> Tensor:
    """Interpolate masks (N, H, W) at points (N, P, 2) in [0, 1]."""
    return F.grid_sample(masks[:, None], 2 * points.to(masks.dtype)[:, None] - 1, align_corners=False)[:, 0, 0]


def of_points(masks: int, side: int, large: int, points: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Return the loss of masks at sampled points, as Mask2Former's."""
    x = (4 * torch.randn(masks, side, side, device=device)).to(dtype)
    y, places = torch.rand(masks, large, large, device=device) > 0.7, torch.rand(masks, points, 2, device=device)

    def plain(x: Tensor) -> Tensor:
        a, b = at(wide(x), places), at(y.to(wide(x).dtype), places)
        p = a.sigmoid()
        dice = 1 - (2 * (p * b).sum(1) + 1) / (p.sum(1) + b.sum(1) + 1)
        return F.binary_cross_entropy_with_logits(a, b, reduction="none").mean(1).sum() + dice.sum()

    calls = {"torch": plain, "torch.compile": torch.compile(plain), "lossforge": lambda x: sum(point_mask_loss(x, y, places, "sum"))}
    read = masks * points * (4 * x.element_size() + 4 + 8)  # four neighbours of each point in both masks, and its place
    name = f"point_mask_loss {masks}x{side}x{side} at {points} of {large}x{large} {named(dtype)}"
    return Problem(name, calls, leaves=(x,), least_bytes=read + x.nbytes)


def of_sampling(masks: int, side: int, points: int, device: torch.device) -> Problem:
    """Return the choice of points with the smallest logits out of three times as many, of which a quarter is chosen by chance."""
    x, few = torch.randn(masks, side, side, device=device), int(0.75 * points)

    def plain() -> Tensor:
        places = torch.rand(masks, 3 * points, 2, device=device)
        chosen = (-at(x, places).abs()).topk(few, 1).indices
        certain = torch.rand(masks, points - few, 2, device=device)
        return torch.cat([places.take_along_dim(chosen[..., None], 1), certain], 1)

    def agrees(a: Tensor, b: Tensor) -> float:
        return relative(*(at(x, places[:, :few]).abs().sum(1) for places in (a, b)))

    calls: dict[str, Found] = {
        "torch": plain,
        "torch.compile": torch.compile(plain),
        "lossforge": lambda: sample_uncertain_points(x, points),
    }
    read = masks * 3 * points * (16 + 8 + 4)
    return Problem(f"sample_uncertain_points {masks}x{side}x{side}, {points} of {3 * points} fp32", calls, agrees, least_bytes=read)


def of_prototypes(images: int, each: int, width: int, side: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Return the loss of masks that are sums of prototypes, an image at a time in plain torch, as ultralytics'."""
    count = images * each
    low = torch.rand(count, 2, device=device) * 0.7 * side
    boxes = torch.cat([low, low + 2 + 0.25 * side * torch.rand(count, 2, device=device)], 1)
    objects = torch.randint(0, 30, (images, side, side), device=device).byte()
    label, counts = torch.randint(1, 30, (count,), device=device), torch.full((images,), each, device=device)
    c, m = (0.3 * torch.randn(count, width, device=device)).to(dtype), torch.randn(images, width, side, side, device=device).to(dtype)

    def plain(c: Tensor, m: Tensor) -> Tensor:
        total, pixel = wide(c).new_zeros(()), torch.arange(side, device=device)
        for image, (own, box, number) in enumerate(zip(wide(c).split(each), boxes.split(each), label.split(each), strict=True)):
            x = torch.einsum("nk,khw->nhw", own, wide(m[image]))
            y = (objects[image] == number[:, None, None]).to(x.dtype)
            x1, y1, x2, y2 = box[..., None, None].unbind(1)
            inside = (pixel >= x1) & (pixel < x2) & (pixel[:, None] >= y1) & (pixel[:, None] < y2)
            entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none") * inside
            total = total + (entropy.sum((1, 2)) / (box[:, 2:] - box[:, :2]).prod(1)).sum()
        return total / count

    calls = {"torch": plain, "lossforge": lambda c, m: prototype_mask_loss(c, m, objects, boxes, counts, label=label)}
    name = f"prototype_mask_loss {images}x{each} of {width}x{side}x{side} {named(dtype)}"
    return Problem(name, calls, leaves=(c, m), least_bytes=2 * m.nbytes + objects.nbytes + 2 * c.nbytes)


def regions(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return masks (N, C, d…) of regions that are some sixteenths of the image wide."""
    low = torch.rand(*shape[:2], *(max(n // 16, 2) for n in shape[2:]), device=device)
    return F.interpolate(low, shape[2:], mode="bilinear" if len(shape) == 4 else "trilinear") > 0.6


def scipy_distances(masks: Tensor) -> Tensor:
    from scipy.ndimage import distance_transform_edt

    host = masks.cpu().flatten(0, 1).numpy()
    return torch.stack([torch.from_numpy(distance_transform_edt(mask)) for mask in host]).view(masks.shape).to(masks.device)


def of_distances(shape: tuple[int, ...], device: torch.device) -> Problem:
    masks = regions(shape, device)
    calls: dict[str, Found] = {"scipy": lambda: scipy_distances(masks), "lossforge": lambda: distance_transform(masks)}
    return Problem(f"distance_transform {'x'.join(map(str, shape))}", calls, relative, least_bytes=5 * masks.numel())


def of_hausdorff(shape: tuple[int, int, int, int], device: torch.device) -> Problem:
    """Return the Hausdorff loss, whose distances scipy computes on the host in plain torch."""
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    x = 4 * F.interpolate(torch.randn(*shape[:2], 8, 8, device=device), shape[2:], mode="bilinear")

    def plain(x: Tensor) -> Tensor:
        p = x.softmax(1)
        y = torch.zeros_like(p).scatter(1, target[:, None], 1.0)
        far = sum((scipy_distances(mask) + scipy_distances(~mask)).square() for mask in (p.detach() > 0.5, y > 0.5))
        return ((p - y).square() * far).mean()

    return Problem(
        f"hausdorff_loss {'x'.join(map(str, shape))} fp32", {"scipy": plain, "lossforge": partial(_hausdorff, target)}, leaves=(x,)
    )


def _hausdorff(target: Tensor, x: Tensor) -> Tensor:
    return hausdorff_loss(x, target)


def of_sinkhorn(samples: int, prototypes: int, device: torch.device) -> Problem:
    """Return three iterations of Sinkhorn's method; plain torch returns the whole assignment, ours what the loss takes from the scores."""
    scores, temperature = (0.3 * torch.randn(samples, prototypes, device=device)).bfloat16(), 0.05

    def plain() -> Tensor:
        q = (scores.float() / temperature).exp().T
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / prototypes
            q = q / q.sum(0, keepdim=True) / samples
        return (q * samples).T

    def agrees(a: Tensor, b: Tensor) -> float:
        return relative(a, b if b.ndim == 2 else ((scores.double() - b) / temperature).softmax(1))

    calls: dict[str, Found] = {
        "torch": plain,
        "torch.compile": torch.compile(plain),
        "lossforge": lambda: sinkhorn_center(scores, temperature),
    }
    name = f"sinkhorn_center {samples}x{prototypes}, three iterations bf16"
    return Problem(name, calls, agrees, least_bytes=6 * scores.nbytes)


def of_criterion(layers: int, images: int, queries: int, boxes: int, device: torch.device) -> Problem:
    """Return Deformable DETR's criterion: matching and losses of all layers, forward and backward."""
    classes, counts = 80, [boxes] * images
    own, targets = (0.2 + 0.6 * torch.rand(*n, 4, device=device) for n in ((layers, images, queries), (images * boxes,)))
    logits, labels = torch.randn(layers, images, queries, classes, device=device), torch.randint(classes, (images * boxes,), device=device)
    ours = DetrCriterion()

    def stacked(x: Tensor, b: Tensor) -> Tensor:
        return sum(ours(x, b, labels, targets.to(b.dtype), counts).values(), x.new_zeros(()))

    def plain(x: Tensor, b: Tensor) -> Tensor:
        with plain_torch():
            return stacked(x, b)

    def theirs(x: Tensor, b: Tensor) -> Tensor:
        from transformers.loss import loss_deformable_detr as module

        criterion = module.DeformableDetrImageLoss(module.DeformableDetrHungarianMatcher(2.0, 5.0, 2.0), classes, 0.25, ["labels", "boxes"])
        *earlier, last = [{"logits": one, "pred_boxes": box} for one, box in zip(x, b, strict=True)]
        wanted = zip(labels.split(counts), targets.to(b.dtype).split(counts), strict=True)
        found = criterion({**last, "auxiliary_outputs": earlier}, [{"class_labels": label, "boxes": box} for label, box in wanted])
        factors = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
        parts = (factor * v for name, factor in factors.items() for key, v in found.items() if key.startswith(name))
        return sum(parts, x.new_zeros(()))

    calls: dict[str, Found] = {"transformers": theirs} if find_spec("transformers") else {}
    return Problem(
        f"DetrCriterion {layers}x{images}x{queries}x{boxes} fp32", calls | {"torch": plain, "lossforge": stacked}, leaves=(logits, own)
    )


def problems(device: torch.device) -> Iterator[Callable[[], Problem]]:
    """Yield what makes each problem."""
    small = device.type != "cuda"
    for dtype in HALVES:
        yield partial(of_points, *((3, 8, 16, 20) if small else (100, 256, 1024, 12544)), dtype, device)
        yield partial(of_prototypes, *((2, 3, 4, 16) if small else (16, 150, 32, 160)), dtype, device)
    yield partial(of_sampling, *((3, 16, 40) if small else (100, 256, 12544)), device)
    for shape in ((2, 1, 20, 20), (1, 1, 8, 8, 8)) if small else ((16, 4, 512, 512), (2, 2, 128, 128, 128)):
        yield partial(of_distances, shape, device)
    yield partial(of_hausdorff, (2, 2, 16, 16) if small else (4, 4, 256, 256), device)
    yield partial(of_sinkhorn, *((12, 40) if small else (2048, 65536)), device)
    for sizes in ((2, 2, 12, 3),) if small else ((7, 16, 300, 30), (6, 2, 300, 30), (7, 16, 900, 20)):
        yield partial(of_criterion, *sizes, device)


if __name__ == "__main__":
    main(sys.argv[1:], problems)

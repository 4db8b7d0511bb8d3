"""`python -m lossforge.bench.problems.vision [FILE]`: masks of elements, Gram anchoring, self-supervision, routers, crowds of boxes.

Each is beside plain torch, and that under torch.compile: the formulas of the papers, written as their authors do. Value and gradients are
compared with float64 before a time is taken: `errors`; of assignments `agrees` is the share of equal entries. FILE gets the rows as JSON.
Without a GPU the problems are small, and times are those of the host.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.problems import Found, Problem, main
from lossforge.bench.problems.assign import of_anchors, of_queries
from lossforge.bench.problems.masks import named, wide
from lossforge.losses import (
    barlow_twins_loss,
    binary_cross_entropy_with_logits,
    dice_loss,
    gram_anchoring_loss,
    koleo_loss,
    load_balancing_loss,
    sigmoid_focal_loss,
    vicreg_loss,
    zlpr_loss,
)


def contenders(plain: Found, ours: Found, compiles: bool = False) -> dict[str, Found]:
    """Return the calls of plain torch, under torch.compile too, and ours. compiles: ours is plain PyTorch, to be compiled by its users."""
    found = {"torch": plain, "torch.compile": torch.compile(plain, dynamic=False), "lossforge": ours}
    return found | ({"lossforge, compiled": torch.compile(ours, dynamic=False)} if compiles and torch.cuda.is_available() else {})


def entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(wide(x), y.to(wide(x).dtype), reduction="none")


def focal(x: Tensor, y: Tensor) -> Tensor:
    p, y = wide(x).sigmoid(), y.to(wide(x).dtype)
    return (0.25 * y + 0.75 * (1 - y)) * entropy(x, y) * (p * (1 - y) + (1 - p) * y).square()


ELEMENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., Tensor]]] = {
    "binary_cross_entropy_with_logits": (entropy, binary_cross_entropy_with_logits),
    "sigmoid_focal_loss": (focal, partial(sigmoid_focal_loss, reduction="mean")),
}


def of_elements(name: str, shape: tuple[int, ...], pixels: bool, dtype: torch.dtype, device: torch.device) -> Problem:
    """Return a mean over the elements that a bool mask chooses; pixels: the mask is (N, 1, H, W)."""
    formula, loss = ELEMENTS[name]
    x = (2 * torch.randn(shape, device=device)).to(dtype)
    y = torch.randint(2, shape, device=device).to(dtype)
    mask = torch.rand((shape[0], 1, *shape[2:]) if pixels else shape, device=device) > 0.3

    def plain(x: Tensor) -> Tensor:
        counts = mask.expand(x.shape)
        return torch.where(counts, formula(x, y), 0.0).sum() / counts.sum()

    title = f"{name} {'x'.join(map(str, shape))} {named(dtype)}, mask of {'pixels' if pixels else 'elements'}"
    calls = contenders(plain, lambda x: loss(x, y, mask=mask))
    return Problem(title, calls, leaves=(x,), least_bytes=2 * x.nbytes + y.nbytes + mask.nbytes)


def of_label_sets(rows: int, classes: int, device: torch.device) -> Problem:
    """Return ZLPR of the classes that a bool mask chooses."""
    x, y = 2 * torch.randn(rows, classes, device=device), (torch.rand(rows, classes, device=device) > 0.98).float()
    mask = torch.rand(rows, classes, device=device) > 0.3

    def plain(x: Tensor) -> Tensor:
        zero = x.new_zeros(len(x), 1)
        sets = ((x, mask & (y < 0.5)), (-x, mask & (y > 0.5)))
        sums = [torch.cat([z.masked_fill(~counts, -torch.inf), zero], 1).logsumexp(1) for z, counts in sets]
        return (sums[0] + sums[1]).sum() / mask.any(1).sum()

    calls = contenders(plain, lambda x: zlpr_loss(x, y, mask=mask))
    return Problem(f"zlpr_loss {rows}x{classes} fp32, mask", calls, leaves=(x,), least_bytes=2 * x.nbytes + y.nbytes + mask.nbytes)


def of_regions(shape: tuple[int, int, int, int], device: torch.device) -> Problem:
    """Return Dice loss of class indices, of the pixels that a bool mask chooses."""
    x, pixels = 2 * torch.randn(shape, device=device), (shape[0], *shape[2:])
    target, mask = torch.randint(shape[1], pixels, device=device), torch.rand(pixels, device=device) > 0.3

    def plain(x: Tensor) -> Tensor:
        counts = mask.unsqueeze(1)
        p, y = x.softmax(1) * counts, F.one_hot(target, x.shape[1]).movedim(-1, 1).to(x.dtype) * counts
        inside, size = (p * y).sum((2, 3)), p.sum((2, 3)) + y.sum((2, 3))
        return (1 - (2 * inside + 1e-5) / (size + 1e-5)).mean()

    least = 3 * x.nbytes + 2 * target.nbytes + 2 * mask.nbytes
    name = f"dice_loss {'x'.join(map(str, shape))} fp32, mask of pixels"
    return Problem(name, contenders(plain, lambda x: dice_loss(x, target, mask=mask)), leaves=(x,), least_bytes=least)


def of_gram(batch: int, patches: int, width: int, img_level: bool, device: torch.device) -> Problem:
    """Return Gram anchoring (DINOv3) of a student beside its teacher; img_level: a matrix an image, not one of the batch."""
    y = torch.randn(batch, patches, width, device=device)
    x = y + torch.randn_like(y)

    def plain(x: Tensor) -> Tensor:
        each = [F.normalize(t, dim=-1) for t in (x, y.to(x.dtype))]
        own, wanted = [t @ t.mT for t in (each if img_level else [t.flatten(0, 1) for t in each])]
        return F.mse_loss(own, wanted)

    name = f"gram_anchoring_loss {batch}x{patches}x{width} fp32{'' if img_level else ', of the batch'}"
    return Problem(name, contenders(plain, lambda x: gram_anchoring_loss(x, y, img_level=img_level), compiles=True), leaves=(x,))


def off_diagonal(c: Tensor) -> Tensor:
    return c.square().sum() - c.diagonal().square().sum()


def vicreg(a: Tensor, b: Tensor) -> Tensor:
    total = 25 * F.mse_loss(a, b)
    for z in (a - a.mean(0), b - b.mean(0)):
        total = total + 12.5 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + off_diagonal(z.T @ z / (len(z) - 1)) / z.shape[1]
    return total


def barlow_twins(a: Tensor, b: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() for z in (a, b))
    c = a.T @ b / len(a)
    return (1 - c.diagonal()).square().sum() + 5e-3 * off_diagonal(c)


def koleo(x: Tensor) -> Tensor:
    x = F.normalize(x, dim=1, eps=1e-8)
    nearest = (x.detach() @ x.detach().T).fill_diagonal_(-1).argmax(1)
    return -(F.pairwise_distance(x, x[nearest], eps=1e-8) + 1e-8).log().mean()


VIEWS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "vicreg_loss": (vicreg, vicreg_loss),
    "barlow_twins_loss": (barlow_twins, barlow_twins_loss),
}


def of_views(name: str, rows: int, width: int, device: torch.device) -> Problem:
    """Return a loss of two views of a batch on one process."""
    plain, ours = VIEWS[name]
    calls = contenders(lambda a, b: plain(a, b), lambda a, b: ours(a, b), compiles=True)
    return Problem(f"{name} 2x{rows}x{width} fp32", calls, leaves=tuple(torch.randn(2, rows, width, device=device)))


def of_neighbours(rows: int, width: int, device: torch.device) -> Problem:
    """Return KoLeo of a batch on one process."""
    calls = contenders(koleo, lambda x: koleo_loss(x), compiles=True)
    return Problem(f"koleo_loss {rows}x{width} fp32", calls, leaves=(torch.randn(rows, width, device=device),))


def of_routers(layers: int, batch: int, tokens: int, experts: int, chosen: int, device: torch.device) -> Problem:
    """Return the load balancing loss of all layers of a mixture of experts, of the tokens that are not padding."""
    mask = torch.arange(tokens, device=device) < torch.randint(1, tokens, (batch, 1), device=device)
    counts = mask.flatten().repeat(layers).unsqueeze(1)
    x = torch.randn(layers * batch * tokens, experts, device=device)

    def plain(x: Tensor) -> Tensor:
        p, kept = x.softmax(1), counts.to(x.dtype)
        taken = torch.zeros_like(p).scatter(1, x.topk(chosen, 1).indices, 1.0)
        return experts * ((taken * kept).sum(0) / kept.sum() * ((p * kept).sum(0) / kept.sum())).sum()

    name = f"load_balancing_loss {layers}x{batch}x{tokens}x{experts} fp32, mask"
    calls = contenders(plain, lambda x: load_balancing_loss(x, chosen, mask))
    return Problem(name, calls, leaves=(x,), least_bytes=3 * x.nbytes)


def problems(device: torch.device) -> Iterator[Callable[[], Problem]]:
    """Yield what makes each problem."""
    small = device.type != "cuda"
    shape = (2, 3, 8, 8) if small else (8, 19, 512, 512)
    for name in ELEMENTS:
        for pixels in (False, True):
            yield partial(of_elements, name, shape, pixels, torch.float32, device)
    yield partial(of_elements, "binary_cross_entropy_with_logits", shape, False, torch.bfloat16, device)
    yield partial(of_label_sets, *((12, 20) if small else (4096, 9605)), device)
    yield partial(of_regions, shape, device)
    yield partial(of_gram, *((2, 9, 4) if small else (64, 256, 1024)), True, device)
    yield partial(of_gram, *((2, 9, 4) if small else (32, 256, 1024)), False, device)
    for name in VIEWS:
        yield partial(of_views, name, *((12, 5) if small else (2048, 8192)), device)
    yield partial(of_neighbours, *((20, 6) if small else (8192, 1024)), device)
    yield partial(of_routers, *((2, 2, 5, 4, 2) if small else (24, 8, 4096, 64, 8)), device)
    yield partial(of_queries, *((2, 30, 4) if small else (8, 900, 300)), True, device)
    yield partial(of_anchors, *((2, 6, 64) if small else (8, 500, 640)), {}, device)


if __name__ == "__main__":
    main(sys.argv[1:], problems)

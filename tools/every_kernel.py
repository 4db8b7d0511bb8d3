"""Run one case of each kernel on the GPU at hand, for NVIDIA's checkers:

`compute-sanitizer --tool memcheck --error-exitcode 1 python tools/every_kernel.py`

Each loss of the registry runs once with the gradient written in forward and once in backward. Some tensors have odd ends, and some rows
stay on chip.
"""

import importlib
import sys
from functools import partial
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

import lossforge.kernels
from lossforge import losses
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import plain_sample


def kernels() -> set[str]:
    """Return the names of all kernels of lossforge.kernels."""
    names, (folder,) = set(), map(Path, lossforge.kernels.__path__)
    for file in folder.rglob("*.py"):
        module = ".".join(file.relative_to(folder.parent.parent).with_suffix("").parts)
        for name, value in vars(importlib.import_module(module.removesuffix(".__init__"))).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                names.add(name)
    return names


arange, rand, randint = (partial(make, device="cuda") for make in (torch.arange, torch.rand, torch.randint))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)


def walk() -> None:
    for loss in LOSSES.values():
        sample = plain_sample(loss, "cuda")
        for mode in ("forward", "backward"):
            x = sample.x.detach().requires_grad_()
            options = {"reduction": "sum", **sample.kwargs, "gradient": mode}
            (2.0 * loss.function(x, sample.target, **options)).backward()
    for mode in ("forward", "backward"):
        losses.clip_loss(leaf(37, 50), gradient=mode).backward()
        a, b = (leaf(n, 40, dtype=torch.bfloat16) for n in (137, 250))
        losses.clip_loss_from_features(a, b, 10.0, gradient=mode).backward()
        losses.jsd_cross_entropy(leaf(3 * 40, 70), arange(40), gradient=mode).backward()
        losses.two_way_loss(leaf(300, 50), rand(300, 50), gradient=mode).backward()
        losses.load_balancing_loss(leaf(3000, 60), 4, gradient=mode).backward()
    for classes in (33_000, 33_001):
        x, target = leaf(300, classes, dtype=torch.bfloat16), randint(0, classes, (300,))
        target[::7] = -100
        (2.0 * losses.cross_entropy(x, target)).backward()
        losses.kl_div_with_logits(x, torch.randn_like(x), labels=target).backward()
    for dtype in (torch.float32, torch.bfloat16):  # rows that begin anywhere, beside the bias of their classes
        target, log_prior = randint(0, 21_841, (300,)), rand(21_841).log()
        losses.logit_adjusted_cross_entropy(leaf(300, 21_841, dtype=dtype), target, log_prior).backward()
    for classes in (5, 21, 50):  # of a pixel in one lane, and in one tile
        losses.dice_loss(leaf(2, classes, 37, 41), randint(0, classes, (2, 37, 41)), reduction="mean").backward()
    low = rand(2, 301, 2)
    boxes = torch.cat([low, low + torch.rand_like(low)], 2).requires_grad_()
    losses.complete_box_iou(boxes[0], boxes[1, :37]).sum().backward()
    labels = randint(0, 7, (2, 301))
    losses.task_aligned_assign(rand(2, 777, 7), boxes[:, :1].expand(2, 777, 4), rand(777, 2), labels, boxes, topk2=1)
    losses.matching_cost(rand(2, 77, 7), boxes[:, :77], labels[0], boxes[0], [300, 1])
    losses.sinkhorn_center(rand(300, 1000))
    losses.seesaw_loss(leaf(37, 5003), randint(0, 5003, (37,)), arange(5003)).backward()
    boxes, labels = 40 * boxes.detach().view(-1, 4), randint(0, 9, (2, 61, 67))
    losses.prototype_mask_loss(leaf(602, 20), leaf(2, 20, 61, 67), labels, boxes, [301, 301], label=randint(0, 9, (602,))).backward()
    losses.signed_distance_map(rand(2, 3, 61, 67) > 0.9)
    losses.dkd_loss(leaf(37, 5003), leaf(37, 5003), randint(0, 5003, (37,))).backward()
    for classes in (7, 1001):  # of several rows in a tile, and of one
        losses.dist_loss(leaf(301, classes), rand(301, classes)).backward()
    losses.cross_entropy(leaf(5000, 3), randint(0, 3, (5000,))).backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    walk()
    missing = kernels() - set(lossforge.kernels.launch_counts())
    print(dict(sorted(lossforge.kernels.launch_counts().items())))
    sys.exit(f"not launched: {', '.join(sorted(missing))}" if missing else 0)

"""Run one case of each kernel on the GPU at hand, for NVIDIA's checkers:

`compute-sanitizer --tool memcheck --error-exitcode 1 python tools/every_kernel.py`

Each loss of the registry runs once with the gradient written in forward and once in backward. Some tensors have odd ends, and some rows
stay on chip.
"""

import importlib
import sys
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

import lossforge.kernels
from lossforge.losses import (
    clip_loss,
    clip_loss_from_features,
    complete_box_iou,
    cross_entropy,
    dice_loss,
    jsd_cross_entropy,
    kl_div_with_logits,
    load_balancing_loss,
    logit_adjusted_cross_entropy,
    matching_cost,
    seesaw_loss,
    task_aligned_assign,
    two_way_loss,
)
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


def walk() -> None:
    for loss in LOSSES.values():
        sample = plain_sample(loss, "cuda")
        for mode in ("forward", "backward"):
            x = sample.x.detach().requires_grad_()
            options = {"reduction": "sum", **sample.kwargs, "gradient": mode}
            (2.0 * loss.function(x, sample.target, **options)).backward()
    for mode in ("forward", "backward"):
        clip_loss(torch.randn(37, 50, device="cuda", requires_grad=True), gradient=mode).backward()
        a, b = (torch.randn(n, 40, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (137, 250))
        clip_loss_from_features(a, b, 10.0, gradient=mode).backward()
        jsd_cross_entropy(
            torch.randn(3 * 40, 70, device="cuda", requires_grad=True), torch.arange(40, device="cuda"), gradient=mode
        ).backward()
        two_way_loss(torch.randn(300, 50, device="cuda", requires_grad=True), torch.rand(300, 50, device="cuda"), gradient=mode).backward()
        load_balancing_loss(torch.randn(3000, 60, device="cuda", requires_grad=True), 4, gradient=mode).backward()
    for classes in (33_000, 33_001):
        x = torch.randn(300, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(0, classes, (300,), device="cuda")
        target[::7] = -100
        (2.0 * cross_entropy(x, target)).backward()
        kl_div_with_logits(x, torch.randn_like(x), labels=target).backward()
    for dtype in (torch.float32, torch.bfloat16):  # rows that begin anywhere, beside the bias of their classes
        x = torch.randn(300, 21_841, device="cuda", dtype=dtype, requires_grad=True)
        logit_adjusted_cross_entropy(x, torch.randint(0, 21_841, (300,), device="cuda"), torch.rand(21_841, device="cuda").log()).backward()
    for classes in (5, 21, 50):  # of a pixel in one lane, and in one tile
        x = torch.randn(2, classes, 37, 41, device="cuda", requires_grad=True)
        dice_loss(x, torch.randint(0, classes, (2, 37, 41), device="cuda"), reduction="mean").backward()
    low = torch.rand(2, 301, 2, device="cuda")
    boxes = torch.cat([low, low + torch.rand_like(low)], 2).requires_grad_()
    complete_box_iou(boxes[0], boxes[1, :37]).sum().backward()
    labels = torch.randint(0, 7, (2, 301), device="cuda")
    predicted, anchors = boxes[:, :1].expand(2, 777, 4), torch.rand(777, 2, device="cuda")
    task_aligned_assign(torch.rand(2, 777, 7, device="cuda"), predicted, anchors, labels, boxes)
    matching_cost(torch.rand(2, 77, 7, device="cuda"), boxes[:, :77], labels[0], boxes[0], [300, 1])
    rows = torch.randint(0, 5003, (37,), device="cuda")
    seesaw_loss(torch.randn(37, 5003, device="cuda", requires_grad=True), rows, torch.arange(5003, device="cuda")).backward()
    target = torch.randint(0, 3, (5000,), device="cuda")
    cross_entropy(torch.randn(5000, 3, device="cuda", requires_grad=True), target).backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    walk()
    missing = kernels() - set(lossforge.kernels.launch_counts())
    print(dict(sorted(lossforge.kernels.launch_counts().items())))
    sys.exit(f"not launched: {', '.join(sorted(missing))}" if missing else 0)

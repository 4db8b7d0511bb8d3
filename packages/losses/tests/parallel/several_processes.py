"""One of the processes of test_parallel: losses whose classes are spread, against the loss of all classes in float64.

On the CPU through gloo, or on as many GPUs through NCCL.
"""

import contextlib
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lossforge import kernels
from lossforge import losses as L
from lossforge.kernels import launch_counts
from lossforge.losses.testing import error

ROWS, FEATURES = 7, 5
PADDED = 24
OUTPUTS = {"outputs": ("z_loss", "lse", "entropy", "correct", "argmax", "log_p2", "mean_logit")}


class Layout:
    """How many classes there are, and the first and last of this process, of which the last may be padding."""

    def __init__(self, classes: int, each: int, padded: bool) -> None:
        rank = dist.get_rank()
        self.classes, self.total = classes, each * dist.get_world_size() if padded else classes
        self.low, self.high = (min(at * each, self.total) for at in (rank, rank + 1))
        self.own = max(min(self.high, classes) - self.low, 0)

    def part(self, t: Tensor, dim: int = 0) -> Tensor:
        """Return this process's part of a tensor of all classes, with padding that nothing may read."""
        padding = torch.full([self.total - n if d == dim % t.ndim else n for d, n in enumerate(t.shape)], torch.nan).to(t)
        return torch.cat([t, padding], dim).narrow(dim, self.low, self.high - self.low).clone()

    def of_own(self, t: Tensor, dim: int = 0) -> Tensor:
        """Return this process's part of a tensor of all classes, and 0 for padding: the gradient that is expected."""
        found = torch.zeros_like(self.part(t, dim))
        found.narrow(dim, 0, self.own).copy_(t.narrow(dim, min(self.low, self.classes - self.own), self.own))
        return found


def layouts() -> dict[str, Layout]:
    processes = dist.get_world_size()
    each = PADDED // processes
    return {
        "equal": Layout(PADDED, each, True),
        "uneven": Layout(PADDED - 3, -(-(PADDED - 3) // processes), False),
        "padded": Layout(PADDED - 3, each, True),
        "padding alone": Layout(PADDED - each, each, True),
    }


def cases(classes: int, target: Tensor) -> dict[str, dict[str, Any]]:
    weight, other = torch.rand(classes), torch.randint(classes, target.shape)
    other[:2], other[3] = -100, int(target[3])
    pair = {"target_b": other, "lam": torch.rand(target.shape)}
    return {
        "mean": {},
        "sum": {"reduction": "sum", "scale": 0.7, "softcap": 4.0},
        "rows": {"reduction": "none", "label_smoothing": 0.2},
        "smoothing alone": {"label_smoothing": 1.0, "z_loss": 0.1},
        "weights": {"weight": weight, "z_loss": 0.1, "label_smoothing": 0.1},
        "weights of rows": {"weight": weight, "reduction": "none"},
        "weights of tokens": {"token_weight": torch.randn(len(target)).mul(torch.arange(len(target)) != 1), "z_loss": 0.1},
        "weights of tokens and classes": {"token_weight": torch.rand(()), "weight": weight, "reduction": "none"},
        "by probability": {"token_weight": "probability", "reduction": "sum", "scale": 0.7},
        "by probability, weights": {"token_weight": "probability", "weight": weight, "outputs": ("lse",)},
        "by entropy": {"token_weight": "entropy", "softcap": 3.0},
        "by entropy, outputs": {"token_weight": "entropy", **OUTPUTS, "z_loss": 0.1, "weight": weight},
        "pair": pair,
        "pair, smoothed": {**pair, "label_smoothing": 0.3, "weight": weight},
        "another ignored class": {"ignore_index": int(target[0]), "label_smoothing": 0.1},
        "nothing counts": {"ignore_index": -100, "target": torch.full_like(target, -100), "empty": "zero"},
        "normalizer": {"normalizer": torch.tensor(3.0), "z_loss": 0.2},
        "number as normalizer": {"normalizer": 5, "weight": weight},
        "outputs": {**OUTPUTS, "reduction": "none", "z_loss": 0.1, "softcap": 6.0},
        "outputs of the mean": {**OUTPUTS, "label_smoothing": 0.1},
        "probabilities": {"target": torch.randn(len(target), classes).softmax(1), "label_smoothing": 0.1, "weight": weight},
        "probabilities of rows": {"target": torch.randn(len(target), classes).softmax(1), "reduction": "none", "outputs": ("argmax",)},
    }


def scalar(found: Any) -> Tensor:
    """Return a number that every differentiable result has a part in."""
    parts = [found] if isinstance(found, Tensor) else [t for t in found if t is not None and t.requires_grad]
    return sum(((i + 1.7) * t * torch.linspace(0.5, 2.0, t.numel()).view(t.shape).to(t)).sum() for i, t in enumerate(parts))  # type: ignore[return-value]


def compare(name: str, found: Any, expected: Any, grads: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    for got, want in [*pairs, *zip(grads, wanted, strict=True)]:
        if want is None:
            assert got is None, name
            continue
        assert got is not None, name
        exact = not want.is_floating_point()
        torch.testing.assert_close(got, want if exact else want.to(got.dtype), rtol=2e-5, atol=5e-6, msg=lambda text: f"{name}: {text}")
        first = got.detach().clone()
        if not any(got is t for t in grads):
            dist.broadcast(first, 0)
            assert torch.equal(first, got) or first.isnan().any(), f"{name}: processes differ"


def grads_of(found: Any, leaves: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(scalar(found), leaves, allow_unused=True))


def double(v: Any) -> Any:
    return v.double() if isinstance(v, Tensor) and v.is_floating_point() else v


def spread(layout: Layout, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as this process has them."""

    def own(name: str, v: Any) -> Any:
        if name == "weight":
            return layout.part(v)
        return layout.part(v, 1) if name == "target" and v.ndim == 2 else v

    return {name: own(name, v) for name, v in options.items()}


def check_rows(layout: Layout, name: str, group: Any, only: Collection[str] = ()) -> None:
    """Compare every case of logits, (N, C), and of a layer. only: the names of fewer cases."""
    torch.manual_seed(len(name))
    x, w, b = torch.randn(ROWS, FEATURES), 2 * torch.randn(layout.classes, FEATURES), torch.randn(layout.classes)
    logits, target = x @ w.t() + b, torch.randint(layout.classes, (ROWS,))
    target[4] = -100
    known = {"group": group, "classes": layout.classes}
    for case, options in cases(layout.classes, target).items():
        if only and case not in only:
            continue
        given = {"target": target, **options}
        if case == "another ignored class":
            given["target"] = torch.where(target == -100, target[0], target)
        wide = {key: double(v) for key, v in given.items()}
        mine = spread(layout, given)
        whole = logits.double().requires_grad_()
        expected = L.cross_entropy(whole, **wide)
        (wanted,) = grads_of(expected, [whole])
        part = layout.part(logits, 1).requires_grad_()
        found = L.cross_entropy(part, **mine, **known)
        compare(f"{name}, {case}", found, expected, grads_of(found, [part]), [layout.of_own(wanted, 1)])

        leaves = [t.double().requires_grad_() for t in (x, w, b)]
        renamed = lambda each: {"loss_weight" if key == "weight" else key: v for key, v in each.items()}  # noqa: E731
        expected = L.linear_cross_entropy(*leaves[:2], bias=leaves[2], **renamed(wide))
        of_x, of_w, of_b = grads_of(expected, leaves)
        own = [t.clone().requires_grad_() for t in (x, layout.part(w), layout.part(b))]
        found = L.linear_cross_entropy(*own[:2], bias=own[2], **renamed(mine), **known, chunk=4)
        grads = grads_of(found, own)
        compare(f"layer: {name}, {case}", found, expected, grads, [of_x, layout.of_own(of_w), layout.of_own(of_b)])
        again = L.linear_cross_entropy(*own[:2], bias=own[2], **renamed(mine), **known, chunk=4)
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(grads, grads_of(again, own), strict=True)), "bits differ"


def check_tokens(layout: Layout, name: str, group: Any) -> None:
    """Compare log-probabilities and entropies of a layer, with the rows in two dimensions."""
    x, w = torch.randn(2, 4, FEATURES), 2 * torch.randn(layout.classes, FEATURES)
    index = torch.randint(layout.classes, (2, 4))
    index[1, 2] = -100
    known = {"group": group, "classes": layout.classes}
    warmth = torch.rand(2, 4) + 0.5
    several = torch.stack([index, torch.randint(layout.classes, (2, 4)), layout.classes - 1 - index.abs() % layout.classes], -1)
    single, wide = torch.float32, torch.float64
    for tokens, dtype, options in (
        (index, single, {}),
        (index, single, {"temperature": 0.7, "softcap": 5.0, **OUTPUTS}),
        (index, single, {"temperature": warmth, "scale": 1.3, "chunk": 3, **OUTPUTS}),
        (several, wide, {}),
        (several, wide, {"temperature": warmth.double(), "softcap": 5.0, "scale": 1.3, **OUTPUTS}),
    ):
        leaves, own = (
            [x.double().requires_grad_(), w.double().requires_grad_()],
            [t.to(dtype, copy=True).requires_grad_() for t in (x, layout.part(w))],
        )
        expected = L.linear_selective_log_softmax(*leaves, tokens, **options)
        found = L.linear_selective_log_softmax(*own, tokens, **options, **known)
        of_x, of_w = grads_of(expected, leaves)
        compare(f"{name}, tokens", found, expected, grads_of(found, own), [of_x, layout.of_own(of_w)])
    leaves, own = [x.double().requires_grad_(), w.double().requires_grad_()], [x.clone().requires_grad_(), layout.part(w).requires_grad_()]
    expected, found = L.linear_entropy(*leaves, softcap=3.0), L.linear_entropy(*own, softcap=3.0, **known)
    of_x, of_w = grads_of(expected, leaves)
    compare(f"{name}, entropy", found, expected, grads_of(found, own), [of_x, layout.of_own(of_w)])
    mask, advantages = torch.rand(2, 4), torch.tensor([1.3, -0.4])
    mask[0, 1] = 0.0
    target = L.mtp_targets(index, 2)
    weights = {"depth_weights": (1.0, 0.3), "token_weight": mask, "normalizer": 5.0, "outputs": ("losses",)}
    first = {"depth_weights": torch.tensor([0.7, 0.0]), "outputs": ("losses",), "scale": 1.2, "softcap": 4.0, "skip_ignored": True}
    policy: list[tuple[str, Any]] = [  # of a temperature and a weight a token, and of two depths
        (
            "policy",
            lambda x, w, **spread: _policy(L.linear_selective_log_softmax(x, w, index, temperature=warmth, **spread), advantages, mask),
        ),
        ("depths", lambda x, w, **spread: L.linear_mtp_loss([x, 2 * x], w, target, **weights, **spread)),
        ("the first depth's loss alone", lambda x, w, **spread: L.linear_mtp_loss([x, 2 * x], w, target, **first, **spread)),
    ]
    for case, function in policy:
        expected, found = function(*leaves), function(*own, **known)
        of_x, of_w = grads_of(expected, leaves)
        compare(f"{name}, {case}", found, expected, grads_of(found, own), [of_x, layout.of_own(of_w)])
    part = L.linear_cross_entropy(*own, index, **known, sum_input_gradient=False)
    (of_part,) = torch.autograd.grad(part, own[:1])
    dist.all_reduce(of_part)
    (of_x,) = torch.autograd.grad(L.linear_cross_entropy(*leaves, index), leaves[:1])
    torch.testing.assert_close(of_part, of_x.float(), rtol=2e-5, atol=2e-6)
    fused = L.fuse_linear(L.cross_entropy)(*own, index, **known, skip_ignored=True)
    torch.testing.assert_close(torch.autograd.grad(fused, own[:1])[0], of_x.float(), rtol=2e-5, atol=2e-6)


def _policy(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return GRPO's loss, whose mask is a weight a token, against a policy that was a little more sure."""
    old = logps.detach() + 0.1
    return L.grpo_loss(logps, advantages.to(logps), old, old - 0.3, mask.to(logps), beta=0.1)


def divergences(target: Tensor, lse: Tensor) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Return fused divergences, the same of logits, and options. lse: of a teacher with more classes."""
    weight = torch.rand(target.shape)
    weight[2] = 0.0
    kl, js, tv, draft = (
        (L.linear_kl_div, L.kl_div_with_logits),
        (L.linear_js_div, L.js_div_with_logits),
        (L.linear_total_variation, L.total_variation_with_logits),
        (L.linear_draft_loss, L.draft_loss_with_logits),
    )
    both = ("entropy", "acceptance")
    return {
        "kl": (*kl, {"temperature": 2.0}),
        "kl of rows": (*kl, {"reduction": "none", "loss_weight": weight}),
        "reverse kl": (*kl, {"reverse": True, "reduction": "mean", "labels": target, "scale": 0.8, "softcap": 3.0}),
        "js": (*js, {"beta": 0.3, "temperature": 0.7, "loss_weight": weight, "labels": target, "reduction": "sum"}),
        "js of rows": (*js, {"reduction": "none", "labels": target}),
        "js in backward": (*js, {"beta": 0.9, "gradient": "backward", "softcap": 4.0, "normalizer": torch.tensor(3.0)}),
        "total variation": (*tv, {"temperature": 1.5, "scale": 1.3}),
        "kl and labels": (*kl, {"temperature": 2.0, "labels": target, "hard_weight": 0.3, "outputs": ("entropy",), "scale": 0.6}),
        "js and labels": (*js, {"reduction": "none", "labels": target.int(), "hard_weight": 0.6, "loss_weight": weight, "softcap": 3.0}),
        "labels alone": (*tv, {"labels": target.clamp(min=0), "ignore_index": int(target[0]), "hard_weight": 1.0, "gradient": "backward"}),
        "draft": (*draft, {"temperature": 1.5, "scale": 1.3, "outputs": ("acceptance",)}),
        "draft of rows": (*draft, {"reduction": "none", "loss_weight": weight, "labels": target, "teacher_lse": lse, "outputs": both}),
        "draft, log": (*draft, {"kind": "log_tv", "teacher_lse": lse, "softcap": 4.0}),
        "draft, tv and labels": (*draft, {"kind": "tv", "teacher_lse": lse, "labels": target, "hard_weight": 0.1, "outputs": both}),
        "draft, kl": (*draft, {"kind": "kl", "outputs": ("acceptance",), "loss_weight": weight, "gradient": "backward"}),
        "draft, ce": (*draft, {"kind": "ce", "outputs": ("acceptance",), "reduction": "sum"}),
        "draft, ce alone": (*draft, {"kind": "ce", "teacher_lse": lse}),
        "entropy": (*kl, {"reduction": "sum", "reverse": True, "temperature": 0.7, "outputs": ("entropy",)}),
    }


def check_divergences(layout: Layout, name: str, group: Any, only: Collection[str] = ()) -> None:
    """Compare divergences from a teacher whose classes are spread too: of logits, and of a layer with other features."""
    x, w, b = torch.randn(ROWS, FEATURES), torch.randn(layout.classes, FEATURES), torch.randn(layout.classes)
    y, v, target = torch.randn(ROWS, 3), 2 * torch.randn(layout.classes, 3), torch.randint(layout.classes, (ROWS,))
    target[4] = -100
    for case, (fused, function, options) in divergences(target, (y @ v.t()).logsumexp(1) + torch.rand(ROWS)).items():
        if only and case not in only:
            continue
        leaves = [t.double().requires_grad_() for t in (x, w, b)]
        of_logits = {"weight" if key == "loss_weight" else key: double(t) for key, t in options.items()}
        expected = function(leaves[0] @ leaves[1].t() + leaves[2], (y @ v.t()).double(), **of_logits)
        of_x, of_w, of_b = grads_of(expected, leaves)
        for teacher in (L.LinearTeacher(y, layout.part(v)), layout.part(y @ v.t(), 1)):
            own = [t.clone().requires_grad_() for t in (x, layout.part(w), layout.part(b))]
            found = fused(*own[:2], teacher, own[2], **options, group=group, classes=layout.classes, chunk=4)
            grads = [t.clone() for t in torch.autograd.grad(scalar(found), own, retain_graph=True)]
            compare(f"{name}, {case}", found, expected, grads, [of_x, layout.of_own(of_w), layout.of_own(of_b)])
            again = torch.autograd.grad(scalar(found), own)
            assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "the second backward has other bits"
    far = y @ v.t() - 1e4  # an offset of all classes, beside which padding is large
    whole, own = x.double().requires_grad_(), [x.clone().requires_grad_(), layout.part(w).requires_grad_()]
    expected = L.kl_div_with_logits(whole @ w.double().t(), far.double())
    found = L.linear_kl_div(*own, layout.part(far, 1), group=group, classes=layout.classes)
    compare(f"{name}, an offset", found, expected, grads_of(found, own[:1]), grads_of(expected, [whole]))
    own = [x[:0], layout.part(w).requires_grad_()]
    nothing = L.linear_js_div(*own, L.LinearTeacher(y[:0], layout.part(v)), reduction="sum", group=group, classes=layout.classes)
    assert nothing == 0
    assert not torch.autograd.grad(nothing, own[1:])[0].any()


def check_top_k(layout: Layout, name: str, group: Any, cases: slice = slice(None)) -> None:
    """Compare divergences from a teacher's four likeliest classes, of which a process has some, of a row also all or none."""
    torch.manual_seed(2)
    x, w, b = torch.randn(ROWS, FEATURES), torch.randn(layout.classes, FEATURES), torch.randn(layout.classes)
    teacher, target = 2 * torch.randn(ROWS, layout.classes), torch.randint(layout.classes, (ROWS,))
    teacher[0, : layout.classes // 2] -= 50.0
    weight = torch.rand(ROWS)
    weight[2], target[4] = 0.0, -100
    log_q, indices = teacher.log_softmax(1).topk(4)
    target[:2] = indices[:2, 0]  # a label among the entries
    absent = indices.clone()
    absent[1, 2:] = absent[3] = -1
    x[2], x[4] = torch.nan, torch.inf  # rows that do not count
    counts = {"labels": target, "loss_weight": weight}
    for options in (
        {"tail": True, **counts, "outputs": ("entropy",)},
        {"reverse": 0.3, "renormalize": True, "temperature": 1.7, "softcap": 4.0, "scale": 1.3, **counts, "reduction": "none"},
        {"reverse": True, "tail": True, "temperature": 2.0, "hard_weight": 0.4, **counts, "outputs": ("entropy",)},
        {"hard_weight": 0.6, "softcap": 5.0, **counts, "normalizer": torch.tensor(3.0), "temperature_squared": False},
    )[cases]:
        leaves = [t.double().requires_grad_() for t in (x.nan_to_num(0, 0, 0), w, b)]
        of_logits = {"weight" if key == "loss_weight" else key: double(t) for key, t in options.items()}
        expected = L.topk_kl_div_with_logits(leaves[0] @ leaves[1].t() + leaves[2], log_q.double(), absent, **of_logits)
        of_x, of_w, of_b = grads_of(expected, leaves)
        own = [t.clone().requires_grad_() for t in (x, layout.part(w), layout.part(b))]
        known = {"group": group, "classes": layout.classes, "chunk": 4}
        found = L.linear_kl_div(*own[:2], L.TopKTeacher(log_q, absent), own[2], **options, **known)
        grads = grads_of(found, own)
        compare(f"{name}, {options}", found, expected, grads, [of_x, layout.of_own(of_w), layout.of_own(of_b)])
    values, classes, lse = L.linear_top_k(x[:2], layout.part(w), 3, layout.part(b), temperature=0.7, group=group, classes=layout.classes)
    softened = (x[:2] @ w.t() + b).double() / 0.7
    expected, right = softened.log_softmax(1).topk(3)
    assert torch.equal(classes, right)
    compare(f"{name}, top 3", [values, lse], [expected, softened.logsumexp(1)], [], [])


def check_three_products(group: Any, cases: slice = slice(None), sizes: Sequence[float] = (1.0, 12.0)) -> None:
    """Compare scalar losses of a layer in bfloat16, whose gradient the matrix product writes in forward, and count those.

    Args:
        cases: which of them.
        sizes: factors of the logits; at the larger one another process has nearly all of a row's probability.
    """
    launch = kernels.load("linear.launch")
    launch.WORK = 0
    if not torch.cuda.is_available():
        launch.programs = lambda device: 2  # as on a GPU of sm_90
    torch.manual_seed(0)
    x, w = torch.randn(40, 64), torch.randn(2 * PADDED - 3, 64)
    target = torch.randint(len(w), (40,))
    target[3::7] = -100
    layout = Layout(len(w), -(-len(w) // dist.get_world_size()), False)
    x, w, divisor = x.bfloat16(), w.bfloat16(), torch.tensor(7.0)
    of_tokens = torch.randn(40).mul(torch.arange(40) % 5 > 0)
    torch.set_default_device(None)  # a mode, under which no product writes a gradient in forward
    for options, chunks in (
        ({}, 1),
        ({"reduction": "sum", "softcap": 5.0, "scale": 0.7}, 1),
        ({"z_loss": 0.01, "normalizer": divisor, "chunk": 16}, 3),
        ({"chunk": 16, "gradient": "forward", "accumulate": "weight"}, 3),
        ({"chunk": 16, "token_weight": of_tokens, "z_loss": 0.01, "softcap": 9.0}, 3),
        ({"token_weight": "probability", "reduction": "sum"}, 1),
    )[cases]:
        for size in sizes:
            given = x * size
            if options.get("token_weight") is of_tokens:  # a row of weight 0 may hold anything
                given[of_tokens == 0] = torch.nan
            wide = given.nan_to_num()
            leaves, own = [t.double().requires_grad_() for t in (wide, w)], [t.clone().requires_grad_() for t in (given, layout.part(w))]
            known = {**options, "group": group, "classes": len(w)}
            of_logits = {name: double(v) for name, v in options.items() if name not in ("chunk", "gradient", "accumulate")}
            expected = L.cross_entropy(leaves[0] @ leaves[1].t(), target, **of_logits)
            wanted = torch.autograd.grad(3 * expected, leaves)
            before = launch_counts().get("linear_finish_kernel", 0)
            found = L.linear_cross_entropy(*own, target, **known)
            assert launch_counts().get("linear_finish_kernel", 0) == before + chunks
            grads = torch.autograd.grad(3 * found, own, retain_graph=True)
            again = torch.autograd.grad(3 * found, own)
            torch.testing.assert_close(found, expected.float(), rtol=3e-5, atol=3e-5)
            assert error(grads[0], wanted[0]) < 1.5e-2
            assert error(grads[1], layout.of_own(wanted[1])) < 1.2e-2
            assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "the second backward has other bits"
            repeated = L.linear_cross_entropy(*own, target, **known)
            assert all(torch.equal(a, b) for a, b in zip((found, *grads), (repeated, *torch.autograd.grad(3 * repeated, own)), strict=True))
            before = launch_counts().get("linear_finish_kernel", 0)
            four = torch.autograd.grad(3 * L.linear_cross_entropy(*own, target, **{**known, "gradient": "backward"}), own)
            assert launch_counts().get("linear_finish_kernel", 0) == before
            assert error(grads[1], four[1]) < 2e-2
    # a weight that the product cannot address is copied, so that all processes take three products
    turned = own[1].detach().t().contiguous().t() if dist.get_rank() else own[1].detach()
    turned.requires_grad_()
    assert turned.is_contiguous() == (dist.get_rank() == 0)
    before = launch_counts().get("linear_finish_kernel", 0)
    found = torch.autograd.grad(L.linear_cross_entropy(own[0], turned, target, **{**known, "chunk": 16}), [own[0], turned])
    assert launch_counts().get("linear_finish_kernel", 0) == before + 3
    whole = torch.autograd.grad(L.linear_cross_entropy(*own, target, **{**known, "chunk": 16}), own)
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    check_depths(x.view(2, 20, 64), w, target.view(2, 20), layout, {"group": group, "classes": len(w), "chunk": 16})
    if x.is_cuda:
        torch.set_default_device(x.device)


def check_depths(x: Tensor, w: Tensor, target: Tensor, layout: Layout, known: dict[str, Any]) -> None:
    """Compare two depths in three products, of which one has weight 0, with one process in float64."""
    factors = torch.rand(2, 20).mul(torch.arange(20) != 3)
    leaves, own = [t.double().requires_grad_() for t in (x, w)], [t.clone().requires_grad_() for t in (x, layout.part(w))]
    for weights in ((1.0, 0.3), (0.5, 0.0)):
        given = {"depth_weights": weights, "token_weight": factors, "outputs": ("losses",)}
        loss, losses = L.linear_mtp_loss(*leaves, target, **given)
        wanted = torch.autograd.grad(3 * loss, leaves)
        before = launch_counts().get("linear_finish_kernel", 0)
        found, each = L.linear_mtp_loss(*own, target, **given, **known)
        assert launch_counts().get("linear_finish_kernel", 0) == before + 3
        grads = torch.autograd.grad(3 * found, own)
        torch.testing.assert_close(torch.stack([found, *each]), torch.stack([loss, *losses]).float(), rtol=3e-5, atol=3e-5)
        assert not each.requires_grad
        assert error(grads[0], wanted[0]) < 1.5e-2
        assert error(grads[1], layout.of_own(wanted[1])) < 1.2e-2


def check_precision(group: Any) -> None:
    """Compare the error of the input's gradient in bfloat16 with one process's: parts are summed in float32, and rounded once."""
    torch.manual_seed(1)
    x, w, target = torch.randn(64, 32).bfloat16(), torch.randn(2 * PADDED, 32).bfloat16(), torch.randint(2 * PADDED, (64,))
    teacher = torch.randn(64, 2 * PADDED)
    layout = Layout(len(w), len(w) // dist.get_world_size(), True)
    own_teacher, known = layout.part(teacher, 1), {"group": group, "classes": len(w)}
    upstream = torch.linspace(0.5, 2.0, 64)
    torch.set_default_device(None)  # a mode, under which no product writes a gradient in forward
    for name, one, several, exact in (
        ("scalar", *[lambda x, w, **more: L.linear_cross_entropy(x, w, target, **more)] * 2, lambda z: L.cross_entropy(z, target)),
        (
            "rows",
            *[lambda x, w, **more: upstream @ L.linear_cross_entropy(x, w, target, reduction="none", **more)] * 2,
            lambda z: upstream.double() @ L.cross_entropy(z, target, reduction="none"),
        ),
        (
            "divergence",
            lambda x, w: L.linear_kl_div(x, w, teacher),
            lambda x, w, **more: L.linear_kl_div(x, w, own_teacher, **more),
            lambda z: L.kl_div_with_logits(z, teacher.double()),
        ),
    ):
        wide, whole, part = x.double().requires_grad_(), x.clone().requires_grad_(), x.clone().requires_grad_()
        (right,) = torch.autograd.grad(exact(wide @ w.double().t()), wide)
        (of_one,) = torch.autograd.grad(one(whole, w.clone().requires_grad_()), whole)
        (of_several,) = torch.autograd.grad(several(part, layout.part(w).requires_grad_(), **known), part)
        errors = [((g.double() - right).norm() / right.norm()).item() for g in (of_one, of_several)]
        assert errors[1] < 1.1 * errors[0], f"{name}: {errors}"
    if x.is_cuda:
        torch.set_default_device(x.device)


def check_layouts_of_logits(group: Any) -> None:
    """Compare images, (N, C, d, d), one row, (C,), and rows with logits that are not finite."""
    layout = layouts()["equal"]
    image, labels = torch.randn(2, PADDED, 3, 2), torch.randint(PADDED, (2, 3, 2))
    row = torch.randn(PADDED)
    for x, target in ((image, labels), (row, torch.tensor(3))):
        dim = min(x.ndim - 1, 1)
        whole, own = x.double().requires_grad_(), layout.part(x, dim).requires_grad_()
        options = {**OUTPUTS, "reduction": "none", "label_smoothing": 0.1}
        expected, found = L.cross_entropy(whole, target, **options), L.cross_entropy(own, target, group=group, classes=PADDED, **options)
        compare("layout", found, expected, grads_of(found, [own]), [layout.of_own(grads_of(expected, [whole])[0], dim)])
    x, target = torch.randn(4, PADDED), torch.tensor([1, PADDED - 1, -100, 2])
    x[1, 0] = -torch.inf  # a class that is left out
    x[2] = torch.nan
    of_tokens = torch.tensor([0.5, 2.0, 1.0, 0.0])
    for options in ({}, {"z_loss": 0.1, "scale": 0.7, "softcap": 4.0}, {"label_smoothing": 0.1}, {"token_weight": of_tokens}):
        if "token_weight" in options:
            x[3] = torch.nan
        whole, own = torch.where(x.isnan(), 0.0, x).double().requires_grad_(), layout.part(x, 1).requires_grad_()
        expected, found = (
            L.cross_entropy(t, target, **options, **more) for t, more in ((whole, {}), (own, {"group": group, "classes": PADDED}))
        )
        compare(f"not finite, {options}", found, expected, grads_of(found, [own]), [layout.of_own(grads_of(expected, [whole])[0], 1)])
    x = torch.randn(4, PADDED)
    x[0, PADDED // 2 :] = x[2] = -torch.inf  # all classes of a process, and of an ignored row
    whole, own = x.double().requires_grad_(), layout.part(x, 1).requires_grad_()
    outputs = {"outputs": ("lse", "entropy"), "z_loss": 0.1}
    expected = L.cross_entropy(whole, torch.tensor([1, PADDED - 1, -100, 2]), **outputs)
    wanted = torch.autograd.grad(expected.loss + expected.entropy[:2].sum(), whole)[0]
    for several in (contextlib.nullcontext(), L.plain_torch()):
        with several:
            found = L.cross_entropy(own, torch.tensor([1, PADDED - 1, -100, 2]), **outputs, group=group, classes=PADDED)
            grads = [*torch.autograd.grad(found.loss + found.entropy[:2].sum(), own)]
        compare("masked", [found.loss, found.lse], [expected.loss, expected.lse], grads, [layout.of_own(wanted, 1)])
    x, bias = torch.randn(4, PADDED), torch.randn(2, PADDED)
    x[0, 2] = x[1, : PADDED // 2] = x[2, PADDED // 2 :] = x[3] = torch.nan  # of one class, of all classes of a process, of all
    bias[0, 3], bias[1, : PADDED // 2] = torch.nan, torch.nan
    for each in (layout, layouts()["uneven"], layouts()["padding alone"]):
        known = {"outputs": ("correct", "argmax"), "group": group, "classes": each.classes}
        for several in (contextlib.nullcontext(), L.plain_torch()):
            with several:
                target = x[:, : each.classes].nan_to_num(-torch.inf).argmax(1)
                found = L.cross_entropy(each.part(x[:, : each.classes], 1), target, **known)
                assert torch.equal(found.argmax, target)
                assert torch.equal(found.correct, ~x[:, : each.classes].isnan().any(1))
                for of_classes in bias[:, : each.classes]:
                    target = of_classes.nan_to_num(-torch.inf).argmax().expand(2)
                    own = torch.zeros(2, FEATURES), each.part(torch.ones(each.classes, FEATURES))
                    found = L.linear_cross_entropy(*own, target, each.part(of_classes), **known)
                    assert torch.equal(found.argmax, target)
                    assert torch.equal(found.correct, ~of_classes.isnan().any().expand(2))


def check_compiled(group: Any) -> None:
    """Compare a compiled loss, whose graph has the collectives, with an eager one; and a compiled divergence."""
    layout = layouts()["equal"]
    x, w, target = torch.randn(ROWS, FEATURES), torch.randn(PADDED, FEATURES), torch.randint(PADDED, (ROWS,))
    leaves = [x.requires_grad_(), layout.part(w).requires_grad_()]

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return L.linear_cross_entropy(x, w, target, group=group, classes=PADDED, z_loss=0.1)

    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(found, loss(*leaves))
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(loss(*leaves), leaves))

    target[::3] = -100

    def skipping(x: Tensor, w: Tensor) -> Tensor:  # whose graph breaks, to wait for the number of rows
        return L.linear_cross_entropy(x, w, target, group=group, classes=PADDED, skip_ignored=True)

    found = torch.compile(skipping, backend="aot_eager")(*leaves)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(skipping(*leaves), leaves))

    teacher = torch.randn(ROWS, len(leaves[1]))

    def divergence(x: Tensor, w: Tensor) -> Tensor:  # whose graph breaks
        return 2 * L.linear_js_div(x, w, teacher, group=group, classes=PADDED)

    found = torch.compile(divergence, backend="aot_eager")(*leaves)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(divergence(*leaves), leaves))


def check_dtensors(mesh: Any) -> None:
    """Compare DTensors: a weight Shard(0) of any number of classes, an input that is whole or spread over its rows, and logits."""
    for classes in (PADDED, PADDED - 3):
        x, target = torch.randn(8, FEATURES), torch.randint(classes, (8,))
        head = torch.nn.Linear(FEATURES, classes)
        for t in head.parameters():
            dist.broadcast(t.data, 0)
        leaves = [t.detach().double().requires_grad_() for t in (x, head.weight, head.bias)]
        expected = L.linear_cross_entropy(*leaves[:2], target, leaves[2])
        of_x, of_w, of_b = (t.float() for t in torch.autograd.grad(expected, leaves))
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
        assert isinstance(head.weight, DTensor)
        for input in (x.clone(), distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(x, mesh, [Shard(0)])):
            head.zero_grad()
            input.requires_grad_()
            loss = L.linear_cross_entropy(input, head.weight, target, head.bias, group=mesh)
            loss.backward()
            torch.testing.assert_close(loss, expected.float())
            of_input = input.grad.full_tensor() if isinstance(input, DTensor) else input.grad
            for found, wanted in ((of_input, of_x), (head.weight.grad.full_tensor(), of_w), (head.bias.grad.full_tensor(), of_b)):
                torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)
            if isinstance(input, DTensor):
                assert input.grad.placements == input.placements
        head.zero_grad()
        L.cross_entropy(head(x), target, group=mesh).backward()
        torch.testing.assert_close(head.weight.grad.full_tensor(), of_w, rtol=2e-5, atol=2e-6)


class Model(torch.nn.Module):
    """A layer and a head, whose loss takes the head's weight from within the model, as FSDP2 gathers it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(FEATURES, 8), torch.nn.Linear(8, classes, bias=False)

    def forward(self, x: Tensor, target: Tensor, group: Any) -> Tensor:
        return L.linear_cross_entropy(self.body(x).tanh(), self.head.weight, target, group=group, label_smoothing=0.1)


def check_fsdp(kind: str) -> None:
    """Compare a model whose vocabulary is spread over one dimension of a mesh, and whose parameters FSDP2 spreads over the other."""
    mesh = init_device_mesh(kind, (2, dist.get_world_size() // 2), mesh_dim_names=("data", "vocabulary"))
    model = Model(PADDED)
    for t in model.parameters():
        dist.broadcast(t.data, 0)
    wide = Model(PADDED).double()
    wide.load_state_dict(model.state_dict())
    x, target = torch.randn(2, ROWS, FEATURES), torch.randint(PADDED, (2, ROWS))
    sum(wide(*each, None) / 2 for each in zip(x.double(), target, strict=True)).backward()
    expected = {name: t.grad.float() for name, t in wide.named_parameters()}
    parallelize_module(model.head, mesh["vocabulary"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"])
    place = mesh["data"].get_local_rank()
    found = []
    for call in (model, model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        call(x[place], target[place], mesh["vocabulary"]).backward()
        found.append({name: t.grad.full_tensor() for name, t in model.named_parameters()})
    for name, right in expected.items():
        torch.testing.assert_close(found[0][name], right, rtol=2e-5, atol=2e-6)
        assert all(torch.equal(found[0][name], each[name]) for each in found), "bits differ"


def refused(kind: type[Exception], part: str, function: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=re.escape(part)):
        function(*args, **options)


def check_errors(mesh: Any) -> None:
    group, x = mesh.get_group(), torch.randn(ROWS, 6)
    target = torch.zeros(ROWS, dtype=torch.int64)
    most = 6 * dist.get_world_size()
    spread = {"group": group, "classes": most}
    refused(IndexError, f"target must hold 0 to {most - 1}", L.cross_entropy, x, target + most, **spread)
    for function, given, name in ((L.cross_entropy, (x,), "input"), (L.linear_cross_entropy, (x, torch.randn(6, 6)), "weight")):
        refused(
            ValueError, f"group needs classes, the number of all classes, because {name} of 6 may", function, *given, target, group=group
        )
    refused(ValueError, "ignore_index needs class indices as target", L.cross_entropy, x, x.softmax(1), ignore_index=0, **spread)
    refused(ValueError, f"input must have {most // 6 + 6} of", L.cross_entropy, x, target, group=group, classes=most + (most // 6) ** 2)
    refused(ValueError, "classes must be at least 1, got 0", L.cross_entropy, x, target, group=group, classes=0)
    weight = distribute_tensor(torch.randn(most, 6), mesh, [Replicate()])
    refused(ValueError, "weight must be placed as (Shard(dim=0),)", L.linear_cross_entropy, x, weight, target, group=group)
    weight = distribute_tensor(torch.randn(most, 6), mesh, [Shard(0)])
    more = {"group": group, "classes": most + 1}
    refused(ValueError, f"at most those of weight, {most}, got {most + 1}", L.linear_cross_entropy, x, weight, target, **more)
    refused(TypeError, "weight must be a whole tensor, got a DTensor", L.linear_cross_entropy, x, weight, target)
    refused(ValueError, "served from a layer's input", L.cross_entropy, x, target, gradient="forward", **spread)
    whole, needed = torch.randn(6, 6), "teacher must give logits of shape (7, 6), got (7, 9)"
    refused(ValueError, needed, L.linear_kl_div, x, whole, L.LinearTeacher(x, torch.randn(9, 6)), **spread)
    refused(
        ValueError,
        "teacher has no gradient, got a tensor that requires grad",
        L.linear_kl_div,
        x,
        whole,
        x.clone().requires_grad_(),
        **spread,
    )
    refused(ValueError, "hard_weight needs labels", L.linear_kl_div, x, whole, x, hard_weight=0.5, **spread)
    more = {**spread, "hard_weight": 0.5, "labels": target + most}
    refused(IndexError, f"labels must hold 0 to {most - 1}", L.linear_kl_div, x, whole, x, **more)
    topk = L.TopKTeacher(torch.full((ROWS, 2), -1.0, requires_grad=True), torch.arange(2).repeat(ROWS, 1))
    refused(ValueError, "values has no gradient, got a tensor that requires grad", L.linear_kl_div, x, whole, topk, **spread)
    refused(ValueError, "gradient with group must be one of", L.linear_kl_div, x, whole, topk, **spread, gradient="forward")
    twice = L.cross_entropy(x.requires_grad_(), target, **spread)
    (gradient,) = torch.autograd.grad(twice, x, create_graph=True)
    refused(RuntimeError, "once_differentiable", gradient.sum().backward)


def main() -> None:
    gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group("nccl" if gpus else "gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda" if gpus else "cpu", (dist.get_world_size(),))
    for name, layout in layouts().items():
        if name in sys.argv[1:]:
            check_rows(layout, name, mesh.get_group())
            check_tokens(layout, name, mesh)
            check_divergences(layout, name, mesh)
            check_top_k(layout, name, mesh)
    if "three products" in sys.argv[1:]:
        check_three_products(mesh)
        check_precision(mesh)
    if "dtensors" in sys.argv[1:]:
        check_layouts_of_logits(mesh)
        check_compiled(mesh.get_group())
        check_dtensors(mesh)
        if not gpus:  # where indices are not read on the host
            check_errors(mesh)
    if "fsdp" in sys.argv[1:]:
        check_precision(mesh)
        check_fsdp(mesh.device_type)
    dist.barrier()
    print("every process agrees")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a mesh holds the process group: a thread of gloo's that lets go of a tensor while Python ends aborts the process

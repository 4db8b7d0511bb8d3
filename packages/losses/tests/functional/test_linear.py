"""Losses fused with their linear layer against the unfused computation, in every template, mode and number of chunks."""

import copy
import functools
import inspect
import math
import pickle
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from linear_calls import normal
from torch import Tensor

from lossforge import losses
from lossforge.losses import (
    CosineDistanceWithLogitsLoss,
    CrossEntropyLoss,
    FusedLinear,
    JSDivWithLogitsLoss,
    KLDivWithLogitsLoss,
    LinearCosineDistanceLoss,
    LinearCrossEntropyLoss,
    LinearJSDivLoss,
    LinearKLDivLoss,
    LinearTeacher,
    LinearTotalVariationLoss,
    TopKTeacher,
    TotalVariationWithLogitsLoss,
    binary_cross_entropy_with_logits,
    cosine_distance_with_logits,
    cross_entropy,
    dice_loss,
    dpo_loss,
    fuse_linear,
    generalized_box_iou_loss,
    js_div_with_logits,
    kl_div_with_logits,
    linear_cosine_distance,
    linear_cross_entropy,
    linear_entropy,
    linear_js_div,
    linear_kl_div,
    linear_objective,
    linear_selective_log_softmax,
    linear_top_k,
    linear_total_variation,
    logit_adjusted_cross_entropy,
    selective_log_softmax,
    softmax_focal_loss,
    total_variation_with_logits,
)
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.module import LossModule
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import error, samples

FUSED = [loss for loss in LOSSES.values() if loss.template.fusing]


def chosen(loss):
    """Calls with logits (N, C), which a layer gives."""
    for i, sample in enumerate(samples(loss)):
        plain = sample.x.ndim == 2 and sample.x.is_contiguous() and sample.x.shape[1] <= 600 and sample.kwargs.get("dim", -1) == -1
        if plain and (i % 3 == 0 or sample.name.startswith(("options", "class index", "mixup", "probabilities"))):
            yield sample


CALLS = [pytest.param(loss, sample.name, id=f"{loss.name}-{sample.name}") for loss in FUSED for sample in chosen(loss)]


def layer_of(x: Tensor, domain: str) -> list[Tensor]:
    """Input, weight and bias of a layer that gives x, or other logits of its shape."""
    if domain != "logits":
        return [x.clone(), torch.eye(x.shape[1], device=x.device), torch.zeros(x.shape[1], device=x.device)]
    rows, classes = x.shape
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(x.device) for shape in ((rows, 8), (classes, 8), (classes,))]


def run(function, leaves, dtype=None):
    """Return the value, and the gradients of what it gives, weighted."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in leaves]
    value = function(*leaves)
    value = value if isinstance(value, Tensor) else value[0]
    upstream = torch.linspace(0.5, 1.5, max(value.numel(), 1), device=value.device).view(value.shape)
    return value, torch.autograd.grad(value, leaves, upstream.to(value.dtype))


@pytest.mark.each("template")
@pytest.mark.parametrize(("loss", "name"), CALLS)
def test_every_loss(loss, name, device):
    """Value and gradients of input, weight and bias against float64, in chunks of 3 rows."""
    sample = next(s for s in samples(loss, device) if s.name == name)
    targets = () if sample.target is None else (sample.target,)
    leaves, fused = layer_of(sample.x, loss.domain), fuse_linear(loss.function)
    kwargs = {"loss_weight" if k == "weight" else k: v for k, v in sample.kwargs.items()}
    exact_kwargs = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in sample.kwargs.items()}
    for reduction in ("mean",) if "normalizer" in kwargs else loss.reductions:
        for mode in ("backward",) if reduction == "none" else ("forward", "backward"):

            def ours(x, weight, bias, reduction=reduction, mode=mode):
                return fused(x, weight, *targets, bias=bias, **kwargs, reduction=reduction, gradient=mode, chunk=3)

            def theirs(x, weight, bias, reduction=reduction):
                exact = [t.double() if t.is_floating_point() else t for t in targets]
                return loss.reference(F.linear(x, weight, bias), *exact, **exact_kwargs, reduction=reduction)

            value, gradients = run(ours, leaves)
            expected, exact = run(theirs, leaves, torch.float64)
            assert error(value, expected) < 2e-5, (reduction, mode)
            for got, right in zip(gradients, exact, strict=True):
                assert error(got, right) < 5e-5, (reduction, mode)


def test_every_option_of_cross_entropy_is_there():
    options = set(inspect.signature(cross_entropy).parameters) - {"size_average", "reduce", "inplace"}
    assert options <= set(inspect.signature(linear_cross_entropy).parameters)


def model(device, lead=(2, 7), hidden=6, classes=11):
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator).to(device) for shape in ((*lead, hidden), (classes, hidden), (classes,)))
    target = torch.randint(classes, lead, generator=generator).to(device)
    return [x, w, b], target


@pytest.mark.parametrize("lead", [(), (7,), (2, 7), (2, 3, 2)])
def test_leading_dimensions(lead, device):
    """Targets, further outputs, λ and weights of rows in the shape of the input's leading dimensions."""
    leaves, target = model(device, lead)
    pair = {"target_b": target.roll(1), "lam": 0.3}
    found = linear_cross_entropy(*leaves[:2], target, leaves[2], outputs=("lse", "correct"), reduction="none", **pair, chunk=4)
    logits = F.linear(*leaves)
    flat = logits.reshape(-1, 11)
    pair = {"target_b": pair["target_b"].reshape(-1), "lam": 0.3}
    expected = cross_entropy(flat, target.reshape(-1), outputs=("lse", "correct"), reduction="none", **pair)
    for got, right in zip(found, expected, strict=True):
        assert (got is None) == (right is None)
        if got is not None and right is not None:
            assert got.shape == lead
            assert error(got, right.reshape(lead)) < 1e-5
    probabilities = torch.rand(*lead, 11, device=device).softmax(-1)
    value = linear_cross_entropy(*leaves[:2], probabilities, leaves[2])
    assert error(value, cross_entropy(flat, probabilities.reshape(-1, 11))) < 1e-5


def test_shares_and_weights_broadcast(device):
    """λ of a sample, and element-wise weights, as far as they broadcast to (…, C)."""
    leaves, target = model(device)
    lam = torch.tensor([0.2, 0.7], device=device)
    value = linear_cross_entropy(*leaves[:2], target, leaves[2], target_b=target.roll(1), lam=lam)
    logits = F.linear(*leaves)
    assert error(value, cross_entropy(logits.mT, target, target_b=target.roll(1), lam=lam)) < 1e-5
    focal = LOSSES["focal"].function
    for shape in ((11,), (2, 1, 11), (7, 1), (2, 7, 11), ()):
        weight = torch.rand(shape, device=device)
        value = fuse_linear(focal)(*leaves[:2], target, bias=leaves[2], loss_weight=weight, reduction="sum")
        assert error(value, focal(logits, target, weight=weight, reduction="sum")) < 1e-5, shape
    for shape in ((2, 7), (7,), (2, 1), (1, 7), ()):
        weight = torch.rand(shape, device=device)
        value = linear_cross_entropy(*leaves[:2], target, leaves[2], token_weight=weight)
        assert error(value, cross_entropy(logits.mT, target, token_weight=weight.expand(2, 7))) < 1e-5, shape


SKIPPED = [
    pytest.param(loss, reduction, id=f"{loss.name}-{reduction}")
    for loss in FUSED
    if loss.template.by_rows or loss.template.name in ("divergence", "topk")
    for reduction in inspect.signature(loss.function).parameters["reduction"].annotation.__args__
]


@pytest.mark.each("template", "reduction")
@pytest.mark.parametrize(("loss", "reduction"), SKIPPED)
def test_ignored_rows_are_skipped(loss, reduction, device):
    """Where the host may wait, and where it knows how many rows are left or a bound: the same values and gradients."""
    leaves, target = model(device)
    ignored = torch.zeros_like(target, dtype=torch.bool)
    ignored[0, 2:6] = True
    fused, targets, given = fuse_linear(loss.function), (target.masked_fill(ignored, loss.template.ignored),), {}
    if loss.domain == "cosines":
        given = {"scale": 4.0}
    if not loss.template.by_rows:
        given = {"labels": targets[0], "loss_weight": torch.rand(2, 7, device=device)}
        teacher = torch.randn(2, 7, 11, device=device)
        targets = (teacher,) if loss.template.name == "divergence" else tuple(teacher.log_softmax(-1).topk(4))

    def call(**options):
        return run(lambda x, w, b: fused(x, w, *targets, bias=b, reduction=reduction, chunk=4, **given, **options), leaves)

    plain = call()
    for options in ({"skip_ignored": True}, {"valid": 10}, {"valid": 12}, {"valid": 100}):
        value, gradients = call(**options)
        assert error(value, plain[0]) < 1e-6
        assert all(error(a, b) < 1e-5 for a, b in zip(gradients, plain[1], strict=True))
    for few in (9, 0):
        value, gradients = call(valid=few)
        assert value.isnan().any()
        assert all(g.isnan().any() for g in gradients)


SHIFTED = {
    "cross entropy": lambda x, w, t, b, **o: linear_cross_entropy(x, w, t, b, z_loss=1e-2, **o),
    "log-probabilities": lambda x, w, t, b, **o: linear_selective_log_softmax(x, w, t, b, **o).square().sum(),
    "divergence": lambda x, w, t, b, **o: linear_kl_div(x, w, x.detach() @ w.detach().flip(0).t(), b, labels=t, reduction="mean", **o),
    "focal": lambda x, w, t, b, **o: fuse_linear(softmax_focal_loss)(x, w, t, bias=b, reduction="mean", **o),
    "objective": lambda x, w, t, b, **o: linear_objective(x, w, t, lambda logps: logps.exp().sum(), b, independent="sequences", **o),
}


@pytest.mark.parametrize("shift", [1, 3, 9])
@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("options", [{}, {"skip_ignored": True, "chunk": 4}], ids=str)
def test_shifted_targets(options, name, shift, device):
    """Those of the tokens that follow, as slices of both give them; the last tokens of a sequence have none."""
    leaves, target = model(device, (3, 8))
    target[0, 4] = -100

    def run_with(move, **more):
        return run(lambda x, w, b: SHIFTED[name](x, w, move(target), b, **options, **more), leaves)

    def moved(t):
        return torch.cat([t[:, shift:], torch.full_like(t[:, :shift], -100)], 1)

    found, expected = run_with(lambda t: t.to(torch.int16), shift=shift), run_with(moved)
    assert torch.equal(found[0], expected[0]) or (found[0].isnan() and expected[0].isnan())
    for got, right in zip(found[1], expected[1], strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("lead", [(8,), (2, 3, 4)], ids=str)
def test_a_sequence_is_the_last_dimension(lead, device):
    (x, w, b), target = model(device, lead)
    moved = torch.cat([target[..., 1:], torch.full_like(target[..., :1], -100)], -1)
    assert torch.equal(linear_cross_entropy(x, w, target, b, shift=1), linear_cross_entropy(x, w, moved, b))


def test_refused_shifts(device):
    (x, w, b), target = model(device)
    with pytest.raises(ValueError, match="shift must be at least 0 tokens, got -1"):
        linear_cross_entropy(x, w, target, b, shift=-1)
    with pytest.raises(ValueError, match=r"shift needs class indices of tokens, target or labels of shape \(…, T\)"):
        linear_cross_entropy(x, w, torch.rand(2, 7, 11, device=device), b, shift=1)
    with pytest.raises(ValueError, match="shift needs class indices"):
        linear_cross_entropy(x[0, 0], w, target[0, 0], b, shift=1)
    with pytest.raises(ValueError, match="skip_ignored, valid and shift need class indices"):
        linear_entropy(x, w, b, shift=1)


def test_skipping_needs_to_know_what_is_ignored(device):
    leaves, target = model(device)
    x, w, _ = leaves
    for options in ({"skip_ignored": True}, {"valid": 3}):
        with pytest.raises(ValueError, match="skip_ignored and valid need class indices"):
            linear_cross_entropy(x, w, torch.rand(2, 7, 11, device=device), **options)
        with pytest.raises(ValueError, match="skip_ignored, valid and shift need class indices"):
            linear_entropy(x, w, **options)
        with pytest.raises(ValueError, match="skip_ignored, valid and shift need one index a row"):
            linear_selective_log_softmax(x, w, target.unsqueeze(-1), **options)
    with pytest.raises(ValueError, match="valid must be at least 0 rows, got -1"):
        linear_cross_entropy(x, w, target, valid=-1)


OF_TEACHERS = {
    "plain": {"ignore_index": 3, "temperature": 2.0},
    "hard": {"temperature": 2.0, "temperature_squared": True, "hard_weight": 0.4, "reduction": "mean", "outputs": ("entropy",)},
    "capped": {"scale": 0.7, "softcap": 2.0, "hard_weight": 0.3, "reduction": "sum"},
}
"""Options beside labels."""
PARTS = {
    "kl": (linear_kl_div, kl_div_with_logits),
    "js": (linear_js_div, js_div_with_logits),
    "total variation": (linear_total_variation, total_variation_with_logits),
    "cosine": (linear_cosine_distance, cosine_distance_with_logits),
}
CASES = [f"{part}, {name}, {teacher}" for part in PARTS for name in OF_TEACHERS for teacher in ("layer", "logits")]
"""One parameter, so that the default tier has each."""


@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.parametrize("classes", [11, 300, 9001], ids=["few classes", "chunks of classes in backward", "more than a tile"])
@pytest.mark.parametrize("case", CASES)
def test_teachers(case, classes, gradient, device):
    """The layer of a teacher, with a scale and a cap, or its logits: as the unfused loss of logits in float64."""
    part, name, teacher = case.split(", ")
    function, unfused = PARTS[part]
    leaves, labels = model(device, (2, 7) if classes < 9001 else (3,), classes=classes)
    labels.view(-1)[:2] = torch.tensor([0, -100], device=device)
    hidden, head, bias = model(device, labels.shape, hidden=5, classes=classes)[0]
    options = OF_TEACHERS[name]
    if function is linear_cosine_distance:
        options = {each: value for each, value in options.items() if "temperature" not in each and each != "outputs"}
    leaves, wide = [t.requires_grad_() for t in leaves], [t.detach().double().requires_grad_() for t in leaves]
    of_teacher = 3.0 * torch.tanh(1.4 * F.linear(hidden.double(), head.double(), bias.double()) / 3.0)
    given = LinearTeacher(hidden, head, bias, 1.4, 3.0) if teacher == "layer" else of_teacher.float()
    found = function(*leaves[:2], given, leaves[2], labels=labels, chunk=4, gradient=gradient, **options)
    expected = unfused(F.linear(*wide).view(-1, classes), of_teacher.view(-1, classes), labels=labels.flatten(), **options)
    if "outputs" in options:
        assert error(found.entropy, expected.entropy.view(labels.shape)) < 1e-5
        found, expected = found.loss, expected.loss
    assert error(found, expected) < 1e-5
    for got, exact in zip(torch.autograd.grad(3 * found, leaves), torch.autograd.grad(3 * expected, wide), strict=True):
        assert error(got, exact) < 1e-5


def test_cosine_distance_is_of_all_classes(device):
    (x, w, _), _ = model(device)
    with pytest.raises(ValueError, match="group is not served by linear_cosine_distance, which takes all classes in one process"):
        linear_cosine_distance(x, w, F.linear(x, w), group=object())
    with pytest.raises(TypeError, match="linear_cosine_distance needs all of the teacher's logits"):
        linear_cosine_distance(x, w, TopKTeacher(*torch.randn(2, 7, 11, device=device).topk(4)))


def test_caps_of_a_teacher_are_checked(device):
    (x, w, b), _ = model(device)
    with pytest.raises(ValueError, match=r"teacher\.softcap must be .*above 0"):
        linear_kl_div(x, w, LinearTeacher(x, w, b, softcap=0.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_likeliest_classes_of_the_layer(dtype, device):
    """Against torch.topk of the logits in float64. Of equal logits any may be taken: their values are compared, and what has each class."""
    (x, w, b), _ = model(device)
    x, w, b = (t.to(dtype) for t in (x, w, b))
    w[5], b[5] = w[3], b[3]  # two classes that are equal in every row
    given = {"temperature": 0.7, "scale": 1.3, "softcap": 4.0}
    logits = 4 * torch.tanh(1.3 * F.linear(x.double(), w.double(), b.double()) / 4) / 0.7
    for k in (1, 4, len(w)):
        values, indices, lse = linear_top_k(x, w, k, b, **given, chunk=5)
        assert error(values, logits.log_softmax(-1).topk(k).values) < 1e-5
        assert error(lse, logits.logsumexp(-1)) < 1e-5
        assert error(values, logits.log_softmax(-1).gather(-1, indices)) < 1e-5
        assert all(len(set(row)) == k for row in indices.flatten(0, 1).tolist())
    alone = linear_top_k(x[0, 0], w, 3, b)
    assert [tuple(t.shape) for t in alone] == [(3,), (3,), ()]
    assert [tuple(t.shape) for t in linear_top_k(x[:0], w, 3, b)] == [(0, 7, 3), (0, 7, 3), (0, 7)]
    with pytest.raises(ValueError, match="k must be from 1 to the number of classes, 11, got 12"):
        linear_top_k(x, w, 12, b)


@pytest.mark.parametrize("blocks", [37, 40], ids=["classes beside whole blocks", "whole blocks"])
def test_likeliest_classes_by_blocks(blocks, device, monkeypatch):
    """Of many classes: those of one block, of the last ones, and infinite logits among them. The order is torch.topk's."""
    monkeypatch.setattr("lossforge.losses.engine.linear.entries.BLOCK", 8)
    x, w = normal(30, 16, seed=1, device=device), normal(8 * blocks + 5 * (blocks == 37), 16, seed=2, device=device)
    b = normal(len(w), seed=3, device=device)
    x[:10], b[16:24], b[-1] = x[:10] / 100, b[16:24] + 9, 20.0
    b[40:60] = -math.inf
    right = F.linear(x.double(), w.double(), b.double()).log_softmax(-1).topk(9)
    values, indices, _ = linear_top_k(x, w, 9, b)
    assert error(values, right.values) < 1e-5
    assert torch.equal(indices, right.indices)


def test_reverse_divergence_on_the_classes_that_the_student_prefers(device):
    """The student's candidates, the teacher's log-probabilities of them, and the reverse divergence on these."""
    leaves = [t.requires_grad_() for t in model(device)[0]]
    teacher = torch.randn(2, 7, 11, device=device).log_softmax(-1)
    indices = linear_top_k(*leaves[:2], 4, leaves[2]).indices
    loss = linear_kl_div(*leaves[:2], TopKTeacher(teacher.gather(-1, indices), indices), leaves[2], reverse=True, reduction="sum")
    wide = [t.detach().double().requires_grad_() for t in leaves]
    log_p = F.linear(*wide).log_softmax(-1).gather(-1, indices)
    right = (log_p.exp() * (log_p - teacher.double().gather(-1, indices))).sum()
    assert error(loss, right) < 1e-5
    for got, exact in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(right, wide), strict=True):
        assert error(got, exact) < 1e-5


def test_likeliest_classes_of_a_teacher(device):
    """The scale and the cap are the student's."""
    leaves = [t.requires_grad_() for t in model(device)[0]]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    values, indices = torch.randn(2, 7, 11, device=device).log_softmax(-1).topk(4)
    topk = LOSSES["topk_kl"].function
    value = linear_kl_div(*leaves[:2], TopKTeacher(values, indices), leaves[2], tail=True, scale=1.3, softcap=2.0, chunk=5)
    logits = 2 * torch.tanh(1.3 * F.linear(*wide) / 2)
    right = topk(logits.flatten(0, 1), values.double().flatten(0, 1), indices.flatten(0, 1), tail=True)
    assert error(value, right) < 1e-5
    for got, exact in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(right, wide), strict=True):
        assert error(got, exact) < 1e-5
    given = {"tail": True, "reverse": 0.4, "temperature": 2.0, "hard_weight": 0.3, "outputs": ("entropy",)}
    labels = torch.arange(14, device=device).view(2, 7) % 11
    found = linear_kl_div(*leaves[:2], TopKTeacher(values, indices), leaves[2], labels=labels, chunk=5, **given)
    logits = F.linear(*wide).flatten(0, 1)
    right = topk(logits, values.double().flatten(0, 1), indices.flatten(0, 1), labels=labels.flatten(), **given)
    assert error(found.entropy.flatten(), right.entropy) < 1e-5
    for got, exact in zip(torch.autograd.grad(found.loss, leaves), torch.autograd.grad(right.loss, wide), strict=True):
        assert error(got, exact) < 1e-5
    if device == "cpu":  # on CUDA the loss is nan
        with pytest.raises(ValueError, match=r"values must be log-probabilities of the K classes at temperature T, .* or renormalize=True"):
            linear_kl_div(*leaves[:2], TopKTeacher(values + 4, indices), leaves[2])
    else:
        assert linear_kl_div(*leaves[:2], TopKTeacher(values + 4, indices), leaves[2]).isnan()
    logits = linear_kl_div(*leaves[:2], TopKTeacher(values + 4, indices), leaves[2], renormalize=True)
    torch.testing.assert_close(logits, linear_kl_div(*leaves[:2], TopKTeacher(values, indices), leaves[2], renormalize=True))
    with pytest.raises(TypeError, match="linear_kl_div takes it"):
        linear_js_div(*leaves[:2], TopKTeacher(values, indices))
    with pytest.raises(ValueError, match="tail needs a TopKTeacher"):
        linear_kl_div(*leaves[:2], torch.randn(2, 7, 11, device=device), tail=True)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_log_probabilities_of_half_precision(several, autocast, device):
    """Of logits that are not rounded: those of standard deviation 24 would be off by up to 0.25."""
    x, w, index = torch.randn(9, 64, device=device) * 3, torch.randn(50, 64, device=device), torch.randint(50, (9, 3), device=device)
    x, w = x.bfloat16(), w.bfloat16()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        found = linear_selective_log_softmax(x, w, index if several else index[:, 0])
    expected = F.linear(x.double(), w.double()).log_softmax(-1).gather(1, index)
    assert (found - (expected if several else expected[:, 0])).abs().max() < 1e-3


@pytest.mark.parametrize("shape", [(3, 7), (2, 7, 3, 1), (2,), (7, 2, 3)], ids=str)
def test_tokens_have_the_rows_of_the_input(shape, device):
    (x, w, _), _ = model(device)
    index = torch.zeros(shape, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match=r"index must have shape \(2, 7\), or \(2, 7, K\) for K tokens a row, got"):
        linear_selective_log_softmax(x, w, index)


MODULES = [getattr(losses, name) for name in losses.__all__ if name.startswith("Linear") and name.endswith("Loss") and "MTP" not in name]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_keeps_its_functions_options(module, device):
    """Those that belong to no call, with the same defaults; another value is the function's."""
    (x, w, b), target = model(device)
    target = target if module is LinearCrossEntropyLoss else torch.randn(2, 7, 11, device=device)
    ours, theirs = module(), inspect.signature(DECLARED[module.function.__name__].definition).parameters
    of_call = () if module is LinearCrossEntropyLoss else ("loss_weight", "teacher_lse")
    own = [name for name, p in theirs.items() if p.kind is p.KEYWORD_ONLY and name not in of_call]
    assert {*own, "ignore_index", "chunk", "accumulate", "skip_ignored", "empty", "gradient"} <= set(ours.option_names)
    assert all(getattr(ours, name) == theirs[name].default for name in own)
    ours.reduction = "sum"
    assert torch.equal(ours(x, w, target, b), module.function(x, w, target, b, reduction="sum"))


@pytest.fixture
def layer(device):
    """Return a linear layer, its input and its targets."""
    (x, _, _), target = model(device)
    return torch.nn.Linear(6, 11, device=device), x, target


@pytest.fixture
def smoothed(layer):
    """Return cross entropy fused with that layer."""
    return FusedLinear(CrossEntropyLoss(label_smoothing=0.1), layer[0])


def test_the_module_of_a_fused_loss(layer):
    head, x, target = layer
    expected = cross_entropy(head(x).mT, target, label_smoothing=0.1)
    assert error(LinearCrossEntropyLoss(label_smoothing=0.1)(x, head.weight, target, head.bias), expected) < 1e-5


def test_a_fused_layer_trains_its_head(layer, smoothed):
    head, x, target = layer
    smoothed(x, target).backward()
    assert head.weight.grad is not None
    assert error(smoothed(x, target), cross_entropy(head(x).mT, target, label_smoothing=0.1)) < 1e-5
    assert set(smoothed.state_dict()) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "of", [lambda fused: fused, copy.deepcopy, lambda fused: pickle.loads(pickle.dumps(fused))], ids=["itself", "copy", "pickle"]
)
def test_a_fused_layer_reads_its_own_losss_options_at_each_call(of, layer, smoothed):
    head, x, target = layer
    smoothed.loss.weight = weight = torch.rand(11, device=x.device)  # moved with the model
    other = of(smoothed)
    smoothed.loss.label_smoothing, other.loss.label_smoothing = 0.1, 0.3
    assert error(other(x, target), cross_entropy(head(x).mT, target, weight, label_smoothing=0.3)) < 1e-5


def test_a_fused_layer_needs_a_linear_head():
    with pytest.raises(TypeError, match=r"head must be a torch\.nn\.Linear"):
        FusedLinear(cross_entropy, torch.nn.Identity())  # type: ignore[arg-type]


def test_a_fused_layer_in_float64(layer, smoothed):
    _, x, target = layer
    smoothed.loss.weight = torch.rand(11, device=x.device)
    assert smoothed.double()(x.double(), target).dtype == torch.float64


def test_another_loss_takes_the_place_of_the_first(device):
    leaves, target = model(device)
    head = torch.nn.Linear(6, 11, device=device)
    fused = FusedLinear(CrossEntropyLoss(), head)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    compiled(leaves[0], target)
    fused.loss, fused.head = CrossEntropyLoss(label_smoothing=0.5), torch.nn.Linear(6, 11, device=device)
    expected = cross_entropy(fused.head(leaves[0]).mT, target, label_smoothing=0.5)
    assert error(fused(leaves[0], target), expected) < 1e-5
    assert error(compiled(leaves[0], target), expected) < 1e-5


class Doubled(CrossEntropyLoss):
    def forward(self, *tensors):
        return 2 * super().forward(*tensors)


class Named(CrossEntropyLoss):
    """What only has another name is fused."""


class Adapted(torch.nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_code_around_a_loss_or_a_head_is_not_left_out(device):
    """It would not be called, so that the value would be another one."""

    @functools.wraps(cross_entropy)
    def twice(*args, **kwargs):
        return 2 * cross_entropy(*args, **kwargs)

    def calls(input, target, normalizer=None):
        return cross_entropy(input, target, normalizer=normalizer)

    for loss in (twice, calls, functools.partial(cross_entropy, label_smoothing=0.1)):
        with pytest.raises(TypeError, match="wraps a loss or is none"):
            fuse_linear(loss)
    changed, seen, holder = CrossEntropyLoss(), CrossEntropyLoss(), torch.nn.Identity()
    changed.forward = lambda *tensors: 2 * cross_entropy(*tensors)
    seen.register_forward_hook(lambda module, given, found: 2 * found)
    holder.function = cross_entropy
    for loss in (Doubled(), changed, seen):
        with pytest.raises(TypeError, match="loss must not have hooks or a forward of its own"):
            fuse_linear(loss)
    for loss in (holder, torch.compile(CrossEntropyLoss(label_smoothing=0.5), backend="eager")):
        with pytest.raises(TypeError, match="loss must be a loss of lossforge"):
            fuse_linear(loss)
    leaves, target = model(device)
    head = torch.nn.Linear(6, 11, device=device)
    expected = cross_entropy(head(leaves[0]).mT, target)
    assert error(FusedLinear(Named(), head)(leaves[0], target), expected) < 1e-5
    hooked, patched = copy.deepcopy(head), copy.deepcopy(head)
    hooked.register_forward_hook(lambda module, given, found: 2 * found)
    patched.forward = lambda input: 2 * head(input)
    for other in (hooked, patched, Adapted(6, 11)):
        with pytest.raises(TypeError, match="head must not have hooks or a forward of its own"):
            FusedLinear(cross_entropy, other)
        with pytest.raises(TypeError, match="head must not have hooks or a forward of its own"):
            FusedLinear(cross_entropy, head).head = other
    normed = torch.nn.utils.parametrizations.weight_norm(head)
    assert error(FusedLinear(cross_entropy, normed)(leaves[0], target), cross_entropy(normed(leaves[0]).mT, target)) < 1e-5


@pytest.mark.parametrize("how", ["hook", "patched", "retyped", "set", "loss hook", "loss patched"])
def test_what_a_head_or_a_loss_gets_later_is_not_left_out(device, how):
    """It would not be called. Without it, the fused loss is right again."""
    leaves, target = model(device)
    head, loss = torch.nn.Linear(6, 11, device=device), CrossEntropyLoss()
    fused = FusedLinear(loss, head)
    expected = cross_entropy(head(leaves[0]).mT, target)
    assert error(fused(leaves[0], target), expected) < 1e-5
    module = loss if "loss" in how else head
    if "hook" in how:
        undo = module.register_forward_hook(lambda module, given, found: 2 * found).remove
    elif "patched" in how:
        forward = module.forward
        module.forward = lambda *given: 2 * forward(*given)
        undo = functools.partial(delattr, module, "forward")
    elif how == "retyped":
        head.__class__ = Adapted
        undo = functools.partial(setattr, head, "__class__", torch.nn.Linear)
    else:  # past the check of an assignment
        fused._modules["head"] = torch.nn.Sequential(head)
        undo = functools.partial(setattr, fused, "head", head)
    with pytest.raises(
        TypeError, match=r"(head|loss) must (not have hooks or a forward of its own|be a torch\.nn\.Linear), .* got [a-z]+\."
    ):
        fused(leaves[0], target)
    undo()
    assert error(fused(leaves[0], target), expected) < 1e-5


def test_parameters_that_come_later_are_those_of_the_call(device):
    leaves, target = model(device)
    head = torch.nn.Linear(6, 11, device=device)
    fused = FusedLinear(cross_entropy, head)
    fused(leaves[0], target)
    head.weight = torch.nn.Parameter(torch.rand(11, 6, device=device))
    assert error(fused(leaves[0], target), cross_entropy(head(leaves[0]).mT, target)) < 1e-5
    torch.nn.utils.parametrizations.weight_norm(head).parametrizations.weight.original0.data.mul_(3)
    assert error(fused(leaves[0], target), cross_entropy(head(leaves[0]).mT, target)) < 1e-5


class Adapter(torch.nn.Module):
    """A low-rank adapter, as one would write it."""

    def __init__(self, base):
        super().__init__()
        self.base, (out, given) = base, base.weight.shape
        self.down, self.up = (torch.nn.Linear(*sizes, device=base.weight.device) for sizes in ((given, 2), (2, out)))

    def forward(self, input):
        return self.base(input) + self.up(self.down(input))


@pytest.mark.parametrize("made", ["before", "copied", "pickled"])
def test_a_layer_that_takes_the_heads_place_later_is_not_left_out(device, made):
    """FusedLinear holds the head, which an adapter holds, too: it sees that the model does not call the head itself any more."""
    leaves, target = model(device)
    whole = torch.nn.ModuleDict({"head": torch.nn.Linear(6, 11, device=device)})
    whole["loss"] = FusedLinear(cross_entropy, whole["head"])
    if made != "before":
        whole = copy.deepcopy(whole) if made == "copied" else pickle.loads(pickle.dumps(whole))
    head, fused = whole["head"], whole["loss"]
    assert fused.head is head
    for other in (torch.nn.Identity(), torch.nn.LayerNorm(6, device=device), head):  # features for the loss, and the head again
        whole["head"] = other
        fused(leaves[0], target)
    for other in (Adapter(head), torch.nn.Sequential(torch.nn.Dropout(), head), torch.nn.Linear(6, 11, device=device)):
        whole["head"] = other
        name = f"{type(other).__module__}.{type(other).__qualname__}"
        with pytest.raises(TypeError, match=f"head must be the model's own layer, but {re.escape(name)} took its place as 'head'"):
            fused(leaves[0], target)
        again = FusedLinear(cross_entropy, head)  # asked for by name
        assert error(again(leaves[0], target), cross_entropy(head(leaves[0]).mT, target)) < 1e-5
        with pytest.raises(TypeError, match="took its place"):
            copy.deepcopy(fused)(leaves[0], target)
        whole["head"] = head
        assert error(fused(leaves[0], target), cross_entropy(head(leaves[0]).mT, target)) < 1e-5
    whole["head"] = fused.head = torch.nn.Linear(6, 11, device=device)
    assert error(fused(leaves[0], target), cross_entropy(whole["head"](leaves[0]).mT, target)) < 1e-5


def test_an_adapter_that_comes_later_ends_a_compiled_loss(device):
    torch._dynamo.reset()
    leaves, target = model(device)
    whole = torch.nn.ModuleDict({"head": torch.nn.Linear(6, 11, device=device)})
    fused = FusedLinear(cross_entropy, whole["head"])
    compiled = torch.compile(fused, backend="eager")
    compiled(leaves[0], target)
    whole["head"] = Adapter(whole["head"])
    with pytest.raises(TypeError, match="took its place as 'head'"):
        compiled(leaves[0], target)


def test_a_weight_of_elements_is_not_taken_for_one_of_rows(device):
    """Where N = T = C it has both shapes; a divergence's is one of rows."""
    x, w, weight, target = (torch.rand(*shape, device=device) for shape in ((4, 4, 6), (4, 6), (4, 4), (4, 4, 4)))
    for given in ({"weight": weight}, {"pos_weight": weight}):
        named = {"loss_weight" if name == "weight" else name: t for name, t in given.items()}
        expected = binary_cross_entropy_with_logits(x @ w.T, target, **given)
        assert error(fuse_linear(binary_cross_entropy_with_logits)(x, w, target, **named), expected) < 1e-5
    expected = kl_div_with_logits((x @ w.T).flatten(0, 1), target.flatten(0, 1), weight=weight.flatten(), reduction="none")
    found = fuse_linear(kl_div_with_logits)(x, w, target, loss_weight=weight, reduction="none")
    assert error(found, expected.view(4, 4)) < 1e-5


WRONG: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], object], type[Exception], str]] = {
    "shape of weight": (lambda x, w, b, y: linear_cross_entropy(x, w.t(), y), ValueError, r"weight must have shape \(C, 6\)"),
    "shape of bias": (lambda x, w, b, y: linear_cross_entropy(x, w, y, b[:3]), ValueError, r"bias must have shape \(11,\)"),
    "dtype of weight": (lambda x, w, b, y: linear_cross_entropy(x, w.double(), y), TypeError, "weight must have the dtype of input"),
    "chunk": (lambda x, w, b, y: linear_cross_entropy(x, w, y, chunk=0), ValueError, "chunk must be at least 1"),
    "accumulate": (
        lambda x, w, b, y: linear_cross_entropy(x, w, y, accumulate="double"),  # type: ignore[call-overload]
        ValueError,
        "accumulate must be one of",
    ),
    "inplace": (lambda x, w, b, y: fuse_linear(cross_entropy)(x, w, y, inplace=True), ValueError, "inplace=True needs logits"),
    "loss of regions": (lambda x, w, b, y: fuse_linear(dice_loss)(x, w, y), TypeError, "only losses of rows or elements and divergences"),
    "name of a weight": (
        lambda x, w, b, y: linear_cross_entropy(x, w, y, class_weight=None),  # type: ignore[call-overload]
        TypeError,
        "did you mean 'loss_weight'",
    ),
    "no target logits": (
        lambda x, w, b, y: fuse_linear(kl_div_with_logits)(x, w),
        TypeError,
        r"linear_kl_div_with_logits\(\) needs target_logits. It takes input, weight, target_logits, temp",
    ),
    "shape of index": (lambda x, w, b, y: linear_selective_log_softmax(x, w, y[0]), ValueError, "index must have shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_are_checked(name, device):
    leaves, target = model(device)
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(*leaves, target)


@pytest.mark.parametrize(
    "loss",
    [F.cross_entropy, torch.nn.CrossEntropyLoss(), dpo_loss, generalized_box_iou_loss, linear_cross_entropy, selective_log_softmax],
    ids=lambda loss: getattr(loss, "__name__", "module"),
)
def test_what_takes_no_logits_is_not_fused(loss):
    with pytest.raises(TypeError, match=r"loss must be a loss of lossforge\.losses that takes logits"):
        fuse_linear(loss)


def test_class_indices_out_of_range_are_named_on_the_cpu(device):
    if device != "cpu":
        pytest.skip("a GPU marks such rows by nan, without waiting for them")
    (x, w, _), target = model(device)
    with pytest.raises(IndexError, match="target must hold 0 to 10"):
        linear_cross_entropy(x, w, target + 11)


def test_positions_are_the_losss_own(device):
    """As its signature has them: class weights and priors. The bias has a name, and a module takes its targets alone."""
    (x, w, b), target = model(device, (7,))
    logits, own = F.linear(x, w, b), torch.rand(11, device=device)
    head = torch.nn.Linear(6, 11, device=device)
    for loss in (cross_entropy, logit_adjusted_cross_entropy):
        assert error(fuse_linear(loss)(x, w, target, own, bias=b), loss(logits, target, own)) < 1e-5
        assert error(FusedLinear(loss, head)(x, target, own), loss(head(x), target, own)) < 1e-5
    focal = fuse_linear(softmax_focal_loss)(x, w, target, 0.3, 1.5, "sum", bias=b)
    assert error(focal, softmax_focal_loss(logits, target, 0.3, 1.5, "sum")) < 1e-5
    with pytest.raises(TypeError, match=r"linear_cross_entropy\(\) takes input, weight, target by position, the rest by name, got 4"):
        fuse_linear(CrossEntropyLoss())(x, w, target, own)


def test_what_is_given_twice_or_misspelt_is_named(device):
    (x, w, b), target = model(device, (7,))
    fused, head = fuse_linear(logit_adjusted_cross_entropy), torch.nn.Linear(6, 11, device=device)
    prior = b.log_softmax(0)
    with pytest.raises(TypeError, match=r"linear_logit_adjusted_cross_entropy\(\) got an .* mean 'log_prior'\? It takes .*bias"):
        fused(x, w, target, prior=prior)
    with pytest.raises(TypeError, match="got weight twice, by position and by name; did you mean 'loss_weight'"):
        fused(x, w, target, weight=b)
    with pytest.raises(TypeError, match=r"linear_logit_adjusted_cross_entropy\(\) got log_prior twice, by position and by name$"):
        fused(x, w, target, prior, log_prior=prior)
    with pytest.raises(TypeError, match="FusedLinear takes the bias of its head, got bias= too"):
        FusedLinear(cross_entropy, head)(x, target, bias=b)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'wieght'; did you mean 'weight'\? It takes input, weight, .*, chunk"):
        fused(x, w, target, wieght=b)


def test_what_a_person_reads():
    """The types of each argument, and every option with its default."""
    shown = inspect.signature(linear_js_div).parameters
    assert str(shown["beta"]) == "beta: float = 0.5"
    assert {name: shown[name].default for name in ("chunk", "skip_ignored", "gradient", "labels", "ignore_index")} == {
        "chunk": None,
        "skip_ignored": False,
        "gradient": None,
        "labels": None,
        "ignore_index": -100,
    }
    assert "options" not in shown
    assert [*inspect.signature(fuse_linear(cross_entropy)).parameters][:4] == ["input", "weight", "target", "loss_weight"]
    public = [
        each for each in vars(losses).values() if inspect.isfunction(each) or (inspect.isclass(each) and issubclass(each, LossModule))
    ]
    for written in (str(inspect.signature(each)) for each in public):
        assert not re.search(r"Annotated|Range|<class|\*\*\w+: \*", written)
    assert len(public) > 100


def skipping(head, target):
    """Calls that leave ignored rows out, as functions and as modules."""
    teacher = LinearTeacher(torch.linspace(-1, 1, 42, device=target.device).view(7, 6), head.weight.detach().flip(0))
    skip = {"skip_ignored": True, "chunk": 3}
    return {
        "function": lambda x: linear_cross_entropy(x, head.weight, target, head.bias, **skip),
        "module": lambda x: LinearCrossEntropyLoss(**skip)(x, head.weight, target, head.bias),
        "of a head": lambda x: FusedLinear(softmax_focal_loss, head)(x, target, reduction="mean", **skip),
        "of a teacher": lambda x: linear_kl_div(x, head.weight, teacher, head.bias, labels=target, **skip),
        "teacher's module": lambda x: LinearKLDivLoss(**skip)(x, head.weight, teacher, head.bias, labels=target),
    }


@pytest.mark.slow
@pytest.mark.parametrize("call", skipping(torch.nn.Linear(6, 11), torch.zeros(7, dtype=torch.long)))
def test_ignored_rows_are_skipped_under_compile(call, device):
    """Where torch.compile breaks its graph to wait for the number of rows: the value and all gradients, of several numbers."""
    torch._dynamo.reset()
    (x, *_), target = model(device, (7,))
    head = torch.nn.Linear(6, 11, device=device)
    for ignored in (2, 5):
        target[:ignored] = -100
        plain = skipping(head, target)[call]
        leaves = (x.requires_grad_(), head.weight, head.bias)
        value, expected = torch.compile(plain, backend="aot_eager")(x), plain(x)
        assert error(value, expected) < 1e-6
        for got, right in zip(torch.autograd.grad(3 * value, leaves), torch.autograd.grad(3 * expected, leaves), strict=True):
            assert error(got, right) < 1e-5


@pytest.mark.each("loss")
@pytest.mark.parametrize("loss", FUSED, ids=lambda loss: loss.name)
def test_no_classes(loss, device):
    """The same words on every device, before anything is divided by their number."""
    x, target = torch.randn(4, 6, device=device), torch.full((4,), -100, device=device)
    if loss.template.name == "rowwise":
        with pytest.raises(ValueError, match=r"input must have at least one class, got shape \(4, 0\)"):
            loss.function(torch.randn(4, 0, device=device), target)
    targets = {"divergence": (torch.rand(4, 0, device=device),), "topk": (target, target)}.get(loss.template.name, (target,))
    with pytest.raises(ValueError, match=r"weight must have at least one class, shape \(C, 6\), got \(0, 6\)"):
        fuse_linear(loss.function)(x, torch.randn(0, 6, device=device), *targets)


def test_modules_of_a_teacher_take_what_the_unfused_take(device):
    """The label that is ignored when they are made, a weight of each row at a call."""
    (x, w, b), target = model(device, (7,))
    teacher, weight = torch.randn(7, 11, device=device), torch.rand(7, device=device)
    pairs = (
        (LinearKLDivLoss, KLDivWithLogitsLoss),
        (LinearJSDivLoss, JSDivWithLogitsLoss),
        (LinearTotalVariationLoss, TotalVariationWithLogitsLoss),
        (LinearCosineDistanceLoss, CosineDistanceWithLogitsLoss),
    )
    for fused, unfused in pairs:
        ours = fused(ignore_index=3, reduction="mean")(x, w, teacher, b, labels=target, loss_weight=weight)
        theirs = unfused(ignore_index=3, reduction="mean")(F.linear(x, w, b), teacher, labels=target, weight=weight)
        assert error(ours, theirs) < 1e-5
        with pytest.raises(TypeError, match="unexpected keyword argument 'loss_weight'"):
            fused(loss_weight=weight)  # type: ignore[call-arg]


def test_outputs_for_logs(device):
    """The largest class, ln Σ p² and the mean logit of hidden states, by chunks, as of their logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator).to(device).requires_grad_() for n in (13, 40))
    target = torch.randint(0, 40, (13,), generator=generator).to(device)
    wanted = {"outputs": ("argmax", "log_p2", "mean_logit")}
    ours = linear_cross_entropy(hidden, head, target, chunk=4, **wanted)
    expected = cross_entropy(hidden @ head.T, target, **wanted)
    assert torch.equal(ours.argmax, expected.argmax)
    torch.testing.assert_close(ours.log_p2, expected.log_p2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.mean_logit, expected.mean_logit, rtol=1e-5, atol=1e-5)
    leaves = (hidden, head)
    for got, exact in zip(torch.autograd.grad(2 * ours.loss, leaves), torch.autograd.grad(2 * expected.loss, leaves), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["seesaw_loss", "lovasz_softmax_loss", "nt_xent_loss", "dice_loss", "distribution_focal_loss", "zlpr_loss"]
)
def test_what_no_layer_can_be_fused_with_is_refused_at_once(name):
    with pytest.raises(TypeError, match=f"only losses of rows or elements and divergences can be fused with a linear layer, got {name}"):
        fuse_linear(getattr(losses, name))

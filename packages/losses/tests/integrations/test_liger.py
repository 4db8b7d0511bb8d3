"""Liger's names with our losses: every option against the formula in float64, and a Trainer whose model Liger has patched."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from processes import run

pytest.importorskip("liger_kernel", reason="needs pip install liger-kernel")

import liger_kernel.transformers as liger
import liger_kernel.transformers.functional as functional

from lossforge.integrations import liger as ours

IGNORED = 7


def formula(logits, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, scaled):
    """Return Liger's loss and z-loss, as its kernels define them."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counts, lse = target != ignore_index, logits.logsumexp(-1)
    given = {"weight": weight, "ignore_index": ignore_index, "reduction": "none"}
    loss = F.cross_entropy(logits, target, label_smoothing=label_smoothing, **given)
    squares = torch.where(counts, lse_square_scale * lse.square(), 0.0)
    if scaled:
        factor = (logits.gather(-1, target.where(counts, 0)[:, None]).squeeze(-1) - lse).exp().detach()
        loss, squares = loss * factor, squares * factor
    if reduction == "none":
        return loss + squares, squares
    tokens = counts.sum()
    weights = tokens if weight is None else weight[target[counts]].sum()
    if reduction == "mean":
        return loss.sum() / weights + squares.sum() / tokens, squares.sum() / tokens
    return loss.sum() + squares.sum(), squares.sum()


OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "weight": {"weight": True},
    "ignore_index": {"ignore_index": IGNORED},
    "z-loss": {"lse_square_scale": 0.05},
    "smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "weight": True, "ignore_index": IGNORED, "lse_square_scale": 0.05, "label_smoothing": 0.2, "softcap": 3.0},
}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    target = torch.randint(57, (13,))
    target[:4] = torch.tensor([-100, IGNORED, -100, IGNORED])
    return torch.randn(13, 16), torch.randn(57, 16) / 2, torch.randn(57), torch.rand(57) + 0.5, target


ASKED = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def of(layer, name):
    """Return a case's options, with its tensors, and targets of which the ignored ones are ignored."""
    *_, b, class_weight, target = layer
    options = {"ignore_index": -100, **OPTIONS[name]}
    target = target.where(target != (-100 if options["ignore_index"] == IGNORED else IGNORED), 3)
    bias, weight = (t if options.pop(key, False) else None for key, t in (("bias", b), ("weight", class_weight)))
    return options, bias, weight, target


def check(found, plain, inputs, logits_of, target, weight, reduction, scaled=False, **options):
    """Compare every result and the gradients of the inputs with the formula in float64."""
    assert isinstance(found, functional.CrossEntropyOutput)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    logits, ignore_index = logits_of(*doubles), options["ignore_index"]
    numbers = {key: options.get(key, default) for key, default in (("lse_square_scale", 0.0), ("label_smoothing", 0.0), ("softcap", None))}
    wide = None if weight is None else weight.double()
    loss, z_loss = formula(logits, target, wide, ignore_index, reduction=reduction, scaled=scaled, **numbers)
    counts, predicted = target != ignore_index, logits.argmax(-1)
    accuracy = (predicted == target).float() * counts
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain, found.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.z_loss.double(), z_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.token_accuracy, accuracy if reduction == "none" else accuracy.sum() / counts.sum())
    assert torch.equal(found.predicted_tokens, predicted.where(counts, -1))
    upstream = torch.randn(13) if reduction == "none" else torch.tensor(1.7)
    expected = torch.autograd.grad(loss, doubles, upstream.double())
    for gradient, wanted in zip(torch.autograd.grad(found.loss, inputs, upstream), expected, strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)


MODULE = pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
REDUCTION = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@MODULE
@pytest.mark.parametrize("scaled", [False, True], ids=["", "token scaling"])
@REDUCTION
@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_of_hidden_states(layer, name, reduction, scaled, module):
    options, bias, weight, target = of(layer, name)
    inputs = [t.clone().requires_grad_() for t in (*layer[:2], bias) if t is not None]
    given = {"ce_weight": weight, "reduction": reduction, "use_token_scaling": scaled, **options}
    with ours.patch():
        if module:
            x, w, *b = inputs
            found, plain = (liger.LigerFusedLinearCrossEntropyLoss(**given, **more)(w, x, target, *b) for more in (ASKED, {}))
        else:
            compute, (x, w, *b) = functional.liger_fused_linear_cross_entropy, inputs
            found, plain = (compute(x, w, target, *(b or [None]), **given, **more) for more in (ASKED, {}))
    check(found, plain, inputs, F.linear, target, weight, reduction, scaled, **options)


@MODULE
@REDUCTION
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "bias"])
def test_the_loss_of_logits(layer, name, reduction, module):
    options, _, weight, target = of(layer, name)
    logits = (3 * torch.randn(13, 57)).requires_grad_()
    given = {"weight": weight, "reduction": reduction, **options}
    with ours.patch():
        if module:
            found, plain = (liger.LigerCrossEntropyLoss(**given, **more)(logits, target) for more in (ASKED, {}))
        else:
            found, plain = (functional.liger_cross_entropy(logits, target, **given, **more) for more in (ASKED, {}))
    check(found, plain, [logits], lambda z: z, target, weight, reduction, **options)


def test_no_target_that_counts_gives_nothing(layer):
    x, w, *_, target = layer
    x = x.requires_grad_()
    nothing = torch.full_like(target, -100)
    with ours.patch():
        for scaled in (False, True):
            loss = functional.liger_fused_linear_cross_entropy(x, w, nothing, use_token_scaling=scaled)
            (gradient,) = torch.autograd.grad(loss, x)
            assert loss == 0
            assert not gradient.any()
        assert functional.liger_cross_entropy(x @ w.T, nothing) == 0


@pytest.mark.parametrize("before", [True, False], ids=["patched before", "patched after"])
def test_torchs_cross_entropy_where_liger_takes_its_place(before):
    own, theirs = F.cross_entropy, functional.liger_cross_entropy
    logits, target = torch.randn(5, 9), torch.randint(9, (5,))
    handle = ours.patch() if before else None
    try:
        liger.apply_liger_kernel_to_llama(rope=False, cross_entropy=True, fused_linear_cross_entropy=False, rms_norm=False, swiglu=False)
        assert F.cross_entropy is (functional.liger_cross_entropy if before else theirs)
        handle = handle or ours.patch()
        assert F.cross_entropy.__module__ == "lossforge.integrations.liger"
        torch.testing.assert_close(F.cross_entropy(logits, target, label_smoothing=0.1), own(logits, target, label_smoothing=0.1))
        handle.undo()
        assert functional.liger_cross_entropy is theirs
        assert F.cross_entropy is theirs
    finally:
        handle.undo()
        F.cross_entropy = own


def test_the_parameters_of_version_0_8_1_are_accepted(layer, monkeypatch):
    """axolotl pins that version, whose function has no `chunk_mem_const`."""
    x, w, *_, target = layer
    target = target.where(target != -100, 3)

    def older(*args, **kwargs):
        raise AssertionError("Liger's own function runs")

    newer = inspect.signature(functional.liger_fused_linear_cross_entropy)
    kept = [each for name, each in newer.parameters.items() if name != "chunk_mem_const"]
    older.__signature__ = newer.replace(parameters=kept)
    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", older)
    with ours.patch():
        loss = functional.liger_fused_linear_cross_entropy(x, w, target)
    assert functional.liger_fused_linear_cross_entropy is older
    torch.testing.assert_close(loss, F.cross_entropy(x @ w.T, target), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("scaled", [False, True], ids=["", "token scaling"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_ligers_own_kernels(layer, name, reduction, scaled):
    layer = tuple(t.cuda() for t in layer)
    (x, w, *_), (options, b, weight, target) = layer, of(layer, name)
    options["ce_weight"], asked = weight, {**ASKED, "use_token_scaling": scaled}

    def computed():
        inputs = [t.clone().requires_grad_() for t in (x, w, b) if t is not None]
        bias = inputs[2] if b is not None else None
        found = functional.liger_fused_linear_cross_entropy(*inputs[:2], target, bias, reduction=reduction, **options, **asked)
        gradients = torch.autograd.grad(found.loss * 1.7, inputs)
        return [found.loss.detach(), found.z_loss.detach(), found.token_accuracy, found.predicted_tokens, *gradients]

    theirs = computed()
    with ours.patch():
        torch.testing.assert_close(computed(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_trainer_with_liger_has_the_models_own_numbers(processes, tmp_path):
    """One and two processes, accumulation 1 and 4, uneven labels; Liger's other kernels, which need a GPU, are off."""
    printed = run("liger_runs.py", processes=processes, folder=tmp_path)
    assert printed.count("every number is that of the model's own loss") == processes

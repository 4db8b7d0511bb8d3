"""Values and gradients of every registered loss against float64, in every mode, dtype, reduction and layout."""

import contextlib
import inspect

import pytest
import torch
from loss_calls import Operators

from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import BOUNDS, Sample, error, has_inplace, plain_sample, run, samples

TWICE = ("dense", "class index", "class index, scores", "probabilities", "mixup pair, λ a sample", "one pair")
GPU = torch.cuda.is_available()
FIRST = {loss.template: loss for loss in reversed(LOSSES.values())}


def chosen(loss, device: str = "cpu"):
    """Samples of a loss: all on a GPU and of a template's first loss; interpreted, a thousand times as slow, of the others some."""
    for i, sample in enumerate(samples(loss, device)):
        if GPU or loss is FIRST[loss.template] or sample.name.startswith("options") or (i % 4 == 0 and sample.x.numel() < 20_000):
            yield sample


ALL = [(loss, sample.name) for loss in LOSSES.values() for sample in chosen(loss)]
HALVES = (torch.bfloat16, torch.float16)


def dtypes(number: int) -> list[torch.dtype]:
    """Of a call: all on a GPU; interpreted, float32 and of every fifth call a half dtype."""
    halves = HALVES if GPU else HALVES[number // 5 % 2 :][:1] if number % 5 == 0 else ()
    return [torch.float32, *halves]


CALLS = [
    pytest.param(loss, name, dtype, id=f"{loss.name}-{name}-{str(dtype).removeprefix('torch.')}")
    for number, (loss, name) in enumerate(ALL)
    for dtype in dtypes(number)
]
OF_EACH_TEMPLATE = [pytest.param(loss, name, id=f"{loss.name}-{name}") for loss, name in ALL if GPU or loss is FIRST[loss.template]]


def names_of_two(loss) -> list[str]:
    """Return what a loss calls the two tensors of a sample."""
    return list(inspect.signature(loss.function).parameters)[:2]


def has_gradient(loss, name: str) -> bool:
    """Return whether a loss has a gradient in a floating argument."""
    return f"gradient of {name}" not in loss.without


def find(loss, name: str, device: str, dtype: torch.dtype = torch.float32) -> Sample:
    return next(s for s in samples(loss, device, dtype) if s.name == name)


def reductions(loss, sample: Sample) -> tuple[str, ...]:
    return ("mean",) if "normalizer" in sample.kwargs else loss.reductions


def written(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Error of writing a tensor once: BOUNDS, and half a step of numbers too small for all of the dtype's digits."""
    limits = torch.finfo(dtype)
    half_a_step, size = limits.smallest_normal * limits.eps / 2, exact[exact.isfinite()].norm().item()
    return BOUNDS[dtype] + (half_a_step * exact.numel() ** 0.5 / size if size else 0.0)


@pytest.mark.each("loss", "dtype")
@pytest.mark.parametrize(("loss", "name", "dtype"), CALLS)
def test_against_float64(loss, name, dtype, device, all_cases):
    """Error at most that of plain torch in the same dtype, plus a small bound; upstream gradients other than 1.

    A sum differs from a mean in its divisor: by default it is computed in one mode.
    """
    sample = find(loss, name, device, dtype)
    for reduction in reductions(loss, sample):
        shape = loss.reference(sample.x, sample.target, **sample.kwargs, reduction=reduction).shape
        upstream = torch.rand(shape, device=device) + 0.5
        exact = run(loss.reference, sample, upstream, torch.float64, reduction=reduction)
        plain = run(loss.reference, sample, upstream, reduction=reduction)
        modes = {"none": ("backward",), "sum": ("forward", "backward") if all_cases else ("forward",)}
        for mode in modes.get(reduction, ("forward", "backward")):
            ours = run(loss.function, sample, upstream, reduction=reduction, gradient=mode)
            assert ours.gradient.dtype == dtype
            assert ours.value.dtype == plain.value.dtype
            bound = BOUNDS[dtype if ours.value.dtype == dtype else torch.float32]
            assert error(ours.value, exact.value) <= error(plain.value, exact.value) + bound, (reduction, mode)
            roundings = 2 if mode == "forward" else 1  # written for an upstream of 1, then multiplied
            bound = roundings * written(exact.gradient, dtype)
            assert error(ours.gradient, exact.gradient) <= error(plain.gradient, exact.gradient) + bound, (reduction, mode)


LONG = {loss.name: s.name for loss in LOSSES.values() for s in reversed([*samples(loss)]) if s.name.startswith("many classes")}


@pytest.mark.parametrize("name", LONG)
def test_rows_longer_than_a_tile(name, device):
    """Of every formula: a kernel's sweeps over the parts of a row are other code than what computes a row in one tile."""
    loss = LOSSES[name]
    sample = find(loss, LONG[name], device)
    exact = run(loss.reference, sample, dtype=torch.float64, reduction="sum")
    ours = run(loss.function, sample, reduction="sum", gradient="forward")
    assert error(ours.value, exact.value) < 3e-6
    assert error(ours.gradient, exact.gradient) < 3e-6


@pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if loss.like], ids=lambda loss: loss.name)
def test_reference_against_judge(loss, device):
    """The reference, which judges the kernels, against an implementation that is not ours."""
    judged = 0
    for sample in samples(loss, device, torch.float64):
        taken = {"dense", "probabilities", "class index", "image", "class weights and smoothing", "pairs", "huge coordinates"}
        options = sample.name.startswith("options") and not {"z_loss", "softcap", "scale", "eps", "format"} & set(sample.kwargs)
        if not options and (sample.name not in taken or (loss.template.name == "elementwise" and not sample.target.is_floating_point())):
            continue
        if sample.kwargs.get("gamma") == 0.5 and loss.name == "focal":
            assert sample.x.abs().max() < 30  # torchvision's gradient is nan where sigmoid saturates
        for reduction in ("mean", "sum", "none"):
            ours = run(loss.reference, sample, dtype=torch.float64, reduction=reduction)
            theirs = run(loss.oracle(), sample, dtype=torch.float64, reduction=reduction)
            exact = theirs.value.dtype == torch.float64  # timm's losses compute in float32
            added = 1e-7 if loss.template.name == "boxes" else 0.0  # torchvision's eps; without it they agree as others do: test_iou.py
            assert error(ours.value, theirs.value) < (1e-12 + added if exact else 1e-6)
            assert error(ours.gradient, theirs.gradient) < (1e-9 + added if exact else 3e-6)
            judged += 1
    assert judged >= 3


HELD = {
    "ciou": "torchvision's, above",
    "mal": "DEIM's, in test_detection.py",
    "ia_bce": "LW-DETR's, in test_detection.py",
    "draft": "the formulas of libraries, in test_draft.py",
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_reference_gradients(loss, device, all_cases):
    """Autograd of the reference against differences, for logits, soft targets and weights, twice over."""
    if loss.name in HELD:
        pytest.skip(f"a part of it is a constant to autograd and not to differences: its derivative is judged by {HELD[loss.name]}")
    small = [s for s in samples(loss, device, torch.float64) if s.x.numel() <= 100 and s.name not in ("expanded", "huge coordinates")]
    small = [s for s in small if not s.kwargs.get("hold_weight")]
    if not all_cases:
        small = [next((s for s in small if s.name in TWICE), small[0]), *(s for s in small if s.name.startswith("options"))]
    for sample in small:
        if loss.domain == "probabilities":
            sample = Sample(sample.name, sample.x * 0.8 + 0.1, sample.target, sample.kwargs)
        if loss.name == "mae":
            sample = Sample(sample.name, sample.x.sign() + sample.x, sample.target, sample.kwargs)  # away from the kink at x = y
        sample = sample.tensors(lambda t: t.double())
        names = [k for k, v in sample.kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and has_gradient(loss, k)]
        tensors = zip((*names_of_two(loss), *names), (sample.x, sample.target, *(sample.kwargs[k] for k in names)), strict=True)
        leaves = [t if t is None else t.detach().requires_grad_(t.is_floating_point() and has_gradient(loss, k)) for k, t in tensors]

        def call(x, target, *rest, sample=sample, names=names):
            return loss.reference(x, target, reduction="mean", **{**sample.kwargs, **dict(zip(names, rest, strict=True))})

        # a projection of the Jacobian by default, every entry with --all
        assert torch.autograd.gradcheck(call, leaves, fast_mode=not all_cases), sample.name
        if sample.name in TWICE:
            assert torch.autograd.gradgradcheck(call, leaves, fast_mode=not all_cases), sample.name


@pytest.mark.each("template", ci=True)
@pytest.mark.parametrize(("loss", "name"), OF_EACH_TEMPLATE)
def test_repeated_runs_are_bitwise_equal(loss, name, device):
    sample = find(loss, name, device)
    first, second = (run(loss.function, sample, reduction="mean") for _ in range(2))
    assert torch.equal(first.value, second.value)
    assert torch.equal(first.gradient, second.gradient)


@pytest.mark.each("template", "mode", ci=True)
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_retained_graph(loss, mode, device):
    """A graph is walked three times, with other upstream gradients; what was handed out does not change afterwards."""
    for name in ("dense", "class index", "probabilities", "pairs", "special pairs"):
        sample = next((s for s in samples(loss, device) if s.name == name), None)
        if sample is None:
            continue
        x = sample.x.requires_grad_()
        value = loss.function(x, sample.target, **sample.kwargs, reduction="mean", gradient=mode)
        kept = []
        for upstream in (2.0, 1.0, -3.0):
            (g,) = torch.autograd.grad(value, x, torch.tensor(upstream, device=device), retain_graph=True)
            kept.append((g, upstream))
        exact = run(loss.reference, sample, dtype=torch.float64, reduction="mean").gradient
        for g, upstream in kept:
            assert error(g, upstream * exact) < 3e-6


@pytest.mark.each("template", "mode", "dtype", ci=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_second_backward_has_the_same_bits(loss, mode, dtype, device):
    """Also through the operators, which differentiate calls under a mode of torch."""
    sample = plain_sample(loss, device, dtype)
    x = sample.x.requires_grad_()
    for surroundings in (contextlib.nullcontext(), Operators()):
        with surroundings:
            value = loss.function(x, sample.target, **sample.kwargs, reduction="mean", gradient=mode)
            first, second, third = (torch.autograd.grad(value, x, torch.full_like(value, 0.7), retain_graph=True)[0] for _ in range(3))
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_double_backward(loss, device, all_cases):
    """create_graph gives a differentiable gradient, equal to the reference's."""
    for sample in samples(loss, device):
        if (
            sample.x.numel() > 300
            or "stride" in sample.name
            or not (all_cases or sample.name in TWICE or sample.name.startswith("options"))
        ):
            continue
        second = []
        for function, dtype in ((loss.function, torch.float32), (loss.reference, torch.float64)):
            s = sample.tensors(lambda t, dtype=dtype: t.to(dtype))
            x = s.x.detach().to(dtype).requires_grad_()
            value = function(x, s.target, **s.kwargs, reduction="mean")
            (g,) = torch.autograd.grad(value * 3, x, create_graph=True)
            if g.requires_grad:  # else the loss is straight, in plain torch too
                g.square().sum().backward()
            second.append((g, torch.zeros_like(g) if x.grad is None else x.grad))
        assert error(second[0][0], second[1][0]) < 1e-5
        assert error(second[0][1], second[1][1]) < 1e-4


@pytest.mark.each("template", ci=True)
@pytest.mark.parametrize(("loss", "name"), OF_EACH_TEMPLATE)
def test_inputs_are_not_written(loss, name, device):
    sample = find(loss, name, device)
    inputs = [t for t in (sample.x, sample.target) if t is not None]
    before = [t.clone() for t in inputs]
    run(loss.function, sample, reduction="mean")
    with torch.no_grad():
        loss.function(sample.x.detach().requires_grad_(), sample.target, **sample.kwargs, reduction="sum")
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_other_arguments_get_gradients(loss, device):
    """Soft targets, weights and λ that require grad get the reference's gradient, not None or zero."""
    checked = 0
    for sample in samples(loss, device):
        second = names_of_two(loss)[1]
        floating = {
            k: v for k, v in {second: sample.target, **sample.kwargs}.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
        }
        for name, tensor in floating.items():
            if sample.x.numel() > 300:
                continue
            if not has_gradient(loss, name):
                given = {second: sample.target, **sample.kwargs, name: tensor.clone().requires_grad_()}
                with pytest.raises(ValueError, match=f"{name} has no gradient, got a tensor that requires grad: detach it"):
                    loss.function(sample.x, given.pop(second), **given)
                continue
            gradients = []
            for function, dtype in ((loss.function, torch.float32), (loss.reference, torch.float64)):
                leaf = tensor.detach().to(dtype).requires_grad_()
                kwargs = {**sample.kwargs, name: leaf} if name != second else sample.kwargs
                value = function(sample.x.detach().to(dtype), leaf if name == second else sample.target, **kwargs, reduction="mean")
                gradients.append(torch.autograd.grad(value, leaf)[0])
            assert error(*gradients) < 1e-5, (sample.name, name)
            checked += 1
    assert checked or not any(
        isinstance(v, torch.Tensor) and v.is_floating_point() for s in samples(loss) for v in (s.target, *s.kwargs.values())
    )


@pytest.mark.each("template", "mode", ci=True)
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if has_inplace(loss)], ids=lambda loss: loss.name)
def test_inplace(loss, mode, device):
    """The same value and gradient, in the memory of the logits; using those afterwards raises."""
    for sample in chosen(loss, device):
        leaf = sample.x.detach().requires_grad_()
        logits = leaf * 1  # as x lies in memory, where x fills it
        exact = run(loss.reference, sample, torch.tensor(3.0), torch.float64, reduction="mean")
        squares = logits.square()  # keeps the logits for its own backward
        value = loss.function(logits, sample.target, **sample.kwargs, reduction="mean", inplace=True, gradient=mode)
        memory = logits.detach()
        (g,) = torch.autograd.grad(value, leaf, torch.tensor(3.0, device=device), retain_graph=True)
        assert error(value, exact.value) < 3e-6, sample.name
        assert error(g, exact.gradient) < 3e-6, sample.name
        assert torch.equal(memory, g)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()
        with pytest.raises(RuntimeError, match="computed from the logits after the loss cannot be differentiated"):
            logits.square().sum().backward()
        with pytest.raises(RuntimeError, match="inplace"):
            value.backward()

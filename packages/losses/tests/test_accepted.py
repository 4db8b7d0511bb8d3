"""What torch, torchvision and timm accept is accepted: 0-d tensors, bools and numpy's scalars as numbers, targets of integers and bools,
timm's arguments. What would be a trap is refused, with the way out in the message."""

import inspect

import numpy as np
import pytest
import timm.loss
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import lossforge.losses
from lossforge import losses as L
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import Sample, plain_sample, run

NUMBERS = {
    loss.name: {k: v for k, v in loss.hyper.items() if isinstance(v, float)}
    for loss in LOSSES.values()
    if any(isinstance(v, float) for v in loss.hyper.values())
}
EACH = pytest.mark.parametrize("loss", [LOSSES[name] for name in NUMBERS], ids=lambda loss: loss.name)
KEYWORDS = [
    *(loss.function for loss in LOSSES.values()),
    *(loss.module for loss in LOSSES.values()),
    *(getattr(lossforge.losses.preference, name) for name in lossforge.losses.preference.__all__),
]


def changed(name: str, value: float) -> float:
    """Another value that every hyper-parameter of that name may have, exact in float32."""
    exact = float(np.float32(value + 0.5))
    return {"label_smoothing": 0.125, "z_loss": 0.25, "eps": 0.25, "beta": 0.75, "clip": 0.125, "smoothing": 0.25}.get(name, exact)


@pytest.mark.each("template")
@EACH
def test_numbers_may_be_tensors_and_numpys(loss, device, all_cases):
    """A 0-d tensor on the CPU has the value that it has at the call, also after it changed and where calls are kept."""
    sample = plain_sample(loss, device)
    for name, value in NUMBERS[loss.name].items():
        value, other = float(np.float32(value)), changed(name, float(np.float32(value)))
        if (loss.name, name) in {("generalized_ce", "q"), ("focal", "alpha"), ("focal_tversky", "gamma"), ("ohem_ce", "threshold")}:
            other = 0.5
        tensor = torch.tensor(value)
        again = ((tensor, value), (np.float64(other), other)) if all_cases else ()
        for given, number in ((tensor, value), (tensor, other), (np.float32(other), other), *again):
            if given is tensor:
                tensor.fill_(number)
            ours = run(loss.function, sample, reduction="sum", **{name: given})
            expected = run(loss.function, sample, reduction="sum", **{name: number})
            assert torch.equal(ours.value, expected.value), (name, given)
            assert torch.equal(ours.gradient, expected.gradient), (name, given)


IN_KERNELS = ("focal", "ce", "giou", "js", "topk_kl", "dice_ce")  # of each operator
IN_PLAIN_TORCH = (  # formulas that ask for a number's value
    *("ce", "poly_ce", "softmax_focal", "generalized_ce", "asymmetric_single_label", "huber", "smooth_l1", "box_smooth_l1"),
    *("bce_smoothed", "asymmetric", "js", "focal_tversky"),
)


@pytest.mark.each("template", "plain")
@pytest.mark.parametrize(
    ("loss", "plain"),
    [*((LOSSES[name], False) for name in IN_KERNELS), *((LOSSES[name], True) for name in IN_PLAIN_TORCH)],
    ids=[*IN_KERNELS, *(f"{name} in plain torch" for name in IN_PLAIN_TORCH)],
)
def test_scheduled_numbers_compile_nothing(loss, plain, device):
    """Under torch.compile, as 0-d tensors: one graph for all values, each value as in eager mode."""
    sample = plain_sample(loss, device)
    names = NUMBERS[loss.name]
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(x, target, numbers):
        with L.plain_torch() if plain else torch.enable_grad():
            return loss.function(x, target, **{**sample.kwargs, **dict(zip(names, numbers, strict=True))}, reduction="sum") * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compiles)
    frames = []
    for step in (0.25, 0.5, 0.375):
        if loss.name == "focal_tversky" or loss.name == "poly_bce":
            step = 1.0 - step
        values = [step / 4 if name in ("eps", "z_loss") else step for name in names]
        results = []
        for function, numbers in ((compiled, [torch.tensor(v) for v in values]), (call, values)):
            x = sample.x.detach().clone().requires_grad_()
            value = function(x, sample.target, numbers)
            value.backward()
            results.append((value.detach(), x.grad))
        torch.testing.assert_close(*results, rtol=2e-6, atol=1e-6)
        frames.append(compiles.frame_count)
    assert len(set(frames)) == 1


@pytest.mark.parametrize("fullgraph", [True, False])  # torch's default, False, does not trace `.item()`
def test_scheduled_numbers_of_rows_that_are_kept(fullgraph, device):
    """Each result of an operator, an incoming gradient a row, and gradient="forward"."""
    x, target = torch.randn(5, 7, device=device), torch.randint(0, 7, (5,), device=device)
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(x, smoothing, scale):
        loss, z_loss, lse, entropy, *_ = L.cross_entropy(
            x, target, label_smoothing=smoothing, z_loss=0.1, scale=scale, outputs=("z_loss", "lse", "entropy")
        )
        rows = L.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")
        return loss + z_loss + (lse * entropy).sum() + rows.square().sum() + L.cross_entropy(x, target, scale=scale, gradient="forward")

    compiled = torch.compile(call, fullgraph=fullgraph, backend=compiles)
    for numbers in ((0.25, 1.0), (0.5, 2.0), (0.0, 0.5)):
        one, other = (x.clone().requires_grad_() for _ in range(2))
        value, exact = compiled(one, *map(torch.tensor, numbers)), call(other, *numbers)
        value.backward()
        exact.backward()
        torch.testing.assert_close(value, exact)
        torch.testing.assert_close(one.grad, other.grad)
    assert compiles.frame_count == 1


def test_numbers_are_checked_when_a_graph_runs(device):
    x, target = torch.randn(3, 4, device=device), torch.tensor([0, 1, 2], device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda gamma: L.sigmoid_focal_loss(x, target, gamma=gamma), fullgraph=True, backend="aot_eager")
    compiled(torch.tensor(1.0))
    with pytest.raises(ValueError, match="gamma must be finite and at least 0, got -1"):
        compiled(torch.tensor(-1.0))


OF_POLICIES = {
    "cispo": None,
    "sapo": L.Sapo,
    "vespo": L.Vespo,
    "gmpo": None,
    "a2po": None,
    "kl_cov": L.KLCov,
    "dppo_tv": None,
    "dppo_kl": None,
    "dro": None,
}


def test_preference_numbers(device):
    """These are plain torch: a scheduled number compiles nothing either."""
    logps = [torch.randn(6, device=device) for _ in range(4)]
    old, reference = torch.randn(6, 3, device=device), torch.randn(6, 3, device=device)

    def call(x, n):
        total = L.dpo_loss(x, *logps[1:], beta=n, label_smoothing=n / 2) + L.cpo_loss(x, logps[1], beta=n, cpo_alpha=n)
        total = total + L.dpo_loss(x, *logps[1:], 0.1, n / 2, "exo_pair", f_divergence_type=L.AlphaDivergence(n))
        total = total + L.dpo_loss(x, *logps[1:], n, loss_type=L.DiscoPOP(n)) + L.simpo_loss(x, logps[1], alpha=n)
        total = total + L.tpo_loss(x, *logps[1:3], n, loss_type=L.TpoL(n), tpo_alpha=n)
        tokens = x[:, None].expand(6, 3)
        for name, record in OF_POLICIES.items():
            loss_type = record(*[n] * len(record._fields)) if record else name
            total = total + L.grpo_loss(tokens, logps[2], old, reference, epsilon=n, epsilon_high=n * 2, beta=n, loss_type=loss_type)
        total = total + L.ppo_value_loss(tokens, old, reference, cliprange_value=n)
        return total + L.grpo_loss(tokens, logps[2], old, reference, epsilon=n, epsilon_high=n * 2, beta=n, delta=2 + n)

    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=compiles)
    for n in (0.25, 0.5, 0.125):
        x = logps[0].clone().requires_grad_()
        exact = torch.autograd.grad(call(x, n), x)[0]
        torch.testing.assert_close(torch.autograd.grad(call(x, torch.tensor(n)), x)[0], exact)
        torch.testing.assert_close(torch.autograd.grad(compiled(x, torch.tensor(n)), x)[0], exact)
    assert compiles.frame_count == 1


def test_other_numbers(device):
    """Those that may be tensors beside the input, whole numbers and flags."""
    x, target = torch.randn(3, 4, device=device), torch.tensor([0, 1, 3], device=device)
    expected = L.sigmoid_focal_loss(x, target, alpha=0.75, reduction="mean", normalizer=4.0)
    for number in (torch.tensor, np.float32, np.float64):
        torch.testing.assert_close(L.sigmoid_focal_loss(x, target, alpha=number(0.75), reduction="mean", normalizer=number(4.0)), expected)
    pair = {"target_b": target.flip(0)}
    torch.testing.assert_close(L.cross_entropy(x, target, lam=np.float64(0.25), **pair), L.cross_entropy(x, target, lam=0.25, **pair))
    for number in (torch.tensor, np.int64, np.int32):
        assert torch.equal(L.cross_entropy(x, target, ignore_index=number(3)), L.cross_entropy(x, target, ignore_index=3))
        assert torch.equal(L.sigmoid_focal_loss(x, target, dim=number(1)), L.sigmoid_focal_loss(x, target))
    for flag in (torch.tensor, np.bool_):
        assert torch.equal(L.varifocal_loss(x, target, iou_weighted=flag(False)), L.varifocal_loss(x, target, iou_weighted=False))
    assert torch.equal(L.smooth_l1_loss(x, x.flip(0), beta=True), L.smooth_l1_loss(x, x.flip(0)))
    assert torch.equal(L.softmax_focal_loss(x, target, alpha=np.float32(0.25)), L.softmax_focal_loss(x, target, alpha=0.25))


@pytest.mark.parametrize(
    ("kind", "message", "gamma"),
    [
        (TypeError, r"gamma must be a number or a 0-d tensor, got a tensor of shape \(1,\) and torch.float32", torch.ones(1)),
        (ValueError, "gamma has no gradient, got a tensor that requires grad: detach it", torch.tensor(2.0, requires_grad=True)),
        (ValueError, "gamma must be a number or a 0-d tensor on the CPU, got one on meta", torch.tensor(2.0, device="meta")),
        (ValueError, "gamma must be finite and at least 0, got -1", torch.tensor(-1)),
        (TypeError, "gamma must be a number, got list", [2.0]),
    ],
)
def test_what_is_no_number(kind, message, gamma):
    with pytest.raises(kind, match=message):
        L.sigmoid_focal_loss(torch.rand(3, 4), torch.rand(3, 4), gamma=gamma)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(3, 4), (6,), (), (4, 4)], ids=str)
def test_targets_of_integers_and_bools(shape, dtype, device):
    """Of the input's shape they are dense, as torch reads them."""
    x = torch.randn(shape, device=device)
    target = (torch.rand(shape, device=device) * (2 if dtype == torch.bool else 5)).to(dtype)
    theirs = {L.l1_loss: F.l1_loss, L.smooth_l1_loss: F.smooth_l1_loss, L.mse_loss: F.mse_loss, L.huber_loss: F.huber_loss}
    for ours, function in theirs.items():
        one, other = (x.clone().requires_grad_() for _ in range(2))
        value, exact = ours(one, target), function(other, target.float())
        value.backward()
        exact.backward()
        torch.testing.assert_close(value, exact)
        torch.testing.assert_close(one.grad, other.grad)
    hot = target != 0
    for function in (L.binary_cross_entropy_with_logits, L.sigmoid_focal_loss, lossforge.losses.asymmetric_loss_multi_label):
        torch.testing.assert_close(function(x, hot.to(dtype), reduction="sum"), function(x, hot.float(), reduction="sum"))
    smooth = {"target_threshold": 0.3}
    torch.testing.assert_close(
        L.binary_cross_entropy_with_logits(x, hot.to(dtype), **smooth), L.binary_cross_entropy_with_logits(x, hot.float(), **smooth)
    )


def test_integer_targets_that_half_precision_cannot_hold(device):
    x = torch.zeros(2, 3, dtype=torch.float16, device=device)
    assert L.l1_loss(x, torch.full((2, 3), 100_001, device=device)) == 100_001


def test_integer_targets_of_another_shape():
    """(N,) beside (N, N) is class indices, where torch broadcasts; other shapes are refused, and the message says both readings."""
    x = torch.rand(3, 3)
    torch.testing.assert_close(L.l1_loss(x, torch.tensor([0, 2, 1])), F.l1_loss(x, torch.eye(3)[[0, 2, 1]]))
    assert "read as class indices" in inspect.getdoc(L.l1_loss)
    with pytest.raises(ValueError, match=r"got \(1, 3\): .* class indices along dim -1, or has the shape of input, \(3, 3\)"):
        L.l1_loss(x, torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize("function", KEYWORDS, ids=lambda f: f.__name__)
def test_a_misspelt_keyword(function):
    """Every parameter is named, and the nearest to what was written."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    name = names[-1]
    with pytest.raises(TypeError) as caught:
        function(**{f"{name}x": 1})
    assert f"{function.__name__}() got an unexpected keyword argument '{name}x'; did you mean '{name}'?" in str(caught.value)
    listed = str(caught.value).partition("It takes ")[2].split(", ")
    assert listed[: len(names)] == names


@pytest.mark.parametrize(
    "loss",
    [L.dice_loss, L.jaccard_loss, L.tversky_loss, L.focal_tversky_loss, L.dice_ce_loss, L.DiceLoss()],
    ids=lambda loss: getattr(loss, "__name__", "module"),
)
def test_one_class_under_a_softmax(loss, device):
    """Its probability is 1 whatever the logits are, and the gradient 0: refused, with the way out."""
    x, mask = torch.randn(2, 1, 3, 4, device=device), torch.randint(0, 2, (2, 3, 4), device=device)
    with pytest.raises(ValueError, match=r'more than one class under a softmax.*got shape \(2, 1, 3, 4\).*activation="sigmoid"'):
        loss(x, mask)
    if loss is L.dice_loss:
        for target in (mask, mask.unsqueeze(1), mask.bool().unsqueeze(1), mask.unsqueeze(1).float()):
            torch.testing.assert_close(loss(x, target, activation="sigmoid"), loss(x, mask.unsqueeze(1).float(), activation="sigmoid"))


def test_one_hot_masks(device):
    x, index = torch.randn(2, 3, 4, device=device), torch.randint(0, 3, (2, 4), device=device)
    hot = F.one_hot(index, 3).movedim(-1, 1)
    for target in (hot, hot.bool(), hot.byte()):
        torch.testing.assert_close(L.dice_loss(x, target), L.dice_loss(x, index))


@pytest.mark.parametrize(
    ("ours", "theirs", "args"),
    [
        (L.AsymmetricLossMultiLabel, timm.loss.AsymmetricLossMultiLabel, (3, 1, 0.1, 1e-8, True)),
        (L.AsymmetricLossMultiLabel, timm.loss.AsymmetricLossMultiLabel, (4, 2, None, 1e-8, True, 0.1, "mean")),
        (L.AsymmetricLossMultiLabel, timm.loss.AsymmetricLossMultiLabel, (4, 2, 0.05, 1e-8, False, 0.2, "sum", torch.rand(5), 2.0)),
        (L.PolyBinaryCrossEntropy, timm.loss.PolyBinaryCrossEntropy, (1.5, 2.0, 0.25, 0.1, "sum")),
    ],
)
def test_timms_arguments(ours, theirs, args, device):
    """In timm's order, value and gradient."""
    args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    x, target = torch.randn(7, 5, device=device), (torch.rand(7, 5, device=device) > 0.6).float()
    one, other = (run(module(*args), Sample("", x, target)) for module in (ours, theirs))
    torch.testing.assert_close(one.value, other.value)
    torch.testing.assert_close(one.gradient, other.gradient)


def test_timms_poly_smoothing(device):
    x, target = torch.randn(7, 5, device=device), torch.randint(0, 5, (7,), device=device)
    expected = timm.loss.PolyCrossEntropy(1.5, 0.1)(x, target)
    torch.testing.assert_close(L.poly_cross_entropy(x, target, 1.5, smoothing=0.1), expected)
    torch.testing.assert_close(L.PolyCrossEntropyLoss(1.5, smoothing=0.1)(x, target), expected)
    with pytest.raises(ValueError, match=r"smoothing is label_smoothing, got both, 0\.1 and 0\.2"):
        L.poly_cross_entropy(x, target, smoothing=0.1, label_smoothing=0.2)
    with pytest.raises(ValueError, match=r"smoothing needs a dense target, \(7, 5\), got class indices \(7,\)"):
        lossforge.losses.asymmetric_loss_multi_label(x, target, smoothing=0.1)


def test_flags_of_numpy_and_torch():
    p, q = torch.rand(2, 3, 4)
    for flag in (np.True_, torch.tensor(True)):
        assert lossforge.losses.kl_div_with_logits(p, q, reverse=flag) == lossforge.losses.kl_div_with_logits(p, q, reverse=True)


def test_labels_of_an_only_class_are_led_to_their_shape():
    """Class indices of one class are 0 and -1, so that labels of 0 and 1 must not be read as such."""
    x, labels = torch.randn(6, 1), torch.tensor([0, 1, 1, 0, 0, 1])
    for target, wrong in ((labels.float(), ValueError), (labels, IndexError)):
        with pytest.raises(wrong, match=r"of the only class, did you mean target\.view_as\(input\)\?"):
            L.binary_cross_entropy_with_logits(x, target)
        expected = F.binary_cross_entropy_with_logits(x, labels.view_as(x).float())
        torch.testing.assert_close(L.binary_cross_entropy_with_logits(x, target.view_as(x)), expected)

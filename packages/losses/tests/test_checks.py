"""Mistakes stop before any launch, with an error that names the argument, what came and what is accepted."""

import math
import re
from inspect import signature

import numpy as np
import pytest
import torch

from lossforge import losses
from lossforge.kernels import launch_counts
from lossforge.losses import CrossEntropyLoss, SigmoidFocalLoss, cross_entropy, preference_bce_with_logits, sigmoid_focal_loss
from lossforge.losses.base import checks
from lossforge.losses.registry import LOSSES

EACH = pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if loss.template.by_rows], ids=lambda loss: loss.name)
X = torch.rand(3, 4)
INDEX = torch.tensor([0, 1, 2])


@pytest.fixture(autouse=True)
def _nothing_launched():
    before = launch_counts()
    yield
    assert launch_counts() == before


@EACH
@pytest.mark.parametrize(
    ("kind", "message", "x", "target", "options"),
    [
        (TypeError, "input must be of a floating dtype, got torch.int64", X.long(), INDEX, {}),
        (TypeError, "input must be a tensor, got list", [1.0], INDEX, {}),
        (TypeError, "target must be a tensor, got int", X, 1, {}),
        (TypeError, "target must be of an integer dtype, got torch.bool", X, INDEX.bool(), {}),
        (ValueError, r"target must have the shape of input, \(3, 4\).* got \(3, 5\)", X, torch.rand(3, 5), {}),
        (ValueError, r"target must have shape \(3,\), got \(4,\)", X, torch.zeros(4, dtype=torch.long), {}),
        (ValueError, "reduction must be one of 'none', 'mean', 'sum'(, 'batchmean')?, got 'avg'", X, INDEX, {"reduction": "avg"}),
        (ValueError, "gradient must be one of None, 'forward', 'backward', got 'both'", X, INDEX, {"gradient": "both", "reduction": "sum"}),
        (ValueError, "gradient=\"forward\" needs a scalar result", X, INDEX, {"gradient": "forward", "reduction": "none"}),
        (ValueError, "empty must be one of 'nan', 'zero', got 'none'", X, INDEX, {"empty": "none", "reduction": "sum"}),
        (ValueError, "normalizer needs a scalar result", X, INDEX, {"normalizer": 2.0, "reduction": "none"}),
        (ValueError, r"normalizer must be .* 0-d tensor, got shape \(2,\)", X, INDEX, {"normalizer": torch.ones(2), "reduction": "sum"}),
        (ValueError, "target_b and lam go together, got only lam", X, INDEX, {"lam": 0.5}),
        (ValueError, "target_b and lam go together, got only target_b", X, INDEX, {"target_b": INDEX}),
        (ValueError, "lam must be finite, got inf", X, INDEX, {"target_b": INDEX, "lam": float("inf")}),
        (TypeError, "lam must be a number, got str", X, INDEX, {"target_b": INDEX, "lam": "half"}),
        (ValueError, r"lam must be .* got shape \(5,\)", X, INDEX, {"target_b": INDEX, "lam": torch.rand(5)}),
        (TypeError, "unexpected keyword argument 'gama'.* It takes .*reduction.*, empty, gradient, inplace", X, INDEX, {"gama": 2.0}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
def test_every_loss_by_rows(loss, kind, message, x, target, options):
    if "target_b" in loss.without and {"target_b", "lam"} & set(options):
        kind, message = TypeError, "unexpected keyword argument '(target_b|lam)'"
    for name in {"inputs", "targets"} & {*signature(loss.function).parameters}:  # torchvision's names
        message = re.sub(rf"\b{name[:-1]}\b", name, message)
    with pytest.raises(kind, match=message):
        loss.function(x, target, **options)


@pytest.mark.each("template", ci=True)
@EACH
def test_inplace_refuses_a_leaf(loss):
    with pytest.raises(ValueError, match="inplace=True needs logits that are an intermediate result, got a leaf that requires grad"):
        loss.function(X.clone().requires_grad_(), INDEX, inplace=True)


@pytest.mark.each("template", ci=True)
@EACH
def test_inplace_refuses_holes_and_overlaps(loss):
    for x in ((torch.rand(3, 8, requires_grad=True) * 1)[:, :4], torch.rand(3, 1, requires_grad=True).expand(3, 4)):
        with pytest.raises(ValueError, match=r"inplace=True needs logits without holes or overlaps in memory, got \(3, 4\) with strides"):
            loss.function(x, INDEX, inplace=True)


def test_cross_entropy_outputs_and_shapes():
    with pytest.raises(ValueError, match='outputs "correct" needs class indices as target, got probabilities'):
        cross_entropy(X, X, outputs=("correct",))
    with pytest.raises(ValueError, match="input must have a dimension of classes, got a 0-d tensor"):
        cross_entropy(torch.tensor(1.0), torch.tensor(0))


def test_groups():
    with pytest.raises(ValueError, match="group and group_weight go together, got only group"):
        preference_bce_with_logits(X, INDEX, group=INDEX[:, None])
    with pytest.raises(ValueError, match=r"group_weight must hold one weight a group, shape \(G,\), got \(1, 3\)"):
        preference_bce_with_logits(X, INDEX, group=INDEX[:, None], group_weight=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"group must broadcast to the shape of input, \(3, 4\), got \(3,\)"):
        preference_bce_with_logits(X, INDEX, group=INDEX, group_weight=torch.ones(3))


def test_modules():
    with pytest.raises(
        TypeError,
        match=r"CrossEntropyLoss\(\) got an .* argument 'dim'. It takes weight, .* empty, gradient, .* softcap, z_loss$",
    ):
        CrossEntropyLoss(dim=1)
    with pytest.raises(TypeError, match=r"SigmoidFocalLoss\(\) got an .* argument 'gama'; did you mean 'gamma'\? It takes alpha, "):
        SigmoidFocalLoss(gama=1.0)
    with pytest.raises(ValueError, match="reduction must be one of"):
        SigmoidFocalLoss(reduction="avg")


def test_class_indices_that_are_floating_are_recognised():
    """By their shape, in every template that takes class indices: their dtype is what is wrong."""
    x, index, hidden = torch.randn(4, 5), torch.tensor([0.0, 1, 2, 3]), torch.randn(2, 2, 3)
    maps, masks = torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4)
    for call in (
        lambda: losses.cross_entropy(x, index),
        lambda: losses.nll_loss(x, index),
        lambda: losses.sigmoid_focal_loss(x, index),
        lambda: losses.dice_loss(maps, masks),
        lambda: losses.cross_entropy(maps, masks),
        lambda: losses.linear_cross_entropy(hidden, torch.randn(5, 3), index.view(2, 2)),
    ):
        with pytest.raises(ValueError, match=r"(targets?) must have .*, got \(.*\) of torch.float32: .* mean \1\.long\(\)\?$"):
            call()
    for call in (
        lambda: losses.selective_log_softmax(x, index),
        lambda: losses.linear_selective_log_softmax(hidden, torch.randn(5, 3), index.view(2, 2)),
    ):
        with pytest.raises(TypeError, match=r"index must be of an integer dtype, got torch.float32: did you mean index\.long\(\)\?"):
            call()
    with pytest.raises(ValueError, match=r"where it holds probabilities, got \(4, 1\)$"):
        losses.cross_entropy(x, index.unsqueeze(1))


@pytest.mark.parametrize(
    ("flag", "call"),
    [
        ("reverse", lambda v: losses.kl_div_with_logits(X, X, reverse=v)),
        ("temperature_squared", lambda v: losses.kl_div_with_logits(X, X, 2.0, temperature_squared=v)),
        ("sum_classes", lambda v: losses.smoothed_binary_cross_entropy(X, X, sum_classes=v)),
        ("tail", lambda v: losses.topk_kl_div_with_logits(X, *X.log_softmax(-1).topk(2), tail=v)),
        ("average_log_prob", lambda v: losses.sequence_logps(X, average_log_prob=v)),
        ("size_average", lambda v: cross_entropy(X, INDEX, None, v)),
        ("validate", lambda v: cross_entropy(X, INDEX, validate=v)),
        ("inplace", lambda v: cross_entropy(X, INDEX, inplace=v)),
        ("skip_ignored", lambda v: losses.fuse_linear(cross_entropy)(X, X, INDEX.clamp(max=2), skip_ignored=v)),
        ("per_image", lambda v: losses.LovaszSoftmaxLoss(per_image=v)(X, INDEX)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_true_or_false_is_not_taken_by_truth(flag, call):
    for value, kind in (("false", "str"), (1, "int"), (torch.ones(2), "Tensor")):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, got {kind}"):
            call(value)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("quantile must be finite and at least 0 and at most 1, got -2.0", lambda: losses.quantile_loss(X, X, torch.tensor(-2.0))),
        ("alpha must be finite and at most 1, got 1.5", lambda: sigmoid_focal_loss(X, X, torch.tensor(1.5))),
        ("lam must be finite, got inf", lambda: cross_entropy(X, INDEX, target_b=INDEX, lam=torch.tensor(float("inf")))),
        ("alpha must be .*, got -1.5", lambda: losses.softmax_focal_loss(X, INDEX, torch.tensor(-1.5))),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_tensor_without_dimensions_is_checked_as_its_number(message, call):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (TypeError, "^preference must be a tensor, got list", lambda: preference_bce_with_logits(X, X, [1, 1])),
        (ValueError, "^quantile must broadcast to the shape of input", lambda: losses.quantile_loss(X, X, torch.rand(3))),
        (ValueError, "^alpha must broadcast to the shape of input", lambda: losses.general_robust_loss(X, X, torch.rand(3))),
        (ValueError, r"^index must have shape \(3,\), or \(3, K\) for K tokens", lambda: losses.selective_log_softmax(X, INDEX[:2])),
        (ValueError, r"^weight must hold one number a class, shape \(4,\), got \(3,\)", lambda: cross_entropy(X, INDEX, torch.rand(3))),
        (ValueError, r"^weight must broadcast to the shape of inputs", lambda: sigmoid_focal_loss(X, INDEX, weight=torch.rand(2, 4))),
        (ValueError, "^softcap must be finite and above 0, got 0", lambda: cross_entropy(X, INDEX, softcap=0)),
        (ValueError, "^z_loss must be finite and at least 0, got -0.1", lambda: cross_entropy(X, INDEX, z_loss=-0.1)),
        (ValueError, "^dim must be at least -2 and below 2 .* got 2", lambda: sigmoid_focal_loss(X, INDEX, dim=2)),
        (TypeError, "^target must be a tensor, got NoneType", lambda: losses.cosine_embedding_loss(X, X, None)),
        (
            ValueError,
            'classes must be "present", "all", or a list of class indices, got None',
            lambda: losses.lovasz_softmax_loss(X, INDEX, None),
        ),
        (ValueError, "classes must be .*, got 1", lambda: losses.lovasz_softmax_loss(X, INDEX, 1)),
        (TypeError, "ignore_index must be a whole number, got bool", lambda: cross_entropy(X, INDEX, ignore_index=True)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_argument_is_named_as_the_function_has_it(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


def test_flags_of_a_module_are_checked_where_it_is_fused():
    head = torch.rand(4, 4)
    with pytest.raises(TypeError, match="inplace must be True or False, got str"):
        losses.fuse_linear(CrossEntropyLoss(inplace="no"))(X, head, INDEX)


def test_a_shape_of_minus_infinity_is_a_number_in_any_form():
    for alpha in (-float("inf"), torch.tensor(-float("inf"))):
        assert losses.general_robust_loss(X.double(), X.double() + 1, alpha).isfinite()


def test_a_tangent_of_a_number_is_kept():
    with torch.autograd.forward_ad.dual_level():
        quantile = torch.autograd.forward_ad.make_dual(torch.tensor(0.3), torch.tensor(1.0))
        found = losses.quantile_loss(X, X + 1, quantile)
        assert torch.autograd.forward_ad.unpack_dual(found).tangent is not None


TINY, HUGE = 1.1754943508222875e-38, 3.4028234663852886e38
GRADED = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("accepted", "value"),
    [
        (lambda: checks.number("a", 1.0, 0.0, 1.0), 1.0),
        (lambda: checks.number("a", 0, 0.0, 1.0), 0.0),
        (lambda: checks.number("a", -2.5), -2.5),
        (lambda: checks.number("a", TINY), TINY),
        (lambda: checks.number("a", -HUGE), -HUGE),
        (lambda: checks.number("a", torch.tensor(2)), 2.0),
        (lambda: checks.number("a", np.float32(0.5)), 0.5),
        (lambda: checks.factor("a", math.inf), None),
        (lambda: checks.factor("a", -HUGE), None),
        (lambda: checks.whole_number("a", -(2**63)), -(2**63)),
        (lambda: checks.whole_number("a", np.int32(7)), 7),
        (lambda: checks.flag("a", np.True_), True),
        (lambda: torch.no_grad()(checks.without_gradient)("a", GRADED), None),
        (lambda: checks.to_read(torch.ones(2), None), True),
        (lambda: checks.expands(torch.ones(2, 1), (3, 2, 5)), True),
        (lambda: checks.in_range("a", torch.tensor([2, 4, -100]), 2, 5, -100), None),
    ],
)
def test_what_a_check_accepts(accepted, value):
    found = accepted()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "refused", "message"),
    [
        (ValueError, lambda: checks.number("a", 0.0, 0.0, exclusive=True), "a must be finite and above 0, got 0.0"),
        (ValueError, lambda: checks.number("a", 1.0, 0.0, 1.0, below=True), "at least 0 and below 1, got 1.0"),
        (ValueError, lambda: checks.number("a", TINY / 2), "a must be 0 or of a size from 1.18e-38 to 3.4e[+]38"),
        (ValueError, lambda: checks.number("a", -1e39), "the range of float32, got -1e[+]39"),
        (ValueError, lambda: checks.factor("a", -1e39), "a must be at most 3.4e[+]38 in size"),
        (TypeError, lambda: checks.whole_number("a", True), "a must be a whole number, got bool"),
        (ValueError, lambda: checks.whole_number("a", 2**63), "a whole number of 64 bits, got 9223372036854775808"),
        (ValueError, lambda: checks.without_gradient("a", GRADED), "a has no gradient, got a tensor that requires grad: detach it"),
        (ValueError, lambda: checks.broadcasts("a", torch.ones(1, 2), torch.ones(2)), r"a must broadcast to the shape of input, \(2,\)"),
        (IndexError, lambda: checks.in_range("a", torch.tensor([2, 5]), 2, 5, None), "a must hold 2 to 4, got 5 at row 1"),
        (IndexError, lambda: checks.in_range("a", torch.tensor([1, 4]), 2, 5, None), "a must hold 2 to 4, got 1 at row 0"),
        (TypeError, lambda: checks.strided("a", torch.ones(2).to(torch.float8_e4m3fn)), "a must be float64, float32, bfloat16 or float16"),
        (TypeError, lambda: checks.integer("a", torch.ones(2) > 0), "a must be of an integer dtype, got torch.bool"),
        (TypeError, lambda: checks.bound("f", ["a"], ["a"], [], [1], {"a": 2}), "got a twice, by position and by name"),
        (ValueError, lambda: checks.with_values("a", torch.ones(2, device="meta")), "a must hold values, got a tensor on meta"),
    ],
)
def test_what_a_check_refuses(kind, refused, message):
    with pytest.raises(kind, match=message):
        refused()


def test_flags_of_numpy_become_flags_by_position_and_by_name():
    flags = {"a": checks.Flag(0, False), "b": checks.Flag(1, True), "c": checks.Flag(2, False)}
    named = {"c": np.False_}
    args = checks.with_flags(flags, [np.True_, None], named)
    assert [args, named] == [[True, None], {"c": False}]
    assert args[0] is True
    assert named["c"] is False
    named = {"c": np.True_}
    assert checks.with_flags(flags, [], named) == []
    assert named["c"] is True
    with pytest.raises(TypeError, match="c must be True or False, got int"):
        checks.with_flags(flags, [True, None], {"c": 1})

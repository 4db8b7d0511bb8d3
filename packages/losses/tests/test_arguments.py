"""No argument is without effect: each of a public function, changed from its default, changes the result, or is refused, on every kind of
call."""

import inspect
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from lossforge import losses
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import samples

OUT_OF_RANGE = re.compile(r"must be (finite|at least|at most|above|below|one of|a whole number|0 or)|must (hold one|broadcast|have one)")
HOW = {
    "gradient": "when the gradient is computed",
    "inplace": "where the gradient is written",
    "empty": "what nothing that counts gives",
    "validate": "whether values on a GPU are checked, or what is wrong with them",
    "size_average": "an old name of reduction",
    "reduce": "an old name of reduction",
    "group": "another process, or a pair with group_weight",
    "classes": "refused without group",
    "accumulate": "memory",
    "chunk": "memory",
}
"""Arguments that change no result of these calls, with what they change."""
OTHERS = {"reduction": ("sum", "none"), "activation": ("sigmoid", None), "format": ("cxcywh",), "dim": (0, 1), "fun": ("sqrt", "exp")}
"""Values of options that are words, or places."""
COUNTS = {"class_counts": torch.arange(1, 34), "num_samples": 90}
BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "temperature_squared": {"": {"temperature": 2.0}},
    "smoothing": {"bce_smoothed": {"smooth_dense": True}},
    "eps": {"poisson_nll": {"log_input": False}},
    "tau": {"logit_adjusted_ce": {"log_prior": torch.linspace(-4, -1, 10)}},
    "min_kept": {"ohem_ce": {"threshold": 0.0}},
    "threshold": {"ohem_ce": {"min_kept": 0}},
    **{name: {"distribution_balanced": COUNTS} for name in ("init_bias", "map_alpha", "map_beta", "map_mu", "num_samples")},
}
"""What stands beside an argument that changes nothing alone, by loss; "" for any."""
WITHOUT = {
    ("dense", "dim"): "the dimension of classes, which a module keeps for targets of both kinds",
    ("indices", "smooth_dense"): "says what happens to dense targets",
    ("indices", "log_target"): "how dense targets are written",
    ("indices", "full"): "a term of targets above 1",
    ("indices", "iou_weighted"): "whether a quality weighs its element, and that of a class index is 1",
    ("indices", "positive_at_zero"): "what an element is whose dense target is 0",
    **{(kind, "eps", "asymmetric"): "timm's, where its logarithm is cut off; ours is exact" for kind in ("dense", "indices")},
    ("indices", "gamma", "gaussian_focal"): "the exponent of 1 - y, which is 0 or 1",
    ("indices", "pos_weight", "gaussian_focal"): "a weight of elements with a target of 1, and a score may be below",
}
"""Arguments that change nothing on a kind of target, of any loss or of one, and why."""


def other_values(name, parameter, sample):
    """Yield values of an argument other than its default."""
    default, words = parameter.default, str(parameter.annotation)
    if name in OTHERS:
        yield from (v for v in OTHERS[name] if v != default)
    elif isinstance(default, bool):
        yield not default
    elif name == "ignore_index":
        held = None if sample.target is None or sample.target.is_floating_point() else int(sample.target.flatten()[0])
        yield from ([] if held is None else [held])
        yield 1
    elif isinstance(default, int):
        yield from (default + 1, 1)
    elif isinstance(default, float):
        yield from (0.5 * default + 0.15, default + 1.0)
    elif name in ("softcap", "normalizer") or (default is None and "float" in words):
        yield from (0.3, 1.7)
    elif name == "token_weight":
        yield "probability"
    elif name == "weight":
        yield from (torch.linspace(0.5, 2.0, n, dtype=torch.float64) for n in {*sample.x.shape[:2], *sample.x.shape[-1:]})
    elif default is None and "int" in words:
        yield 2


def outcome(loss, sample, **options):
    """Return value and gradients, or the message of the error."""
    leaves = {}

    def leaf(name, t):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            t = leaves[name] = t.detach().double().requires_grad_(name == "input")
        return t

    x, target = leaf("input", sample.x), leaf("target", sample.target)
    kwargs = {name: leaf(name, t) for name, t in sample.kwargs.items()}
    try:
        value = loss.reference(x, target, **{**kwargs, **options})
    except (ValueError, TypeError, IndexError) as error:
        return str(error)
    found = value if isinstance(value, torch.Tensor) else value.loss
    (gradient,) = torch.autograd.grad(found.sum(), x)
    return type(value), found.detach(), gradient


def same(a, b):
    """Whether nothing changed. An error counts as a change, but for that of a value which no call takes."""
    if isinstance(b, str):
        return OUT_OF_RANGE.search(b) is not None
    return a[0] is b[0] and all(
        s.shape == t.shape and torch.equal(s.nan_to_num(), t.nan_to_num()) for s, t in zip(a[1:], b[1:], strict=True)
    )


def of_classes(value, sample):
    """Return numbers of as many classes as a call has."""
    x = sample.x
    dim = sample.kwargs.get("dim", -1)
    return value[: x.shape[dim]] if isinstance(value, torch.Tensor) and x.ndim else value


def kind_of(sample):
    """Return the branch of a call: what its target is, and the tensors beside it."""
    target = "none" if sample.target is None else "dense" if sample.target.is_floating_point() else "indices"
    return target, *sorted({"target_b", "score", "labels", "log_prior"} & {*sample.kwargs})


def with_absent_class(sample):
    """Return a call whose first class has no pixels, as far as its target is dense."""
    if sample.target is None or not sample.target.is_floating_point() or sample.target.ndim < 2:
        return sample
    return replace(sample, target=sample.target.index_fill(1, torch.tensor(0), 0.0))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
@pytest.mark.filterwarnings("ignore:input has one class")
def test_no_argument_is_without_effect(loss):
    parameters = {n: p for n, p in inspect.signature(loss.function).parameters.items() if p.default is not p.empty and n not in HOW}
    without: dict[tuple[str, ...], set[str]] = {}
    for sample in samples(loss):
        if sample.x.numel() > 400:
            continue
        left = without.setdefault(kind_of(sample), {*parameters})
        if "normalizer" in sample.kwargs:
            sample.kwargs["reduction"] = "mean"
        left -= {*sample.kwargs}
        for name in sorted(left):
            given = with_absent_class(sample) if name in ("present_only", "positive_at_zero") else sample
            by_loss = BESIDE.get(name, {})
            beside = {n: of_classes(v, given) for n, v in by_loss.get(loss.name, by_loss.get("", {})).items() if n not in given.kwargs}
            before = outcome(loss, given, **beside)
            values = [*other_values(name, parameters[name], sample)]
            changed = [not same(before, outcome(loss, given, **{**beside, name: v})) for v in values if not isinstance(before, str)]
            if not values or any(changed):
                left.remove(name)
    left = {(kind, name) for kind, names in without.items() for name in names}
    assert not {(kind, name) for kind, name in left if not {(kind[0], name), (kind[0], name, loss.name)} & {*WITHOUT}}


X, MASKS, HEAD = torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4), (torch.randn(5, 4), torch.randn(3, 4))
OF_PROBABILITIES = {
    "generalized_dice_loss": (losses.generalized_dice_loss, X, MASKS),
    "mcc_loss": (losses.mcc_loss, X, MASKS),
    "dice_loss, masks of integers": (losses.dice_loss, X, (MASKS > 0.5).long()),
    "linear_cross_entropy": (losses.linear_cross_entropy, *HEAD, torch.rand(5, 3)),
    "fuse_linear": (losses.fuse_linear(losses.logit_adjusted_cross_entropy), *HEAD, torch.rand(5, 3)),
    "DiceLoss": (lambda *call, **options: losses.DiceLoss(**options)(*call), X, MASKS),
    "MCCLoss": (lambda *call, **options: losses.MCCLoss(**options)(*call), X, MASKS),
    "CrossEntropyLoss": (lambda *call, **options: losses.CrossEntropyLoss(**options)(*call), X, MASKS),
}


@pytest.mark.parametrize("name", OF_PROBABILITIES)
def test_ignore_index_of_a_dense_target(name):
    function, *call = OF_PROBABILITIES[name]
    assert function(*call).isfinite()
    assert torch.equal(function(*call, ignore_index=-100), function(*call))
    for index in (-1, 0, 255):
        with pytest.raises(ValueError, match=f"^ignore_index needs class indices as target, got a dense one, with ignore_index={index}: "):
            function(*call, ignore_index=index)


@pytest.mark.parametrize(("classes", "warned"), [(1, True), (2, False)])
def test_a_softmax_of_one_class_says_so(classes, warned):
    """As torch it gives 0, also for probabilities, which torch takes without a word."""
    x = torch.randn(4, classes, requires_grad=True)
    for function, target in (
        (losses.cross_entropy, torch.rand(4, classes)),
        (losses.softmax_focal_loss, torch.zeros(4, dtype=torch.long)),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss = function(x, target, reduction="sum")
        assert [str(w.message).startswith("input has one class, ") for w in found if w.category is UserWarning] == [True] * warned
        assert (loss == 0) == warned

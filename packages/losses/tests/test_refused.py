"""What no public function takes, whatever the argument: numbers beyond float32 or their range, tensors of other layouts and dtypes,
other kinds, unknown words and keywords.

And what float32 cannot compute of huge numbers that it does hold: a result is right, or it is not finite.
"""

import contextlib
import functools
import inspect
import math
import re
from typing import Literal, get_args, get_origin

import pytest
import torch
from random_calls import range_of

from lossforge import losses
from lossforge.kernels import INTERPRETED, launch_counts
from lossforge.losses import LinearTeacher, TopKTeacher, fuse_linear, plain_torch
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import plain_sample

generator = torch.Generator().manual_seed(0)
rand = functools.partial(torch.rand, generator=generator)
X, INDEX = torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 2])
MASK, SQUARE = (X > 0).float(), torch.randn(3, 3, generator=generator)
BOXES, LOGPS = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 4]]), -torch.rand(4, generator=generator)
LABELS, PLANES = torch.zeros(1, 2, dtype=torch.long), torch.randn(2, 3, 4, 5, generator=generator)
CALLS = {
    "selective_log_softmax": (X, INDEX),
    "linear_cross_entropy": (X, X, INDEX),
    "linear_selective_log_softmax": (X, X, INDEX),
    "linear_entropy": (X, X),
    "linear_objective": (X, X, INDEX, torch.sum),
    "linear_top_k": (X, X, 2),
    "linear_mtp_loss": (X[None], X, INDEX[None]),
    **dict.fromkeys(("linear_kl_div", "linear_js_div", "linear_total_variation", "linear_cosine_distance"), (X, X, SQUARE)),
    "linear_draft_loss": (X, X, SQUARE),
    "clip_loss": (SQUARE,),
    **dict.fromkeys(("clip_loss_from_features", "siglip_loss_from_features", "info_nce_loss", "nt_xent_loss"), (X, X)),
    **dict.fromkeys(("supervised_contrastive_loss", "multi_similarity_loss", "circle_loss"), (X, INDEX)),
    "proxy_anchor_loss": (X, X, INDEX),
    "gist_embed_loss": (X, X, X, X),
    **dict.fromkeys(("mean_center", "sinkhorn_center"), (X,)),
    "draft_decay_weights": (INDEX, 4.0),
    "draft_confidence_weights": (X,),
    "mtp_targets": (INDEX, 2),
    "koleo_loss": (X,),
    "gram_anchoring_loss": (X, X),
    **dict.fromkeys(("vicreg_loss", "barlow_twins_loss"), (X, X)),
    **dict.fromkeys(("zlpr_loss", "two_way_loss"), (X, MASK)),
    "jsd_cross_entropy": (X.repeat(2, 1), INDEX[:2]),
    "load_balancing_loss": (X,),
    "channel_wise_kl_div": (torch.zeros(2, 3, 4),) * 2,
    "dkd_loss": (X, X, INDEX),
    "dist_loss": (X, X),
    "seesaw_loss": (X, INDEX, torch.ones(4)),
    "class_balanced_weight": (INDEX + 1,),
    "dpo_loss": (LOGPS,) * 4,
    **dict.fromkeys(("cpo_loss", "simpo_loss", "orpo_loss", "bradley_terry_loss"), (LOGPS, LOGPS)),
    "kto_loss": (LOGPS, LOGPS, None, LOGPS, LOGPS, None),
    "grpo_loss": (X, X[:, 0], X, X),
    "tpo_loss": (LOGPS,) * 3,
    "ppo_value_loss": (X, X, X),
    "sequence_logps": (X,),
    **dict.fromkeys(("box_iou", "generalized_box_iou", "distance_box_iou", "complete_box_iou"), (BOXES, BOXES)),
    "task_aligned_assign": (rand(1, 4, 5), rand(1, 4, 4), rand(4, 2), LABELS, BOXES[None]),
    "matching_cost": (rand(1, 4, 5), rand(1, 4, 4), LABELS[0], BOXES, torch.tensor([2])),
    "mask_matching_cost": (rand(1, 4, 5), rand(2, 5), torch.tensor([2])),
    "hungarian_assign": (rand(3, 5), torch.tensor([2, 3])),
    "hungarian_match": (rand(2, 3, 5), torch.tensor([2, 3])),
    "max_iou_assign": (BOXES, LABELS, BOXES[None]),
    "atss_assign": (BOXES, [2], LABELS, BOXES[None]),
    **dict.fromkeys(
        ("simota_assign", "rtmdet_assign"),
        (rand(1, 4, 5), rand(1, 4, 4), rand(4, 2), torch.ones(4), LABELS, BOXES[None]),
    ),
    **dict.fromkeys(("rotated_box_iou", "probabilistic_box_iou"), (rand(2, 5) + 1, rand(3, 5) + 1)),
    "rotated_giou_loss": (rand(2, 5) + 1, rand(2, 5) + 1),
    **dict.fromkeys(("generalized_dice_loss", "mcc_loss", "boundary_loss", "hausdorff_loss"), (PLANES, (PLANES[:, 0] > 0).long())),
    **dict.fromkeys(("distance_transform", "signed_distance_map"), (PLANES,)),
    "silog_loss": (PLANES.exp(), PLANES.abs()),
    "sample_uncertain_points": (PLANES[:, :1], 3),
    "point_mask_loss": (PLANES[:, 0], PLANES[:, 0] > 0, rand(2, 3, 2)),
    "prototype_mask_loss": (X[:, :2], PLANES[:, :2], PLANES[:, 0].repeat(2, 1, 1)[:3] > 0, torch.ones(3, 4), torch.tensor([1, 2])),
}
for entry in LOSSES.values():
    sample = plain_sample(entry)
    CALLS[entry.function.__name__] = (sample.x, sample.target, *sample.kwargs.values())
OF_REGISTRY = {loss.function.__name__ for loss in LOSSES.values()}
EACH = pytest.mark.parametrize("name", CALLS)
FURTHER = {"weight": X, "score": X[:, 0], "target_b": INDEX, "mask": X > 0, "labels": INDEX, "lse": X[:, 0], "bias": X[:, 0]}
"""Tensors that a function may take beside those of its call."""


def parameters(name):
    return inspect.signature(getattr(losses, name)).parameters


def test_every_public_function_is_here():
    of_functions = {"backend", "plain_torch", "fuse_linear", "elementwise", "rowwise", "boxes", "grad_cache_backward", "check"}
    taken = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))}
    assert taken - of_functions == {*CALLS}


@EACH
def test_numbers_beyond_float32(name):
    """The argument is named, not what torch or Triton makes of it."""
    options = [each for each, p in list(parameters(name).items())[len(CALLS[name]) :] if {"int", "float"} & {*words(p.annotation)}]
    for option in options:
        pair = next((t for t in CALLS[name] if isinstance(t, torch.Tensor) and not t.is_floating_point()), None)
        needed = {"lam": {"target_b": pair}, "num_samples": {"class_counts": torch.ones(CALLS[name][0].shape[-1:])}}
        beside = needed.get(option, {})
        if not {*beside} <= {*parameters(name)} or option in ("size_average", "reduce"):
            continue
        for value in (10**400, -(10**400), float("1e400")):
            with pytest.raises((ValueError, TypeError), match=rf"\b{option}\b"):
                getattr(losses, name)(*CALLS[name], **{option: value}, **beside)
        for value in (1e39, -1e39, 1e-45, math.nan):
            found = outcome(name, {option: value, **beside})
            assert found is None or option in found


RANGES = {
    "at least 0": "center_rewards_coefficient desirable_weight undesirable_weight cpo_alpha tpo_alpha epsilon_high lambda_param mu_param "
    "nu_param gamma p q hardness smooth_nr smooth_dr margin min_side radius iou_weight alpha eps epsilon beta",
    "above 0": "temperature base_temperature cliprange_value tp tn",
    "at least 0 and at most 1": "smoothing positive negative least lambd importance_sample_ratio momentum",
    "at least 0 and at most 0.5": "label_smoothing",
    "at least 1": "oversample_ratio",
    "above 1": "delta",
    "": "normalizer kl base balance z_loss scale logit_scale logit_bias cost_class cost_bbox cost_giou cost_mask cost_dice",
}
"""Ranges of numbers by the names that have them in functions outside of the registry, whose annotations say them."""
OF_FUNCTIONS = {
    **{(name, "beta"): "above 0" for name in ("dpo_loss", "cpo_loss", "simpo_loss", "tpo_loss", "kto_loss", "multi_similarity_loss")},
    **{(name, "alpha"): "above 0" for name in ("multi_similarity_loss", "proxy_anchor_loss")},
    **{(name, "margin"): "" for name in ("bradley_terry_loss", "circle_loss", "proxy_anchor_loss", "gist_embed_loss")},
    **{(name, "eps"): "above 0" for name in ("barlow_twins_loss", "probabilistic_box_iou")},
    **{(name, "alpha"): "at least 0 and at most 1" for name in ("matching_cost", "mask_matching_cost")},
    **{("simpo_loss", name): "" for name in ("gamma", "alpha")},
    ("circle_loss", "gamma"): "above 0",
    ("class_balanced_weight", "beta"): "at least 0 and below 1",
    ("draft_confidence_weights", "alpha"): "at least 0 and at most 1",
    ("draft_decay_weights", "gamma"): "above 0",
    ("draft_decay_weights", "first"): "",
    ("grpo_loss", "epsilon"): "at least 0 and at most 1",
    ("seesaw_loss", "eps"): "above 0 and at most 1",
}
BESIDE = {("mask_matching_cost", name): {"mask_cost": "focal"} for name in ("alpha", "gamma")}
"""What stands beside a number that another option must allow."""
SIGNS = {"above": 0.0, "at least": -0.01, "below": 0.0, "at most": 0.01}


def outside(limits):
    """Return the numbers next to the ends of a range that it does not have."""
    ends = re.findall(r"(above|at least|below|at most) ([\d.]+)", limits)
    return [math.inf, -math.inf, math.nan, *(float(end) + SIGNS[sign] for sign, end in ends)]


@EACH
def test_numbers_outside_of_their_range(name):
    """Each says its range. A number at an inner end is not refused for it."""
    own = {each for names in RANGES.values() for each in names.split()}
    if name in OF_REGISTRY or name.startswith(("linear_", "selective")):
        return
    for option, parameter in list(parameters(name).items())[len(CALLS[name]) :]:
        if "float" not in words(parameter.annotation):
            continue
        assert option in own, option
        limits = OF_FUNCTIONS.get((name, option), next(each for each, names in RANGES.items() if option in names.split()))
        for value in outside(limits):
            said = f"{option} must be finite{limits and ' and '}{limits}, got {value}"
            assert said in (outcome(name, {option: value, **BESIDE.get((name, option), {})}) or ""), said
        for end in re.findall(r"(?:at least|at most) ([\d.]+)", limits):
            found = outcome(name, {option: float(end), **BESIDE.get((name, option), {})})
            assert found is None or not found.startswith(f"{option} must be finite"), found


@EACH
def test_words_and_flags_that_no_option_has(name):
    for option, parameter in list(parameters(name).items())[len(CALLS[name]) :]:
        kinds = parameter.annotation, *get_args(parameter.annotation)
        of_words = option not in ("token_weight", "classes", "outputs", "directions")
        if of_words and any(kind is str or get_origin(kind) is Literal for kind in kinds):
            assert f"{option} must be one of" in (outcome(name, {option: "no such word"}) or ""), option
        elif parameter.annotation is bool:
            for value in ("false", 1, torch.ones(2)):
                assert f"{option} must be True or False, got {type(value).__name__}" in (outcome(name, {option: value}) or ""), option


def outcome(name, options):
    """Return the error's message; None where the option is without effect. No other error is caught."""
    try:
        getattr(losses, name)(*CALLS[name], **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


RANGED = {
    name: {each: found for each, p in inspect.signature(DECLARED[name].definition).parameters.items() if (found := range_of(p.annotation))}
    for name in CALLS
    if name in DECLARED
}
"""The parameters of each function whose types say their range."""
OTHER_ENDS = {
    ("sigmoid_focal_loss", "alpha", "at least -1"),
    ("poly_binary_cross_entropy", "alpha", "at least -1"),
    ("smoothed_binary_cross_entropy", "smoothing", "below 1"),
    ("triplet_margin_loss", "p", "above 0"),
}
"""Ends of a config's range that are not the function's, which takes any negative α for none, a smoothing of 1, and no p below 1."""


def beside_ends(limits):
    """Yield numbers beside each end of a range, with what the error says of it."""
    ends = (("above", limits.above, 0), ("at least", limits.least, -1), ("below", limits.below, 0), ("at most", limits.most, 1))
    yield from ((end + beside, f"{said} {end:.6g}") for said, end, beside in ends if end is not None)
    yield math.inf, "finite"


@pytest.mark.parametrize("name", [name for name, of in RANGED.items() if of])
def test_numbers_outside_of_the_range_of_their_type(name):
    for option, limits in RANGED[name].items():
        for value, said in beside_ends(limits):
            whole = parameters(name)[option].default.__class__ is int
            if (whole and not isinstance(value, int)) or (name, option, said) in OTHER_ENDS:
                continue
            with pytest.raises(ValueError, match=rf"^{option} must be .*{said}.*got {value}"):
                getattr(losses, name)(*CALLS[name], **{option: value})


@EACH
def test_shared_options(name):
    """Words, whole numbers and dtypes that all functions take alike: each error says what came and what is accepted."""
    function, taken, args = getattr(losses, name), parameters(name), CALLS[name]
    first = next((i for i, t in enumerate(args) if isinstance(t, torch.Tensor) and t.is_floating_point()), None)
    wrong = [
        (
            {"reduction": "avg"},
            ValueError,
            "reduction must be one of '(none|mean)', .*got 'avg'",
        ),
        ({"gradient": "both"}, ValueError, "gradient must be one of None, 'forward', 'backward', got 'both'"),
        ({"empty": "none"}, ValueError, "empty must be one of 'nan', 'zero', got 'none'"),
        ({"ignore_index": None}, TypeError, "ignore_index must be a whole number, got NoneType"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be a whole number, got float"),
    ]
    if "reduction" in taken and "none" in str(taken["reduction"].annotation):
        wrong += [
            ({"gradient": "forward", "reduction": "none"}, ValueError, 'gradient="forward" needs a scalar result'),
            ({"normalizer": 2.0, "reduction": "none"}, ValueError, "normalizer needs a scalar result"),
        ]
    calls = [(args, options, kind, said) for options, kind, said in wrong if {*options} <= {*taken}]
    calls.append((args, {"nothing": 1}, TypeError, rf"{name}\(\) got an unexpected keyword argument 'nothing'.* It takes "))
    if first is not None:
        argument, before, after = list(taken)[first], args[:first], args[first + 1 :]
        if name not in ("distance_transform", "signed_distance_map"):  # which take masks of any dtype
            whole = (*before, args[first].long(), *after)
            calls.append((whole, {}, TypeError, f"{argument} must be of a floating dtype, got torch.int64"))
        if "inplace" in taken:
            leaf = (*before, args[first].clone().requires_grad_(), *after)
            calls.append((leaf, {"inplace": True}, ValueError, "inplace=True needs logits that are an intermediate result, got a leaf"))
    launched = launch_counts()
    for given, options, kind, said in calls:
        with pytest.raises(kind, match=f"^({said})"):
            function(*given, **options)
    assert launch_counts() == launched or name == "seesaw_loss"  # which computes its logits before cross entropy checks the rest


def words(annotation):
    return str(annotation).replace("'>", "").replace("<class '", "").replace("|", " ").replace(",", " ").split()


def other_tensors(t):
    """Return a tensor in every layout that is not strided, and in a dtype of a byte, each with what the error says."""
    yield r"got .*layout torch\.sparse_coo", t.to_sparse()
    if t.ndim == 2:
        yield r"got .*layout torch\.sparse_csr", t.to_sparse_csr()
    if t.ndim > 1:
        yield "got a nested tensor", torch.nested.nested_tensor(list(t))
        yield "got a nested tensor", torch.nested.nested_tensor(list(t), layout=torch.jagged)
    if t.is_floating_point():
        yield r"got a quantized one of torch\.qint8", torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)
        yield r"got torch\.float8_e5m2", t.to(torch.float8_e5m2)
    if t.dtype == torch.float32:
        yield r"got .*layout torch\._mkldnn", t.to_mkldnn()


@EACH
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_layouts_and_dtypes(name):
    function, names = getattr(losses, name), list(parameters(name))
    given = dict(zip(names, CALLS[name], strict=False))
    tried = 0
    for argument, t in {**{n: t for n, t in FURTHER.items() if n in names}, **given}.items():
        if not isinstance(t, torch.Tensor) or not t.ndim:
            continue
        for told, other in other_tensors(t):
            with pytest.raises(TypeError, match=f"^{argument} must be (a strided tensor|float64, float32, bfloat16 or float16).*{told}"):
                function(**{**given, argument: other})
            tried += 1
    assert tried


@EACH
def test_complex_numbers(name):
    given = dict(zip(parameters(name), CALLS[name], strict=False))
    for argument, t in given.items():
        if isinstance(t, torch.Tensor):
            with pytest.raises(TypeError, match=rf"^{argument} must .*got torch\.complex64"):
                getattr(losses, name)(**{**given, argument: t.cfloat()})


@EACH
def test_other_kinds(name):
    """The error is ours, and names the argument; of a tensor that does not fit, perhaps the argument that it does not fit."""
    function, names = getattr(losses, name), parameters(name)
    given = dict(zip(names, CALLS[name], strict=False))
    for argument in names:
        for kind in (object(), torch.ones(7, 3), torch.ones((), device="meta"), None):
            try:
                with plain_torch():
                    function(**{**given, argument: kind})
            except (TypeError, ValueError, IndexError) as error:
                told = {*re.findall(r"\w+", str(error))}
                assert argument in told or (isinstance(kind, torch.Tensor) and told & {*names}), (argument, kind, str(error))  # noqa: PT017


@EACH
def test_on_meta(name):
    """Shapes without values: results without values, unless the host needs some."""

    def moved(t):
        return t.to("meta") if isinstance(t, torch.Tensor) else t

    try:
        found = getattr(losses, name)(*map(moved, CALLS[name]))
    except ValueError as error:
        assert name in ("hungarian_match", "mask_matching_cost")
        assert re.search("^(cost|counts) must hold values, got a tensor on meta", str(error))  # noqa: PT017
        return
    assert all(t.is_meta for t in (found if isinstance(found, tuple) else (found,)) if isinstance(t, torch.Tensor))


def of_size(name, size, dtype):
    """Return what a function gives, and the gradient of its first floating argument, where the first two are as large as `size`."""
    inputs = [i for i, t in enumerate(CALLS[name]) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    given = [t.to(dtype) if i in inputs else t for i, t in enumerate(CALLS[name])]
    for i in inputs[:2]:
        given[i] = given[i] * size
    if inputs:
        given[inputs[0]].requires_grad_()
    found = getattr(losses, name)(*given)
    results = [t for t in (found if isinstance(found, tuple) else (found,)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    graded = [t for t in results if t.requires_grad]
    gradient = torch.autograd.grad(sum(t.sum() for t in graded), given[inputs[0]])[0] if graded else torch.zeros(0)
    return torch.cat([t.detach().double().flatten() for t in results]), gradient.double().flatten()


CHOOSES = {
    "mtp_targets",
    "max_iou_assign",
    "atss_assign",
    "simota_assign",
    "rtmdet_assign",
    "task_aligned_assign",
    "hungarian_assign",
    "hungarian_match",
}
ANGLES = {
    "rotated_box_iou",
    "rotated_giou_loss",
    "probabilistic_box_iou",
    *(entry.function.__name__ for entry in LOSSES.values() if entry.template.name == "rotated"),
}
"""Functions of boxes with an angle, which has no digits where it is huge."""


@pytest.mark.parametrize("plain", [pytest.param(False, marks=pytest.mark.slow, id="kernels"), pytest.param(True, id="plain torch")])
@pytest.mark.parametrize("name", sorted({*CALLS} - CHOOSES - ANGLES - {"sample_uncertain_points", "sinkhorn_center", "linear_objective"}))
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_huge_numbers(name, plain):
    """What overflows shows: no loss is finite and wrong, nor is the gradient of a finite one."""
    for size in (1e12, 1e25):
        with plain_torch() if plain else contextlib.nullcontext():
            ours = of_size(name, size, torch.float32)
        for found, exact in zip(ours, of_size(name, size, torch.float64), strict=True):
            right = (found - exact).abs() <= 1e-3 * exact.abs() + 1e-4
            assert (right | ~found.isfinite() | exact.isnan()).all(), (size, found, exact)
            if not found.isfinite().all():
                break


def test_layouts_within_a_teacher_and_of_a_fused_loss():
    sparse = X.to_sparse()
    with pytest.raises(TypeError, match=r"^teacher.input must be a strided tensor, got one of layout torch.sparse_coo"):
        losses.linear_kl_div(X, X, LinearTeacher(sparse, X))
    with pytest.raises(TypeError, match=r"^indices must be a strided tensor"):
        losses.linear_kl_div(X, X, TopKTeacher(X[:, :1], INDEX[:, None].to_sparse()))
    with pytest.raises(TypeError, match=r"^weight must be a strided tensor.*make it dense by weight.to_dense\(\)"):
        fuse_linear(losses.cross_entropy)(X, sparse, INDEX)


def test_numbers_that_are_out_of_range_together():
    with pytest.raises(ValueError, match=r"temperature² over the normalizer must be at most 3.4e\+38 in size"):
        losses.kl_div_with_logits(X, X, 1e25)
    with pytest.raises(ValueError, match=r"softcap / temperature must be 0 or of a size from 1.18e-38 to 3.4e\+38"):
        losses.selective_log_softmax(X, INDEX, temperature=1e-30, softcap=1e30)
    value = losses.clip_loss(SQUARE, normalizer=3e38).item()
    # 1 / 3e38 is subnormal, which the interpreter's conversion to float32 makes 0; without it these tensors take plain PyTorch
    assert value == (0.0 if INTERPRETED else pytest.approx(losses.clip_loss(SQUARE).item() / 3e38, rel=1e-6))


def test_a_long_integer_is_told_by_its_size():
    with pytest.raises(ValueError, match=r"normalizer must be .* got an integer of 16610 bits"):
        losses.l1_loss(X, X, normalizer=10**5000)
    with pytest.raises(ValueError, match=r"ignore_index must be a whole number of 64 bits, got an integer of 1329 bits"):
        losses.cross_entropy(X, INDEX, ignore_index=10**400)

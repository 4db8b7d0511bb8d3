"""What no public function takes, whatever the argument: numbers that float32 does not hold, and tensors that are not strided."""

import inspect
import math

import pytest
import torch

from lossforge import losses
from lossforge.kernels import INTERPRETED
from lossforge.losses import LinearTeacher, TopKTeacher, fuse_linear
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import plain_sample

generator = torch.Generator().manual_seed(0)
X, INDEX = torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 2])
MASK, SQUARE = (X > 0).float(), torch.randn(3, 3, generator=generator)
BOXES, LOGPS = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 4]]), -torch.rand(4, generator=generator)
LABELS = torch.zeros(1, 2, dtype=torch.long)
CALLS = {
    "selective_log_softmax": (X, INDEX),
    "linear_cross_entropy": (X, X, INDEX),
    "linear_selective_log_softmax": (X, X, INDEX),
    "linear_entropy": (X, X),
    "linear_objective": (X, X, INDEX, torch.sum),
    **dict.fromkeys(("linear_kl_div", "linear_js_div", "linear_total_variation", "linear_cosine_distance"), (X, X, SQUARE)),
    "clip_loss": (SQUARE,),
    **dict.fromkeys(("clip_loss_from_features", "siglip_loss_from_features", "info_nce_loss", "nt_xent_loss"), (X, X)),
    **dict.fromkeys(("supervised_contrastive_loss", "multi_similarity_loss", "circle_loss"), (X, INDEX)),
    "proxy_anchor_loss": (X, X, INDEX),
    "gist_embed_loss": (X, X, X, X),
    "sinkhorn_center": (X,),
    "koleo_loss": (X,),
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
    "task_aligned_assign": (torch.rand(1, 4, 5), torch.rand(1, 4, 4), torch.rand(4, 2), LABELS, BOXES[None]),
    "matching_cost": (torch.rand(1, 4, 5), torch.rand(1, 4, 4), LABELS[0], BOXES, torch.tensor([2])),
    "mask_matching_cost": (torch.rand(1, 4, 5), torch.rand(2, 5), torch.tensor([2])),
    "hungarian_assign": (torch.rand(3, 5), torch.tensor([2, 3])),
    "hungarian_match": (torch.rand(2, 3, 3), torch.tensor([2, 3])),
}
for entry in LOSSES.values():
    sample = plain_sample(entry)
    CALLS[entry.function.__name__] = (sample.x, sample.target, *sample.kwargs.values())
EACH = pytest.mark.parametrize("name", CALLS)
FURTHER = {"weight": X, "score": X[:, 0], "target_b": INDEX, "mask": X > 0, "labels": INDEX, "lse": X[:, 0], "bias": X[:, 0]}
"""Tensors that a function may take beside those of its call."""


def parameters(name):
    return inspect.signature(getattr(losses, name)).parameters


def test_every_public_function_is_here():
    taken = [name for name in losses.__all__ if name in DECLARED or name in CALLS]
    assert sorted(taken) == sorted(CALLS)


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


def outcome(name, options):
    """Return the error's message; None where the option is without effect. No other error is caught."""
    try:
        getattr(losses, name)(*CALLS[name], **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def words(annotation):
    return str(annotation).replace("'>", "").replace("<class '", "").replace("|", " ").replace(",", " ").split()


def layouts(t):
    """Return a tensor in every layout that is not strided."""
    yield "layout torch.sparse_coo", t.to_sparse()
    if t.ndim == 2:
        yield "layout torch.sparse_csr", t.to_sparse_csr()
    if t.ndim > 1:
        yield "a nested tensor", torch.nested.nested_tensor(list(t))
        yield "a nested tensor", torch.nested.nested_tensor(list(t), layout=torch.jagged)
    if t.is_floating_point():
        yield "a quantized one of torch.qint8", torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)
    if t.dtype == torch.float32:
        yield "layout torch._mkldnn", t.to_mkldnn()


@EACH
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_layouts(name):
    function, names = getattr(losses, name), list(parameters(name))
    given = dict(zip(names, CALLS[name], strict=False))
    tried = 0
    for argument, t in {**{n: t for n, t in FURTHER.items() if n in names}, **given}.items():
        if not isinstance(t, torch.Tensor) or not t.ndim:
            continue
        for kind, other in layouts(t):
            with pytest.raises(TypeError, match=f"^{argument} must be a strided tensor, got .*{kind}"):
                function(**{**given, argument: other})
            tried += 1
    assert tried


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

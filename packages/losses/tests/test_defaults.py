"""torch's default dtype and default device change nothing: those of results follow from the arguments."""

import contextlib

import pytest
import torch
from linear_calls import FUSED, layer
from loss_calls import gradient_of
from preference_calls import KTO, MASK, OLD, POLICY, REF, A, pairs
from torch.utils._pytree import tree_leaves

from lossforge import losses as L
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import plain_sample, run, samples


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}
DEFAULT = pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)


def assert_same(got, expected, of=None):
    for ours, before in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if ours is None and before is None:  # a result that was not asked for
            continue
        assert (ours.dtype, ours.device) == (before.dtype, before.device), of
        assert torch.equal(ours.nan_to_num(), before.nan_to_num()), of


@pytest.mark.each("template")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_losses(loss, device):
    single, half = plain_sample(loss, device), plain_sample(loss, device, torch.bfloat16)
    small = [(sample, L.plain_torch) for sample in samples(loss, device) if sample.x.numel() < 300]
    for sample, path in ((single, contextlib.nullcontext), (half, L.plain_torch), *small):
        reduction = "mean" if "normalizer" in sample.kwargs or "none" not in loss.reductions else "none"
        with path():
            expected = run(loss.function, sample, reduction=reduction)
            for name, default in DEFAULTS.items():
                with default():
                    got = run(loss.function, sample, reduction=reduction)
                assert_same([got.value, got.gradient], [expected.value, expected.gradient], (sample.name, name))


@DEFAULT
@pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.name)
def test_fused_losses(fused, default, device):
    leaves, targets = layer(7, device), fused.targets(7, device)
    call = lambda x, w, b: fused.ours(x, w, b, *targets, chunk=3)  # noqa: E731
    expected = gradient_of(call, *leaves)
    with default():
        assert_same(gradient_of(call, *leaves), expected)


LOGITS, INDEX, BOXES = torch.randn(2, 3, 4), torch.arange(4), torch.rand(6, 4) + torch.tensor([0.0, 0.0, 1.0, 1.0])
NESTED = BOXES[:4].view(2, 2, 4)
ROTATED = torch.cat([BOXES, BOXES[:, :1]], 1)
PREDICTED = BOXES.view(2, 3, 4), BOXES[:3, :2] + 0.1, torch.ones(3)
LOGPS, PAIRS, KTO_LOGPS = ([t.float() for t in each] for each in ([POLICY, A, OLD, REF], pairs(count=4), KTO))
FEATURES, LABELS = torch.randn(2, 4, 5), torch.tensor([0, 1, 0, 1])
NEAR, PAST = torch.stack([torch.linspace(0.83, 0.87, 41), torch.zeros(41)], 1), torch.zeros(41, dtype=torch.int64)
COUNTS = torch.tensor([3, 5, 4])
CALLS = {
    "box_iou": lambda: L.box_iou(BOXES, BOXES),
    "generalized_box_iou": lambda: L.generalized_box_iou(BOXES, BOXES),
    "distance_box_iou": lambda: L.distance_box_iou(BOXES, BOXES),
    "complete_box_iou": lambda: L.complete_box_iou(BOXES, BOXES),
    "rotated_box_iou": lambda: L.rotated_box_iou(ROTATED, ROTATED),
    "probabilistic_box_iou": lambda: L.probabilistic_box_iou(ROTATED, ROTATED),
    "max_iou_assign": lambda: L.max_iou_assign(BOXES, LABELS.view(2, 2), NESTED),
    "atss_assign": lambda: L.atss_assign(BOXES, [4, 2], LABELS.view(2, 2), NESTED, topk=2),
    "simota_assign": lambda: L.simota_assign(LOGITS.sigmoid(), *PREDICTED, LABELS.view(2, 2), NESTED),
    "rtmdet_assign": lambda: L.rtmdet_assign(LOGITS, *PREDICTED, LABELS.view(2, 2), NESTED),
    "matching_cost": lambda: L.matching_cost(LOGITS, BOXES.view(2, 3, 4), INDEX, BOXES[:4], [1, 3]),
    "mask_matching_cost": lambda: L.mask_matching_cost(LOGITS, LOGITS[:1].sigmoid().expand(4, -1, -1)[:, 0], [1, 3]),
    "hungarian_assign": lambda: L.hungarian_assign(LOGITS.flatten(1).view(6, 4), [1, 3]),
    "hungarian_match": lambda: L.hungarian_match(LOGITS.flatten(1).view(6, 4), [1, 3]),
    "task_aligned_assign": lambda: L.task_aligned_assign(
        LOGITS.sigmoid(), BOXES.view(2, 3, 4), BOXES[:3, :2] + 0.1, LABELS.view(2, 2), NESTED
    ),
    "bradley_terry": lambda: L.bradley_terry_loss(*PAIRS[:2]),
    "dpo": lambda: L.dpo_loss(*PAIRS),
    "cpo": lambda: L.cpo_loss(*PAIRS[:2]),
    "simpo": lambda: L.simpo_loss(*PAIRS[:2]),
    "orpo": lambda: L.orpo_loss(*PAIRS[:2]),
    "kto": lambda: L.kto_loss(*KTO_LOGPS),
    "grpo": lambda: L.grpo_loss(*LOGPS, MASK, beta=0.1),
    "tpo": lambda: L.tpo_loss(*PAIRS[:3]),
    "ppo_value": lambda: L.ppo_value_loss(*LOGPS[2:], LOGPS[0], MASK),
    "sequence_logps": lambda: L.sequence_logps(LOGPS[0], MASK, average_log_prob=True),
    "selective_log_softmax": lambda: L.selective_log_softmax(LOGITS[0], INDEX[:3]),
    "class_balanced_weight": lambda: L.class_balanced_weight(COUNTS),
    "seesaw": lambda: L.seesaw_loss(LOGITS[0], INDEX[:3], INDEX),
    "zlpr": lambda: L.zlpr_loss(LOGITS[0], (LOGITS[1] > 0).float()),
    "two_way": lambda: L.two_way_loss(LOGITS[0], (LOGITS[1] > 0).float()),
    "jsd_cross_entropy": lambda: L.jsd_cross_entropy(LOGITS.view(6, 4), INDEX[:2]),
    "channel_wise": lambda: L.channel_wise_kl_div(LOGITS[:, None], LOGITS.flip(0)[:, None]),
    "dkd": lambda: L.dkd_loss(LOGITS[0], LOGITS[1], INDEX[:3]),
    "dist": lambda: L.dist_loss(LOGITS[0], LOGITS[1]),
    "load_balancing": lambda: L.load_balancing_loss(LOGITS, 2),
    "info_nce": lambda: L.info_nce_loss(*FEATURES),
    "nt_xent": lambda: L.nt_xent_loss(*FEATURES),
    "dino": lambda: L.dino_loss(LOGITS[0], LOGITS[1], center=LOGITS[0, 0]),
    "sinkhorn": lambda: L.sinkhorn_center(LOGITS[0]),
    "koleo": lambda: L.koleo_loss(FEATURES[0]),
    "vicreg": lambda: L.vicreg_loss(*FEATURES),
    "barlow_twins": lambda: L.barlow_twins_loss(*FEATURES),
    "gist_embed": lambda: L.gist_embed_loss(*FEATURES, *FEATURES),
    "multi_similarity": lambda: L.multi_similarity_loss(FEATURES[0], LABELS, epsilon=0.1),
    "circle": lambda: L.circle_loss(FEATURES[0], LABELS),
    "proxy_anchor": lambda: L.proxy_anchor_loss(*FEATURES, LABELS),
    "supervised_contrastive": lambda: L.supervised_contrastive_loss(FEATURES[0], LABELS),
    "clip": lambda: L.clip_loss_from_features(*FEATURES),
    "siglip": lambda: L.siglip_loss_from_features(*FEATURES),
    "ohem": lambda: L.ohem_cross_entropy(NEAR, PAST, threshold=0.7, min_kept=0, reduction="none"),
    "distribution_balanced": lambda: L.distribution_balanced_loss(LOGITS[0], LOGITS[1].sigmoid(), INDEX + 3, 20),
}


@DEFAULT
@pytest.mark.parametrize("name", CALLS)
def test_other_functions(name, default):
    for path in (L.plain_torch, contextlib.nullcontext):
        with path():
            expected = CALLS[name]()
            with default():
                got = CALLS[name]()
        assert_same(got, expected)

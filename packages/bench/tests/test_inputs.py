"""Least traffic, worked out by hand."""

from dataclasses import replace

import pytest
import torch

from lossforge.bench.cases import CASES, FUSED, Case
from lossforge.bench.inputs import least_bytes, make_inputs
from lossforge.bench.record import Inputs
from lossforge.losses import probiou_loss, rotated_iou_loss

CPU = torch.device("cpu")


def case(loss, shape, dtype, inputs, **options):
    return Case("table", loss, "test", shape, dtype, inputs, options=options)


@pytest.mark.parametrize(
    ("case", "forward", "one_launch", "split"),
    [
        # 4 rows of 8 float32 are 128 bytes, 4 int64 targets 32
        (case("ce", (4, 8), "fp32", "classes"), 160, 288, 416),
        # 4 rows of 8 bfloat16 are 64 bytes, and as many for probabilities
        (case("ce", (4, 8), "bf16", "probabilities"), 128, 192, 256),
        # 64 bytes of logits, 32 of targets, 8 bfloat16 class weights
        (case("ce", (4, 8), "bf16", "class weights"), 112, 176, 240),
        (case("ce", (4, 8), "bf16", "pair"), 128, 192, 256),
        # (2, 3, 4, 5) float32: 480 bytes; targets (2, 4, 5) int64: 320
        (case("ce", (2, 3, 4, 5), "fp32", "classes"), 800, 1280, 1760),
        # 2·3·4 bfloat16 are 48 bytes; 6 int64 class indices 48
        (case("focal", (2, 3, 4), "bf16", "anchors"), 96, 144, 192),
        (case("focal", (2, 3, 4), "bf16", "dense"), 96, 144, 192),
        (case("mae", (100,), "fp32", "dense"), 800, 1200, 1600),
        (case("preference_bce", (100,), "bf16", "preference"), 600, 800, 1000),
        # 4 rows of 8 float32 are 128 bytes, and as many for the teacher's; of 2 classes a row 64 bytes of indices, 32 of values
        (case("kl", (4, 8), "fp32", "teacher"), 256, 384, 512),
        (case("topk_kl", (4, 8), "fp32", "top classes"), 224, 352, 480),
        # 64 bytes of logits, 32 of targets, 16 of a prior
        (case("logit_adjusted_ce", (4, 8), "bf16", "class prior"), 112, 176, 240),
        # 5 boxes of 16 bytes, twice; the gradient of the first
        (case("ciou", (5, 4), "fp32", "boxes"), 160, 240, 320),
        # two vectors of 4 numbers a row, 64 bytes each, and 4 labels; no target
        (case("cosine_embedding", (4, 4), "fp32", "signed pairs"), 144, 208, 272),
        (case("load_balancing", (4, 8), "bf16", "router"), 64, 128, 192),
        # 96 bytes of 6 rows, 16 of the targets of the first 2
        (case("jsd", (6, 4), "fp32", "clean and augmented"), 112, 208, 304),
        # 2·3·4·5 float32, 480 bytes; 2·4·5 class indices, 320
        (case("dice", (2, 3, 4, 5), "fp32", "classes"), 800, 1280, 1760),
    ],
    ids=lambda v: v.inputs if isinstance(v, Case) else v,
)
def test_least_bytes(case, forward, one_launch, split):
    inputs = make_inputs(case, CPU)
    assert [least_bytes(case, inputs, mode) for mode in ("forward", "one launch", "split")] == [forward, one_launch, split]


def test_ignored_rows_need_not_be_read():
    inputs = Inputs(torch.randn(4, 8, requires_grad=True), {"target": torch.tensor([1, -100, 2, -100])})
    ignored = case("ce", (4, 8), "fp32", "ignored")
    assert least_bytes(ignored, inputs, "forward") == 64 + 32
    assert least_bytes(ignored, inputs) == 64 + 32 + 128


def test_a_list_of_classes_is_read_up_to_its_end():
    inputs = Inputs(torch.randn(2, 4, requires_grad=True), {"target": torch.tensor([[1, 2, -1, -1], [0, -1, -1, -1]])})
    assert least_bytes(case("multilabel_margin", (2, 4), "fp32", "lists of classes"), inputs, "forward") == 32 + 5 * 8


def test_a_row_of_a_router_has_no_equal_logits():
    x = make_inputs(case("load_balancing", (50, 128), "bf16", "router"), CPU).x
    assert all(len(set(row.tolist())) == 128 for row in x)
    first, last = (x[:, experts].float().mean() for experts in (slice(0, 32), slice(96, None)))
    assert first < last - 1


def test_few_pixels_are_hard_and_none_is_near_the_threshold():
    inputs = make_inputs(case("ohem_ce", (2, 21, 64, 64), "bf16", "easy and hard classes"), CPU)
    p = inputs.x.detach().float().softmax(1).gather(1, inputs.others["target"].unsqueeze(1))
    assert 0.15 < (p < 0.2).float().mean() < 0.25
    assert ((p < 0.2) | (p > 0.75)).all()


def test_what_is_expanded_counts_once():
    inputs = Inputs(torch.randn(4, 8, requires_grad=True), {"target": torch.zeros(1, dtype=torch.int64).expand(4)})
    assert least_bytes(case("ce", (4, 8), "fp32", "classes"), inputs, "forward") == 128 + 8


@pytest.mark.parametrize("case", [c for c in CASES if c.suite not in ("scaling", *FUSED)], ids=lambda c: f"{c.suite} {c.key}")
def test_inputs_are_seeded_and_random(case):
    small = replace(case, shape=tuple(min(n, 12) for n in case.shape))
    one, same, other = (make_inputs(small, CPU, seed) for seed in (3, 3, 4))
    assert torch.equal(one.x, same.x)
    assert all(torch.equal(t, same.others[k]) for k, t in one.others.items())
    assert not torch.equal(one.x, other.x)
    assert one.x.is_leaf
    assert one.x.requires_grad


def test_boxes_are_valid_and_near_each_other():
    inputs = make_inputs(case("giou", (5000, 4), "fp32", "boxes"), CPU)
    predicted, true = inputs.x.detach(), inputs.others["target"]
    for boxes in (predicted, true):
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert (boxes[:, 2:] - boxes[:, :2]).max() < 1333
    overlap = (torch.minimum(predicted[:, 2:], true[:, 2:]) > torch.maximum(predicted[:, :2], true[:, :2])).all(1)
    assert 0.97 < overlap.double().mean() < 1
    assert inputs.x.is_leaf


def test_probabilities_and_log_probabilities():
    x = make_inputs(case("preference_bce_probability", (1000,), "bf16", "preference of probabilities"), CPU).x
    assert 0 < x.min() < 0.1 < 0.9 < x.max() < 1
    top = make_inputs(case("topk_kl", (9, 100), "fp32", "top classes"), CPU).others
    assert top["target"].shape == top["indices"].shape == (9, 25)
    assert all(len(set(row.tolist())) == 25 for row in top["indices"])
    kept = top["target"].exp().sum(1)
    assert (kept > 0.25).all()
    assert (kept < 1).all()


def test_no_rounding_decides_a_sign_of_total_variation():
    inputs = make_inputs(case("total_variation", (64, 32000), "fp32", "distinct teacher"), CPU)
    gap = inputs.x.detach().double().log_softmax(1) - inputs.others["target"].double().log_softmax(1)
    assert gap.abs().min() > 5e-5


def test_rows_keep_class_weights_whole():
    inputs = make_inputs(case("ce", (8, 8), "fp32", "class weights"), CPU)
    part = inputs.rows(2, 5)
    assert torch.equal(part.x, inputs.x[2:5])
    assert torch.equal(part.others["target"], inputs.others["target"][2:5])
    assert torch.equal(part.others["weight"], inputs.others["weight"])
    inputs = make_inputs(case("logit_adjusted_ce", (8, 8), "fp32", "class prior"), CPU)
    assert torch.equal(inputs.rows(2, 5).others["log_prior"], inputs.others["log_prior"])


def test_predictions_of_rotated_boxes_overlap_their_targets():
    """So that no gradient is below float32's smallest number, as e⁻⁸⁷ of a Bhattacharyya distance of 87 is."""
    inputs = make_inputs(case("probiou", (20000, 5), "fp32", "rotated"), CPU)
    boxes, target = inputs.x.detach().double(), inputs.others["target"].double()
    assert probiou_loss(boxes, target, log=True).max() < 20
    assert (rotated_iou_loss(boxes, target) < 1).double().mean() > 0.98

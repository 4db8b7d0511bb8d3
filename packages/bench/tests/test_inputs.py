"""Least traffic, worked out by hand."""

from dataclasses import replace

import pytest
import torch

from lossforge.bench.cases import CASES, Case
from lossforge.bench.inputs import Inputs, least_bytes, make_inputs

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


def test_what_is_expanded_counts_once():
    inputs = Inputs(torch.randn(4, 8, requires_grad=True), {"target": torch.zeros(1, dtype=torch.int64).expand(4)})
    assert least_bytes(case("ce", (4, 8), "fp32", "classes"), inputs, "forward") == 128 + 8


@pytest.mark.parametrize("case", [c for c in CASES if c.suite != "scaling"], ids=lambda c: f"{c.suite} {c.key}")
def test_inputs_are_seeded_and_random(case):
    small = replace(case, shape=tuple(min(n, 12) for n in case.shape))
    one, same, other = (make_inputs(small, CPU, seed) for seed in (3, 3, 4))
    assert torch.equal(one.x, same.x)
    assert all(torch.equal(t, same.others[k]) for k, t in one.others.items())
    assert not torch.equal(one.x, other.x)
    assert one.x.is_leaf
    assert one.x.requires_grad


def test_rows_keep_class_weights_whole():
    inputs = make_inputs(case("ce", (8, 8), "fp32", "class weights"), CPU)
    part = inputs.rows(2, 5)
    assert torch.equal(part.x, inputs.x[2:5])
    assert torch.equal(part.others["target"], inputs.others["target"][2:5])
    assert torch.equal(part.others["weight"], inputs.others["weight"])

"""Sums of log-probabilities over a completion's tokens."""

import math
import re

import pytest
import torch

from lossforge import losses as L

LOGPS = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, -math.inf, -1.0], [-1.0, -1.0, -1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
HALF = torch.full((2, 3, 4), -0.5, dtype=torch.float16)


def test_masked_tokens_leave_sums_and_means_of_sequences():
    assert L.sequence_logps(LOGPS, MASK).tolist() == [-3, -4, 0]
    assert L.sequence_logps(LOGPS, MASK.bool(), average_log_prob=True).tolist() == [-1.5, -2, 0]


def test_the_gradient_of_a_sequences_mean():
    x = LOGPS.clone().requires_grad_()
    L.sequence_logps(x, MASK.bool(), average_log_prob=True).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0, 0]]


def test_sequences_of_any_shape_in_half_precision():
    assert L.sequence_logps(HALF).tolist() == [[-2] * 3] * 2
    assert L.sequence_logps(HALF, average_log_prob=True).tolist() == [[-0.5] * 3] * 2
    assert L.sequence_logps(HALF).dtype == torch.float32


def test_the_mean_of_a_sequence_without_tokens_is_0():
    assert L.sequence_logps(HALF[..., :0], average_log_prob=True).tolist() == [[0] * 3] * 2


def test_shapes_of_sequence_logps():
    with pytest.raises(ValueError, match="per_token_logps must have shape"):
        L.sequence_logps(torch.tensor(-1.0))
    with pytest.raises(ValueError, match=re.escape("mask must have the shape of per_token_logps, (2, 3, 4), got (2, 3)")):
        L.sequence_logps(HALF, torch.ones(2, 3, dtype=torch.bool))


def test_sums_of_weighted_tokens():
    """A mask of floats: Σ mₜ log pₜ, and over Σ mₜ. A weight of 0 leaves out whatever the token holds."""
    x = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, torch.nan, torch.nan]], requires_grad=True)
    weight = torch.tensor([[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]])
    x.data[1, 0] = torch.inf
    assert L.sequence_logps(x, weight).tolist() == [-1.0, 0.0]
    out = L.sequence_logps(x, weight, average_log_prob=True)
    assert out.tolist() == [pytest.approx(-4 / 3), 0.0]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [[pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0], [0.0, 0.0, 0.0]]

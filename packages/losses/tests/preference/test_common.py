"""Sums of log-probabilities over a completion's tokens."""

import math
import re

import pytest
import torch

from lossforge import losses as L


def test_sequence_logps():
    x = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, -math.inf, -1.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert L.sequence_logps(x, mask).tolist() == [-3, -4, 0]
    mean = L.sequence_logps(x, mask.bool(), average_log_prob=True)
    assert mean.tolist() == [-1.5, -2, 0]
    mean.sum().backward()
    assert x.grad.tolist() == [[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0, 0]]
    y = torch.full((2, 3, 4), -0.5, dtype=torch.float16)
    assert L.sequence_logps(y).tolist() == [[-2] * 3] * 2
    assert L.sequence_logps(y, average_log_prob=True).tolist() == [[-0.5] * 3] * 2
    assert L.sequence_logps(y).dtype == torch.float32
    assert L.sequence_logps(y[..., :0], average_log_prob=True).tolist() == [[0] * 3] * 2
    with pytest.raises(ValueError, match="per_token_logps must have shape"):
        L.sequence_logps(torch.tensor(-1.0))
    with pytest.raises(ValueError, match=re.escape("mask must have the shape of per_token_logps, (2, 3, 4), got (2, 3)")):
        L.sequence_logps(y, torch.ones(2, 3, dtype=torch.bool))

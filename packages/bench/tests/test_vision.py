"""The measurement of masks, self-supervised losses, routers and crowds: each contender finds what plain torch finds in float64."""

import pytest
import torch

from lossforge.bench import problems
from lossforge.bench.problems import vision


@pytest.mark.slow
def test_rows_on_a_small_machine():
    device = torch.device("cpu")
    found = list(problems.rows(vision.problems(device), device, 1.0, compiled=False))
    assert not [row for row in found if "error" in row]
    assert {row["problem"].split()[0] for row in found} == {
        *("binary_cross_entropy_with_logits", "sigmoid_focal_loss", "zlpr_loss", "dice_loss", "load_balancing_loss"),
        *("gram_anchoring_loss", "vicreg_loss", "barlow_twins_loss", "koleo_loss", "hungarian_match", "task_aligned_assign"),
    }
    for row in found:
        assert row["ms"] > 0
        if "errors" in row:
            assert max(row["errors"]) < (3e-2 if "bf16" in row["problem"] else 1e-5)
        elif row["contender"] != "torchvision's Matcher":  # other rules, for its time alone
            assert row["agrees"] == 1

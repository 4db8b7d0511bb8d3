"""The measurement of assignments: each contender finds what plain torch finds, and each problem gives its rows."""

import pytest
import torch

from lossforge.bench import assign


@pytest.mark.slow
def test_rows_on_a_small_machine():
    found = list(assign.rows(torch.device("cpu"), 1.0, compiled=False))
    assert not [row for row in found if "error" in row]
    names = {row["problem"].split()[0] for row in found}
    assert names == {"task_aligned_assign", "matching_cost", "mask_matching_cost", "hungarian_match", "box_iou", "generalized_box_iou"}
    for row in found:
        assert row["ms"] > 0
        if row["contender"] == "torchvision's Matcher":  # other rules, for its time alone
            assert "agrees" not in row
        elif row["problem"].startswith(("task", "hungarian")):
            assert row["agrees"] == 1
        else:
            assert row["agrees"] < 1e-5

"""The measurement of assignments: each contender finds what plain torch finds, and each problem gives its rows."""

import pytest
import torch

from lossforge.bench import problems
from lossforge.bench.problems import assign


@pytest.mark.slow
def test_rows_on_a_small_machine():
    device = torch.device("cpu")
    found = list(problems.rows(assign.problems(device), device, 1.0, compiled=False))
    assert not [row for row in found if "error" in row]
    names = {row["problem"].split()[0] for row in found}
    assigned = {"task_aligned_assign", "max_iou_assign", "atss_assign", "simota_assign", "rtmdet_assign", "hungarian_match"}
    assert names == assigned | {"matching_cost", "mask_matching_cost", "box_iou", "generalized_box_iou", "rotated_box_iou"}
    for row in found:
        assert row["ms"] > 0
        if row["contender"] == "torchvision's Matcher":  # other rules, for its time alone
            assert "agrees" not in row
        elif row["problem"].split()[0] in assigned:
            assert row["agrees"] == 1
        else:
            assert row["agrees"] < 1e-5

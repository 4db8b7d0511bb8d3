"""The measurement of masks, distances and DETR's criterion: each contender finds what the first one finds."""

import pytest
import torch

from lossforge.bench import problems
from lossforge.bench.problems import Problem, masks

CPU = torch.device("cpu")


@pytest.mark.slow
def test_rows_on_a_small_machine():
    found = list(problems.rows(masks.problems(CPU), CPU, 1.0, compiled=False))
    assert not [row for row in found if "error" in row]
    assert {row["problem"].split()[0] for row in found} == {
        *("point_mask_loss", "prototype_mask_loss", "sample_uncertain_points", "distance_transform"),
        *("hausdorff_loss", "sinkhorn_center", "DetrCriterion"),
    }
    for row in found:
        assert row["ms"] > 0
        if row["problem"].split()[0] in ("sample_uncertain_points", "distance_transform", "sinkhorn_center"):
            assert row["agrees"] < (3e-2 if "bf16" in row["problem"] else 1e-5)
        else:
            assert max(row["errors"]) < (3e-2 if "bf16" in row["problem"] else 1e-5)


def test_a_wrong_result_and_a_missing_library_get_no_time():
    def missing(x):
        raise ModuleNotFoundError("no such library")

    x = torch.randn(8)
    calls = {"torch": lambda x: x.square().sum(), "wrong": lambda x: 1.01 * x.square().sum(), "library": missing}
    right, wrong, absent = problems.rows([lambda: Problem("squares 8", calls, leaves=(x,))], CPU, 1.0)
    assert right["ms"] > 0
    assert max(right["errors"]) < 1e-6
    for row, said in ((wrong, "ArithmeticError: off by"), (absent, "ModuleNotFoundError: no such library")):
        assert row["error"].startswith(said)
        assert "ms" not in row

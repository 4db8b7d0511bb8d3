"""Names and filters of the cases."""

import math
import subprocess
import sys

import pytest

from lossforge.bench.cases import CASES, CONTENDERS, CPU_ELEMENTS, FUSED, RECORDS, UnknownNameError, matching, select


def test_no_two_cases_have_one_name():
    names = [(case.suite, case.key) for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({"suite": ["small"]}, 4),
        ({"loss": ["focal"], "suite": ["table"], "dtype": ["bf16"]}, 2),
        ({"shape": ["8192x32000"], "suite": ["table", "variants"]}, 7),
        ({"shape": ["retinanet*"], "suite": ["table"]}, 4),
        ({"loss": ["*bce"], "dtype": ["fp32"]}, 4),
        ({"shape": ["timm-head*"], "suite": ["table"]}, 3),
    ],
)
def test_filters(filters, count):
    chosen = select(**filters)
    assert len(chosen) == count
    assert chosen == [case for case in CASES if case in chosen]


@pytest.mark.parametrize(
    "filters", [{"loss": ["focl"]}, {"dtype": ["fp16"]}, {"shape": ["8192x3200"]}, {"suite": ["tables"]}, {"loss": ["ce", "x*"]}]
)
def test_a_filter_that_fits_nothing_names_the_choices(filters):
    with pytest.raises(UnknownNameError) as caught:
        select(**filters)
    (name,) = filters
    assert caught.value.what == name
    assert len(caught.value.choices) >= 2


def test_filters_that_leave_nothing_together_name_the_cases():
    with pytest.raises(UnknownNameError, match="mae"):
        select(suite=["table"], loss=["mae"], shape=["8192x32000"])


def test_matching_takes_names_and_globs():
    assert matching("contenders", ["lossforge*", "torch"], CONTENDERS) == {
        *(name for name in CONTENDERS if name.startswith("lossforge")),
        "torch",
    }
    assert matching("contenders", [], CONTENDERS) == set(CONTENDERS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_a_cut_case_keeps_its_classes(case):
    cut = case.cut(CPU_ELEMENTS)
    assert math.prod(cut.shape) <= max(CPU_ELEMENTS, case.shape[1] if len(case.shape) > 1 else 1)
    assert math.prod(cut.shape) > CPU_ELEMENTS // 8 or cut.shape == case.shape
    if (case.loss in ("ce", "lovasz_softmax") or RECORDS[case.loss].template == "overlap") and case.suite not in FUSED:
        assert cut.shape[1] == case.shape[1]
    elif len(case.shape) > 1:
        assert cut.shape[-1] == case.shape[-1]


def test_every_measured_loss_is_ours_and_its_uses_have_names():
    from lossforge.bench.report.tables import USES

    for record in RECORDS.values():
        assert callable(record.plain if record.fused is None or record.eager else record.layer.plain)
        assert record.cases[0].suite in FUSED or callable(record.public)
        assert any(case.suite in FUSED for case in record.cases) == (record.fused is not None)
    assert {case.use for case in CASES if case.suite in ("losses", "linear", "features")} <= set(USES)


def test_cases_are_read_without_torch():
    """A typo is answered before torch is imported."""
    code = "import sys, lossforge.bench.cases; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

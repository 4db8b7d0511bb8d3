"""The checks themselves: every loss of the registry passes them, with the hyper-parameters that its kernels get."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from lossforge.kernels.math import hold
from lossforge.losses import boxes, elementwise
from lossforge.losses.check import check, template
from lossforge.losses.check.__main__ import main
from lossforge.losses.check.ahead import check_ahead
from lossforge.losses.check.formula import ENDS, check_formula, formula_hyper
from lossforge.losses.check.pytorch import check_pytorch
from lossforge.losses.check.report import Report
from lossforge.losses.check.template import check_edges
from lossforge.losses.formulas import FORMULAS, DeviceFormula, Formula
from lossforge.losses.registry import LOSSES


@pytest.mark.each("template")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_every_loss_passes(loss, device, all_cases):
    """All of `check` but the kernels' values, which test_values.py compares for every loss.

    PyTorch's mechanisms with --all alone: test_operators.py tries them by default, for every loss.
    """
    report = Report(loss.name)
    if loss.template.variables and loss.has_kernel:
        check_formula(loss, report, 0)
        of_formula = 5 if loss.template.name in ("rowwise", "rotated") else 6  # the latter without infinite numbers
        assert len(report.findings) == of_formula, str(report)
    if loss.template.by_rows:
        check_edges(loss, report, device)
    if all_cases:
        check_pytorch(loss, report, device)
    assert report.passed, str(report)
    skipped = {finding.name for finding in report.findings if finding.passed is None}
    assert skipped == ({"CUDA graph, no host synchronisation"} if all_cases and device != "cuda" else set())


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("bce", [(1.0,)]),
        ("bce_smoothed", [(0.9, 0.1 / 2, -torch.inf, 1.0)]),  # 1 - ε, ε / 2 for dense targets, no threshold, pos_weight
        ("focal", [(2.0, 0.25), (0.5, 0.25)]),  # γ, α, where the function takes α first
        ("asymmetric", [(4.0, 1.0, 0.05, 1.0), (4.0, 1.0, 0.0, 1.0)]),
        ("ce", [()]),
        ("asymmetric_single_label", [(1.0, 4.0, 0.91, 0.01)]),  # γ₊, γ₋, 1 - ε + ε / C, ε / C
        ("giou", [(1e-7,)]),
    ],
)
def test_formula_gets_what_the_loss_hands_it(name, hyper):
    found = formula_hyper(LOSSES[name])[: len(hyper)]
    assert len(found) == len(hyper)
    for got, expected in zip(found, hyper, strict=True):
        assert got == pytest.approx(expected)


@elementwise(hyper={"delta": 1.0})
@triton.jit
def powers_and_tanh(x, y, delta):
    d = x - y
    return d**2 * delta**3 + tl.tanh(d) ** 4


@triton.jit
def bits_of_a_float(x, y):
    d = x - y
    return d * d, d & 1


@elementwise(domain="probabilities", hyper={"gamma": 2.0})
@triton.jit
def nan_at_the_end(p, y, gamma):
    q = tl.maximum(p, 1e-30)
    power = tl.exp(gamma * tl.log(q))
    return power * y, gamma * power / p * y


@elementwise
@triton.jit
def reference_nan_at_a_tie(x, y):
    d = tl.abs(x - y)
    return tl.where(d > 0, d * d * tl.log(d), 0.0)


@pytest.mark.parametrize(
    ("loss", "name", "detail"),
    [
        (nan_at_the_end, f"gradient against differences, {ENDS}", r"at p=0, y=0, gamma=2: value .*, gradient nan, differences"),
        (reference_nan_at_a_tie, "reference against the formula", r"at x=.*: the reference's gradient is nan, the formula's 0"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_ends_of_the_domain_are_tried(loss, name, detail):
    report = Report(loss.__name__)
    check_formula(loss.loss, report, 0)
    (finding,) = report.failures
    assert finding.name == name
    assert re.search(detail, finding.detail), finding


def bounded_by_its_limit(x, y):
    return 1 - 1 / (1 + (x - y).square())


@elementwise(reference=bounded_by_its_limit)
@triton.jit
def bounded(x, y):
    s = (x - y) * (x - y)
    return s / (1.0 + s)


def test_a_reference_that_differs_at_infinity_is_named():
    """Of the registry: a custom loss takes its reference from the formula, where it does not say otherwise."""
    report, custom = Report("bounded"), Report(bounded.loss.name)
    check_formula(replace(bounded.loss, name="bounded"), report, 0)
    check_formula(bounded.loss, custom, 0)
    (finding,) = report.failures
    assert finding.name == "reference against the formula, inf and nan"
    assert finding.detail == "at x=inf, y=0: the reference's value is 1, the formula's nan"
    assert custom.passed, str(custom)


@boxes
@triton.jit
def held_weight(x1, y1, x2, y2, u1, v1, u2, v2):
    weight = hold(1.0 / (1.0 + (x2 - x1) * (y2 - y1)))
    return weight * (tl.abs(x1 - u1) + tl.abs(y1 - v1) + tl.abs(x2 - u2) + tl.abs(y2 - v2))


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    FORMULAS["of bits"] = Formula(lambda x, y: (x - y).square(), DeviceFormula(bits_of_a_float))  # elementwise() refuses it
    for loss, passed, detail in (
        (powers_and_tanh.loss, True, ""),
        (held_weight.loss, True, ""),
        (replace(powers_and_tanh.loss, formula="of bits"), False, r"d & 1.*invalid operands"),
    ):
        report = Report(loss.name)
        check_ahead(loss, report)
        (finding,) = report.findings
        assert finding.passed is passed, finding
        assert re.search(detail, finding.detail), finding


def shell(*words):
    done = subprocess.run([sys.executable, "-m", "lossforge.losses.check", *words], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_check_in_the_shell(tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import triton\nimport triton.language as tl\nfrom lossforge.losses import elementwise\n\n"
        "@elementwise\n@triton.jit\ndef wrong(x, y):\n    return (x - y) * (x - y), x - y\n"
    )
    status, output = shell(f"{file}:wrong")
    assert status == 1, output
    assert re.search(r"FAIL  gradient against differences, random +at x=.*, y=.*: value .*, gradient .*, differences", output)
    assert "skip  kernels, edges, PyTorch" in output, "one cause, one finding"
    assert " 1 failed" in output
    for words, message in (
        ((f"{file}:absent",), "absent in .* does not exist; losses there: wrong"),
        (("nowhere.py:loss",), "no file nowhere.py\\.\n$"),
        ((f"{file}",), "a loss is named .*path/to/file.py:name.*got '.*mine.py'\\.\n$"),
        (("focall",), "a loss is named .*Did you mean focal\\?\n"),
        (("zzz",), "a loss is named .*In the registry: mae"),
    ):
        monkeypatch.setattr(sys, "argv", ["check", *words])
        assert main() == 2
        assert re.search(message, output := capsys.readouterr().err), output


def test_lines_are_shown_as_parts_end():
    """Each before the next part begins; together they are what the report prints."""
    lines = []
    report = check("mse", quick=True, show=lines.append)
    assert report.passed, str(report)
    assert "\n".join([*lines, "", report.counts]) == str(report)
    assert "float32" in {f.name for f in report.findings}
    assert not {"bfloat16", "torch.library.opcheck"} & {f.name for f in report.findings}


def test_a_kernel_that_is_off_is_one_finding(monkeypatch):
    """float16 and PyTorch's mechanisms would say the same of a launch that is wrong."""
    exact = template.run

    def off(function, *args, **kwargs):
        found = exact(function, *args, **kwargs)
        return replace(found, value=found.value + 1) if function is LOSSES["mse"].function else found

    monkeypatch.setattr(template, "run", off)
    report = check("mse")
    assert [f.name for f in report.failures] == ["float32"]
    assert report.findings[-1].passed is None
    assert "mend 'float32' first" in report.findings[-1].detail


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cross_entropy", ": did you mean ce?\n"),
        ("zlpr_loss", ", which has no such name. In the registry: mae,"),
    ],
)
def test_name_of_a_function(name, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check", name])
    assert main() == 2
    assert capsys.readouterr().err.startswith(f"{name}: check takes names of the registry{said}")


def test_name_of_the_registry_in_the_shell(all_cases):
    if not all_cases:
        pytest.skip("a minute's work, with --all; test_check_in_the_shell runs it for a loss of one's own")
    status, output = shell("bce")
    assert status == 0, output
    assert re.search(r"Check of bce .*\n\nformula, in float64\n  ok    gradient against differences, random", output)
    assert re.search(r"ok    bfloat16 .* calls, gradients off by", output)
    assert " 0 failed" in output

"""The measurement of fused losses goes on when a contender brings its process down."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import measure_linear

from lossforge.bench.report import load


@pytest.fixture
def small(monkeypatch):
    """Three cases of a few tokens, and contenders that a CPU has."""
    cases = [replace(case, shape=(8, 8, 16)) for case in measure_linear.FUSED_CASES[3:6]]
    monkeypatch.setattr(measure_linear, "FUSED_CASES", cases)
    monkeypatch.setattr(measure_linear, "CONTENDERS", ["lossforge", "torch"])
    monkeypatch.setattr(measure_linear, "MILLISECONDS", {"linear": 1.0})
    return cases


def test_a_file_is_continued(small, monkeypatch, tmp_path):
    file, cpu = tmp_path / "linear.json", torch.device("cpu")
    monkeypatch.setattr(measure_linear, "FUSED_CASES", small[:1])
    measure_linear.measure(file, "abc", [], cpu)
    monkeypatch.setattr(measure_linear, "FUSED_CASES", small)
    measure_linear.measure(file, "abc", ["torch"], cpu)
    report = load(file)
    assert [(row.variant, row.contender, row.status) for row in report.rows] == [
        (small[0].variant, "lossforge", "ok"),
        (small[0].variant, "torch", "ok"),
        (small[1].variant, "lossforge", "ok"),
        (small[2].variant, "lossforge", "ok"),
    ]
    assert report.settings["left_out"] == ["torch"]


def test_a_case_without_a_reference_does_not_stop_the_others(small, monkeypatch, tmp_path):
    found = measure_linear.measure_case

    def fail(case, *rest):
        if case == small[0]:
            raise RuntimeError("out of memory")
        return found(case, *rest)

    monkeypatch.setattr(measure_linear, "measure_case", fail)
    measure_linear.measure(tmp_path / "linear.json", "abc", [], torch.device("cpu"))
    rows = load(tmp_path / "linear.json").rows
    assert [row.status for row in rows] == ["failed: RuntimeError: out of memory"] + ["ok"] * 4


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_contender_that_brings_its_process_down_is_left_out(how, monkeypatch, tmp_path):
    """The process writes who is measured, then dies or sleeps, unless that contender is left out."""
    file, started = tmp_path / "linear.json", []
    end = {"dies": "raise SystemExit(7)", "stalls": "import time; time.sleep(60)"}[how]

    def start(word, file, commit, *left_out):
        started.append(left_out)
        code = "pass" if left_out else f"open({str(measure_linear.now(file))!r}, 'w').write('quack'); {end}"
        return subprocess.Popen([sys.executable, "-c", code])

    monkeypatch.setattr(measure_linear, "start", start)
    monkeypatch.setattr(measure_linear, "STALLED_SECONDS", 1.0)
    assert measure_linear.measure_all(file, "abc") == 0
    assert started == [(), ("quack",)]


def test_a_process_that_fails_on_its_own_ends_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(measure_linear, "start", lambda *words: subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]))
    assert measure_linear.measure_all(tmp_path / "linear.json", "abc") == 1

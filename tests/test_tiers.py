"""The default tier, --ci and --all.

None leaves out what --all does not run. By default each loss or template has a case of each promise. With --ci each loss has one in each
dtype, but of what launches promise each template.
"""

import gc
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import has_inplace

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]

EVERY_LOSS = {
    "values and gradients in every dtype": "test_values.py::test_against_float64",
    "gradients of the reference": "test_values.py::test_reference_gradients",
    "gradients of the other arguments": "test_values.py::test_other_arguments_get_gradients",
    "double backward": "test_values.py::test_double_backward",
    "export": "test_operators.py::test_export",
    "forward mode": "test_operators.py::test_forward_mode",
    "modules": "base/test_module.py::test_every_option_of_every_module",
    "no host synchronisation": "test_gpu.py::test_no_host_synchronisation",
    "CUDA graphs": "test_gpu.py::test_cuda_graph",
}
EVERY_LOSS_BY_ROWS = {
    "all rows ignored": "test_edges.py::test_all_ignored",
    "an ignored row of nan": "test_edges.py::test_ignored_row_of_nan",
    "mistakes": "test_checks.py::test_every_loss_by_rows",
    "no recompilation": "test_gpu.py::test_no_recompilation",
}
TEMPLATES = {loss.template.name for loss in LOSSES.values()}
IN_PLACE = {loss.template.name for loss in LOSSES.values() if has_inplace(loss)}
EVERY_TEMPLATE = {
    "the same bits run after run": ("test_values.py::test_repeated_runs_are_bitwise_equal", TEMPLATES),
    "inputs are not written": ("test_values.py::test_inputs_are_not_written", TEMPLATES),
    "a retained graph": ("test_values.py::test_retained_graph", TEMPLATES),
    "a second backward": ("test_values.py::test_second_backward_has_the_same_bits", TEMPLATES),
    "lazy views": ("test_lazy_views.py::test_gives_what_its_values_give", TEMPLATES),
    "lazy views, in place": ("test_lazy_views.py::test_inplace", TEMPLATES),
    "operators": ("test_operators.py::test_opcheck", {loss.template.name for loss in LOSSES.values() if loss.has_kernel}),
    "torch.compile": ("test_operators.py::test_compile_without_graph_breaks", TEMPLATES),
    "torch.func": ("test_operators.py::test_torch_func", TEMPLATES),
    "fake tensors": ("test_operators.py::test_fake_tensors", TEMPLATES),
    "autocast": ("test_operators.py::test_autocast_takes_half_precision_logits", TEMPLATES),
    "in place": ("test_values.py::test_inplace", IN_PLACE),
    "in place, compiled": ("test_operators.py::test_compile_inplace", IN_PLACE),
}
BY_ROWS = {loss.template.name for loss in LOSSES.values() if loss.template.by_rows}
EVERY_TEMPLATE |= {
    "an index out of range": ("test_edges.py::test_index_out_of_range_raises_with_value_and_row", BY_ROWS),
    "an index out of range, unchecked": ("test_edges.py::test_index_out_of_range_unchecked_is_nan_in_its_row_alone", BY_ROWS),
    "one graph for any number of rows": ("test_operators.py::test_compile_does_not_recompile", BY_ROWS),
    "an index out of range, compiled": ("test_operators.py::test_compile_refuses_an_index_out_of_range", BY_ROWS),
}


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The cases of the libraries' tests that each tier takes and leaves out."""
    path = tmp_path_factory.mktemp("tiers") / "cases.json"
    command = [sys.executable, "-m", "pytest", "packages", "--collect-only", "-q", "-p", "collected_cases"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "COLLECTED_CASES": str(path), "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(path.read_text(encoding="utf-8"))


def by_test(cases: list[dict[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """The values of each parameter of each test."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for case in cases:
        test = found[case["test"]]
        for name, value in case["values"].items():
            test[name].add(value)
    return found


def in_dtypes(cases: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return each test of losses in dtypes, with each loss and dtype that it has."""
    of_losses = [case for case in cases if {"loss", "dtype"} <= case["values"].keys()]
    return {(case["test"], case["values"]["loss"], case["values"]["dtype"]) for case in of_losses}


@pytest.mark.slow
def test_each_case_is_in_a_tier_once(tiers):
    default, whole = tiers["default"], tiers["all"]
    assert not whole["left out"]
    ids = {tier: [case["id"] for case in cases] for tier, cases in (("all", whole["taken"]), *default.items())}
    assert sorted(ids["taken"] + ids["left out"]) == sorted(ids["all"])
    assert len(set(ids["all"])) == len(ids["all"])
    assert len(ids["taken"]) < len(ids["all"])


@pytest.mark.slow
def test_the_default_tier_has_each_value_of_each_parameter_but_of_slow_cases(tiers):
    default = tiers["default"]
    assert not any(case["slow"] for case in default["taken"])
    every = by_test([case for case in (*default["taken"], *default["left out"]) if not case["slow"]])
    assert by_test(default["taken"]) == every


@pytest.fixture(scope="module")
def taken(tiers):
    """Return the values of each parameter of each test that the default tier takes."""
    return by_test(tiers["default"]["taken"])


@pytest.mark.slow
def test_the_default_tier_has_each_promise_for_every_loss_or_template(taken):
    by_rows = {name for name, loss in LOSSES.items() if loss.template.by_rows}
    for promises, losses in ((EVERY_LOSS, set(LOSSES)), (EVERY_LOSS_BY_ROWS, by_rows)):
        for promise, test in promises.items():
            assert taken[f"losses/tests/{test}"]["loss"] == losses, promise
    for promise, (test, templates) in EVERY_TEMPLATE.items():
        found = taken[f"losses/tests/{test}"]
        assert (found["template"] or {LOSSES[name].template.name for name in found["loss"]}) == templates, promise
    assert "kernels/tests/test_ahead_of_time.py::test_every_variant_compiles" in taken  # asserts itself that each kernel is


@pytest.mark.slow
def test_the_default_tier_has_each_loss_in_each_of_its_dtypes(tiers):
    default = tiers["default"]
    assert in_dtypes(default["taken"]) == in_dtypes([*default["taken"], *default["left out"]])


@pytest.mark.slow
def test_a_change_is_tested_with_each_loss_in_each_dtype(tiers):
    """What .ci/run runs of the libraries: each value of each parameter of a test. Where the default tier has templates it has the losses,
    but for what a launch promises whichever its formula."""
    cases = tiers["ci"]
    every, taken = by_test([*cases["taken"], *cases["left out"]]), by_test(cases["taken"])
    assert taken == every
    assert in_dtypes(cases["taken"]) == in_dtypes([*cases["taken"], *cases["left out"]])
    assert taken["losses/tests/test_operators.py::test_compile_without_graph_breaks"]["loss"] == set(LOSSES)
    assert taken["losses/tests/test_values.py::test_retained_graph"]["template"] == TEMPLATES


SUITE = """
import pytest

@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("size", [[1], [2], [3]], ids=["1", "2", "3"])
@pytest.mark.parametrize("loss", ["ce", "focal", "kl", "mae"])
def test_many(loss, size, mode):
    assert "PYTEST_XDIST_WORKER" in __import__("os").environ or loss

def test_one():
    pass
"""


TORCH = """
from types import SimpleNamespace

cuda = SimpleNamespace(is_available=lambda: False, is_initialized=lambda: False)

def set_num_threads(count):
    pass
"""
"""What conftest.py asks of torch, which takes longer to import than a suite to run."""


@pytest.fixture
def suite(pytester, monkeypatch):
    """A small one under this project's conftest.py, without torch and the plugins that other libraries bring along."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "2")
    pytester.makeini("[pytest]\naddopts = --strict-config -p no:hypothesispytest -p no:hydra_pytest -p no:anyio")
    (pytester.path / "torch.py").write_text(TORCH, encoding="utf-8")
    for name in ("conftest.py", "quick_interpreter.py"):
        shutil.copy(ROOT / name, pytester.path)
    folder = pytester.mkdir("packages")
    (folder / "test_suite.py").write_text(SUITE, encoding="utf-8")
    return pytester


def test_a_folder_is_thinned_and_spread_over_processes(suite):
    done = suite.runpytest_subprocess("packages")
    assert done.ret == 0
    lines = done.stdout.str()
    assert "2 workers" in lines
    passed, left_out = done.parseoutcomes()["passed"], 25 - done.parseoutcomes()["passed"]
    assert 5 <= passed <= 7  # each of four losses, three sizes and two modes, and the test without parameters
    assert f"{left_out} more cases run with --all." in lines


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["packages", "--all"], 25),
        (["packages/test_suite.py"], 25),
        (["packages", "-k", "focal"], 6),
        (["packages/test_suite.py::test_many[kl-2-forward]", "packages/test_suite.py::test_many[kl-2-backward]"], 2),
        (["packages/test_suite.py::test_many"], 24),
    ],
    ids=str,
)
def test_what_is_named_runs_whole(suite, words, passed):
    done = suite.runpytest_subprocess(*words)
    assert done.ret == 0
    assert done.parseoutcomes() == {"passed": passed}
    assert ("2 workers" in done.stdout.str()) == all("::" not in word for word in words)


INTERPRETER = """
import pytest
from triton.runtime import interpreter

@pytest.mark.parametrize("case", range(40))
def test_interpreter(case):
    print("launched by", interpreter._patch_lang.__module__)
"""


def test_a_tenth_runs_in_the_interpreter_as_it_is(suite):
    """Ten nights run every case, each once."""
    (suite.path / "packages" / "test_interpreter.py").write_text(INTERPRETER, encoding="utf-8")
    file = "packages/test_interpreter.py"
    quick = suite.runpytest_subprocess("-s", file).stdout.str()
    assert quick.count("launched by quick_interpreter") == 40
    seen = []
    for night in (3, 13, 4):
        done = suite.runpytest_subprocess("-s", "-v", file, "--tenth", str(night)).stdout.str()
        cases = set(re.findall(r"test_interpreter\[(\d+)\]", done))
        assert done.count("launched by triton.runtime.interpreter") == len(cases) > 0
        seen.append(cases)
    assert seen[0] == seen[1]
    assert not seen[0] & seen[2]


def test_without_xdist_and_whatever_failed_before(suite):
    """A case that only --all runs and that failed comes again with --lf."""

    def taken(*words: str) -> set[str]:
        lines = suite.runpytest_subprocess("-p", "no:xdist", "packages", "-v", *words).stdout.lines
        return {line.split()[0] for line in lines if "::" in line and line.split()[1] in ("PASSED", "FAILED")}

    whole, default = taken("--all"), taken()
    assert default < whole
    assert taken() == default
    left_out = sorted(whole - default)[0]
    file = suite.path / "packages" / "test_suite.py"
    name = left_out.partition("[")[2].rstrip("]")
    loss, size, mode = name.split("-")
    file.write_text(SUITE.replace("or loss", f"or (loss, size, mode) != ({loss!r}, [{size}], {mode!r})"), encoding="utf-8")
    taken("--all")
    assert taken("--lf") == {left_out}


def test_bytecode_is_kept_where_python_writes_none(suite, monkeypatch):
    """In pytest's cache, and nowhere else: what the environment has is asked of a folder that is empty."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(suite.path / "empty"))
    (suite.path / "torch.py").unlink()
    assert suite.runpytest_subprocess("packages/test_suite.py::test_one").ret == 0
    kept = {file.relative_to(suite.path).parts[:2] for file in suite.path.rglob("torch/**/*.pyc")}
    assert kept == {(".pytest_cache", "bytecode")}


@pytest.fixture
def shared(request):
    """The project's conftest.py as pytest has loaded it."""
    return next(each for each in request.config.pluginmanager.get_plugins() if getattr(each, "__file__", "") == str(ROOT / "conftest.py"))


def hold(turn, wanted, meeting, times):
    meeting.wait()
    with turn(wanted):
        began = time.monotonic()
        time.sleep(0.2)
        times.put((began, time.monotonic()))


@pytest.mark.parametrize("large", [True, False])
def test_one_process_at_a_time_runs_a_large_test(shared, large):
    context = multiprocessing.get_context("fork")
    meeting, times = context.Barrier(3), context.Queue()
    processes = [context.Process(target=hold, args=(shared.turn, large, meeting, times), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    found = sorted(times.get(timeout=600) for _ in processes)
    for process in processes:
        process.join(60)
    together = [began < ended for (_, ended), (began, _) in itertools.pairwise(found)]
    assert together == [not large] * 2


def test_large_tests_are_marked():
    """All that make a tensor of 2³⁰ elements or more on the device."""
    unmarked = []
    for path in (ROOT / "packages").glob("*/tests/**/test_*.py"):
        for text in path.read_text(encoding="utf-8").split("\n\n\n"):
            if re.search(r"(empty|rand|randn|zeros|ones|full)\(.*2\*\*3\d.*device=", text) and "@pytest.mark.large" not in text:
                unmarked.append(f"{path.name}: {text[:200]}")
    assert unmarked == []


def fails(size):
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    error = ValueError(f"kept {held.shape}")  # its traceback refers to this frame, and the frame to it
    raise error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_a_test_held_of_the_gpu_is_given_back(shared):
    torch.ones(1, device="cuda")
    shared.free_gpu()
    before = torch.cuda.memory_reserved()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="kept"):
            fails(4 * shared.KEPT)
        assert torch.cuda.memory_allocated() >= 4 * shared.KEPT
        shared.free_gpu()
    finally:
        gc.enable()
    assert torch.cuda.memory_reserved() <= before + shared.KEPT

"""The measurement of the bench's cases: shares are joined, and go on when a contender breaks its process."""

import multiprocessing
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import compared
import measure
import measure_losses
import pytest
import torch
from measure_losses import Share
from measuring import Request

from lossforge.bench.cases import CASES
from lossforge.bench.report import load


@pytest.fixture
def small(monkeypatch):
    """Three fused cases of a few tokens and three others, and contenders that a CPU has."""
    fused = [replace(case, shape=(8, 8, 16)) for case in CASES if case.suite == "linear"][7:10]
    others = [case.cut(64) for case in CASES if case.suite == "table"][:3]
    monkeypatch.setattr(measure_losses, "CASES", [*others, *fused])
    monkeypatch.setattr(measure_losses, "CONTENDERS", ["lossforge", "torch"])
    monkeypatch.setattr(measure_losses, "FUSED_MILLISECONDS", {"linear": 1.0})
    monkeypatch.setattr(measure_losses, "MILLISECONDS", 1.0)
    return SimpleNamespace(fused=fused, others=others)


@pytest.fixture
def share(tmp_path):
    return Share(tmp_path / "linear-0.json", "abc", measure_losses.FUSED)


def test_a_file_is_continued(small, share, monkeypatch):
    monkeypatch.setattr(measure_losses, "CASES", small.fused[:1])
    measure_losses.measure(share, [], "cpu")
    monkeypatch.setattr(measure_losses, "CASES", small.fused)
    measure_losses.measure(share, ["torch"], "cpu")
    report = load(share.file)
    assert [(row.variant, row.contender, row.status) for row in report.rows] == [
        (small.fused[0].variant, "lossforge", "ok"),
        (small.fused[0].variant, "torch", "ok"),
        (small.fused[1].variant, "lossforge", "ok"),
        (small.fused[1].variant, "torch", "failed: brought its process down"),
        (small.fused[2].variant, "lossforge", "ok"),
        (small.fused[2].variant, "torch", "failed: brought its process down"),
    ]


def test_losses_are_measured_alone(capsys, tmp_path):
    names = {case.loss for case in measure_losses.chosen(measure_losses.LARGE, ("zlpr", "seesaw"))}
    assert names == {"zlpr", "seesaw"}
    assert measure_losses.chosen(("small",), ("zlpr",)) == []
    assert measure_losses.losses(Request(tmp_path / "new.json", "abc", losses=("zlpr", "seasaw"))) == 2
    assert "--losses seasaw: no case of this name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_case_without_a_reference_does_not_stop_the_others(small, share, monkeypatch):
    found = measure_losses.measure_case

    def fail(case, *rest):
        if case == small.fused[0]:
            raise RuntimeError("out of memory")
        return found(case, *rest)

    monkeypatch.setattr(measure_losses, "measure_case", fail)
    measure_losses.measure(share, [], "cpu")
    assert [row.status for row in load(share.file).rows] == ["failed: RuntimeError: out of memory"] + ["ok"] * 4


def test_shares_are_joined_in_the_order_of_the_cases(small, monkeypatch, tmp_path):
    """Two GPUs share three cases; then one measures those of another suite."""
    names, turn = [], threading.Lock()

    def start(work, share, left_out, where):
        with turn:  # Triton's interpreter runs in one thread
            names.append(where)
            work(share, left_out, "cpu")
        return SimpleNamespace(exitcode=0)

    monkeypatch.setattr(measure_losses, "start", start)
    monkeypatch.setattr(measure_losses, "CASES", [replace(small.others[0], suite="small", loss="ce"), *small.others[1:]])
    request = Request(tmp_path / "bench.json", "abc")
    parts = tmp_path / "parts"
    large = [Share(parts / f"{number}.json", "abc", ("table",), (), (), number, 2) for number in range(2)]
    assert measure_losses.measure_all(request, [large, [Share(parts / "small.json", "abc", ("small",))]]) == 0
    assert sorted(names) == ["cuda:0", "cuda:0", "cuda:1"]
    rows = load(request.out).rows
    assert [(row.suite, row.label) for row in rows if row.contender == "torch"] == [(c.suite, c.key) for c in measure_losses.CASES]
    assert {row.status for row in rows} == {"ok"}


def test_every_contender_is_called_before_the_measurement(small, monkeypatch):
    """Each part of the work once, and what fails does not stop the rest."""
    called = []

    def call(case, name, device):
        call_once(case, name, torch.device("cpu"))
        called.append((case, name))
        raise RuntimeError("as on a machine without a GPU")

    call_once = measure_losses.call_once
    monkeypatch.setattr(measure_losses, "call_once", call)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for number in range(3):
        measure_losses.compile_part(measure_losses.chosen(("table", "linear"), ()), number, 3, 0)
    assert len(called) == len(set(map(str, called))) == 12


def dies(place):
    place.write_text("quack")
    os._exit(7)


def stalls(place):
    place.write_text("quack")
    time.sleep(60)


def process(work, *arguments):
    made = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    made.start()
    return made


@pytest.mark.parametrize("work", [dies, stalls])
def test_a_contender_that_breaks_its_process_is_left_out(work, share, monkeypatch):
    """The process writes who is measured, then dies or sleeps, unless that contender is left out."""
    started = []

    def start(measure, share, left_out, where):
        started.append([*left_out])
        return process(print) if left_out else process(work, share.now())

    monkeypatch.setattr(measure_losses, "start", start)
    monkeypatch.setattr(measure_losses, "STALLED_SECONDS", 1.0)
    assert measure_losses.measure_share(share) == 0
    assert started == [[], ["quack"]]


def test_a_process_that_fails_before_a_contender_ends_the_run(share, monkeypatch):
    monkeypatch.setattr(measure_losses, "start", lambda *arguments: process(os._exit, 1))
    assert measure_losses.measure_share(share) == 1


def test_a_process_is_started(tmp_path):
    process = measure_losses.start(os.mkdir, tmp_path / "made")
    assert measure_losses.wait(process, tmp_path / "now") == 0
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("name", measure.MEASUREMENTS)
def test_every_measurement_has_its_function_and_its_options(name, monkeypatch, tmp_path):
    """The command line reaches the function of this name with a request."""
    module, result, options, gpus = measure.MEASUREMENTS[name]
    asked = []
    monkeypatch.setattr(f"{module}.{name}", lambda request: asked.append(request) or 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert measure.main([name]) == 0
    assert measure.main([name, "--out", str(tmp_path / "x.json"), "--commit", "abc", *(["--small"] if "--small" in options else [])]) == 0
    assert asked[0].out == measure.ROOT / "results" / result
    assert asked[0].out.stem in compared.READERS | compared.NO_CASES
    assert asked[1] == Request(tmp_path / "x.json", "abc", "--small" in options)


def test_a_gpu_that_is_missing_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert measure.main(["several_gpus"]) == 1
    assert "several_gpus needs 2 CUDA GPUs; torch sees 1" in capsys.readouterr().err

"""experiments/bench.py: a run on CPU from filters to the store, and mistakes that stop it at once."""

import json
import subprocess
import sys

import pytest

SMALL = ["suite=small", "shape=64x10,256x1000", "milliseconds=2", "device=cpu"]


def bench(clone, *words, **env):
    clone.script = "experiments/bench.py"
    return clone.run(*words, fresh=True, TRITON_INTERPRET="0", **env)  # as for someone without a GPU


@pytest.fixture(scope="module")
def ran(new_clone):
    clone = new_clone()
    done = bench(clone, *SMALL, "out=figures.json", "commit=3319e81", "contenders=lossforge,torch,timm,liger")
    assert done.status == 0, done.output
    clone.output = done.output
    return clone


def test_it_says_what_a_machine_without_a_gpu_cannot_measure_and_reports_the_rest(ran):
    assert "No CUDA GPU: wall-clock times of the plain-torch path" in ran.output
    assert "Not measured: the kernels, time on the device" in ran.output
    assert "1/3 · ce 256x1000 fp32 · ms: lossforge " in ran.output
    from lossforge.bench.report import load

    report = load(ran.path / "figures.json")
    (folder,) = ran.run_folders()
    assert load(folder / "report.json") == report
    assert report.commit == "3319e81"  # which also reads as a number
    assert report.gpu == "none"
    assert report.copy_bytes_per_second is None
    assert report.settings["milliseconds"] == 2
    assert [(r.label, r.contender) for r in report.rows] == [
        ("ce 256x1000 fp32", "lossforge"),
        ("ce 256x1000 fp32", "torch"),
        ("ce 256x1000 fp32", "liger"),
        ("ce label smoothing 256x1000 fp32", "lossforge"),
        ("ce label smoothing 256x1000 fp32", "torch"),
        ("ce label smoothing 256x1000 fp32", "timm"),
        ("ce label smoothing 256x1000 fp32", "liger"),
        ("ce 64x10 fp32", "lossforge"),
        ("ce 64x10 fp32", "torch"),
        ("ce 64x10 fp32", "liger"),
    ]
    measured = [r for r in report.rows if r.contender != "liger"]
    assert all(r.status == "ok" and r.ms > 0 and r.idle_ms > 0 and r.gradient_error < 1e-5 for r in measured)
    assert {r.status for r in report.rows if r.contender == "liger"} <= {"needs a CUDA GPU", "not installed"}


def test_what_was_measured_outlives_a_kill(new_clone):
    from lossforge.bench.report import load

    clone = new_clone()
    clone.script = "experiments/bench.py"
    process = clone.start(*SMALL, "out=figures.json", "contenders=lossforge", "tracking=none", fresh=True, TRITON_INTERPRET="0")
    assert any("1/3" in line for line in process.stdout)
    process.kill()
    process.wait()
    assert load(clone.path / "figures.json").rows[0].status == "ok"


def test_store_holds_the_run(ran):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{ran.path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("lossforge").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "bench-measure"
    report = json.loads((ran.path / "figures.json").read_text())
    first = report["rows"][0]
    assert run.data.metrics["ce 256x1000 fp32/lossforge/ms"] == pytest.approx(first["ms"])
    assert run.data.params["suite"] == "['small']"
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"config.yaml", "metrics.jsonl", "report.json"}


def test_a_report_compares_with_itself(ran):
    command = [sys.executable, "-m", "lossforge.bench.compare", "figures.json", "figures.json"]
    done = subprocess.run(command, cwd=ran.path, env=ran.env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "0 changed, 0 in one only, 0 regressions (3319e81 → 3319e81)" in done.stdout


MISTAKES = [
    (["loss=focl"], ["focl", "'focal'", "preference_bce"]),
    (["shape=8192x3200"], ["8192x3200", "'8192x32000'"]),
    (["dtype=fp16"], ["fp16", "bf16, fp32"]),
    (["contenders=lossforge,triton"], ["triton", "torch.compile"]),
    (["loss=mae", "shape=8192x32000"], ["no case has all of it", "loss=mae, shape=8192x32000"]),
    (["mode=profil"], ["'profile'", "measure"]),
    (["milliseconds=0"], ["milliseconds", "above 0"]),
    (["--hlep"], ["--hlep", "'--help'"]),
]


@pytest.fixture(scope="module")
def answers(answers_without_torch):
    return answers_without_torch("bench", [words for words, _ in MISTAKES])


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda value: " ".join(value))
def test_mistake(answers, words, said):
    status, output, written = answers[tuple(words)]
    assert status == 1, output
    assert "Traceback" not in output
    assert [text for text in said if text not in output] == [], output
    assert written == []


def test_a_profile_without_a_gpu_is_refused(clone):
    before = clone.contents()
    done = bench(clone, "mode=profile", "device=cpu")
    assert (done.status, "needs a CUDA GPU" in done.output, clone.contents() == before) == (1, True, True), done.output


def test_help_answers_at_once(clone, without_torch):
    done = bench(clone, "--help", **without_torch)
    assert done.status == 0, done.output
    for text in ("retinanet-800x1344", "torch.compile", "8192x128256", "suite=scaling", "mode=profile"):
        assert text in done.output

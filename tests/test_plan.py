"""What a sweep's words mean, checked before anything starts."""

import importlib.util
import os
import signal

import pytest
import yaml

from lab.base.errors import UserError
from lab.config.settings import load
from lab.run.folder import RunFolder
from lab.sweep.job import Attempt
from lab.sweep.launch import launcher_name, make_launcher, visible_gpus
from lab.sweep.plan import plan_of, runs_of
from lab.sweep.stop import Stop


def test_jobs_are_every_combination_and_named_by_what_varies():
    plan = plan_of(["loss=ce,focal", "model=tiny_resnet", "optim.lr=1e-3,0.01", "seed=range(1,3)", "name=try"])
    assert len(plan.jobs) == 8
    first = plan.jobs[0]
    assert first.name == "try-ce-lr0.001-seed1"
    assert first.varied == {"loss": "ce", "optim.lr": "0.001", "seed": "1"}
    assert sorted(first.overrides) == ["loss=ce", "model=tiny_resnet", "name=try", "optim.lr=0.001", "seed=1"]
    assert [first.tree["loss"]["name"], first.tree["optim"]["lr"], first.tree["seed"]] == ["ce", 0.001, 1]
    assert [(job.varied["optim.lr"], job.varied["seed"]) for job in plan.jobs[:4]] == [
        ("0.001", "1"),
        ("0.001", "2"),
        ("0.01", "1"),
        ("0.01", "2"),
    ]


def test_jobs_of_one_name_are_told_apart():
    names = [job.name for job in plan_of(["model=timm", "model.name=a/b,a.b,a@b"]).jobs]
    assert names[1] == "namea.b"
    assert len(set(names)) == 3
    assert [job.name for job in plan_of(["model.name=a@b,a.b,a/b", "model=timm"]).jobs] == names[::-1]


def test_names_are_the_same_in_any_order():
    one, other = (plan_of(words).jobs for words in (["seed=0,1", "loss=ce,focal"], ["loss=focal,ce", "seed=1,0"]))
    assert {job.name for job in one} == {job.name for job in other} == {"ce-seed0", "ce-seed1", "focal-seed0", "focal-seed1"}


@pytest.mark.parametrize(
    "words",
    [
        ["seed=1,0", "loss=focal,ce", "model=resnet18"],
        ["model=resnet18", "loss=ce,focal", "seed=range(0,2)"],
        ["loss=ce,focal", "seed=0,1", "model=resnet18", "tracking=none"],
        ["loss=ce,focal", "seed=0,1", "model=resnet18", "tracking.uri=http://localhost:5000"],
        ["loss=ce,focal", "seed=0,1", "model=resnet18", "hydra/launcher=joblib", "hydra.launcher.n_jobs=4"],
    ],
)
def test_the_same_jobs_are_the_same_sweep(words, tmp_path):
    same = plan_of(["loss=ce,focal", "model=resnet18", "seed=0,1", f"trainer.runs={tmp_path}"]).folder
    assert plan_of([*words, f"trainer.runs={tmp_path}"]).folder == same
    assert same.parent == tmp_path


def test_other_jobs_are_another_sweep():
    words = ["loss=ce,focal", "seed=0,1"]
    others = [["loss=ce,focal", "seed=0,2"], [*words, "model=resnet18"], [*words, "tracking.experiment=mine"], [words[0], "search=optuna"]]
    folders = {plan_of(each).folder.name for each in [words, *others]}
    assert len(folders) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss=ce,focl"], "Did you mean 'focal'"),
        (["seed=0,0"], "are the same run"),
        (["seed=0,1", "resume=auto"], "resumes its interrupted runs by itself"),
        (["seed=0,1", "hydra.run.dir=x"], "hydra.launcher.<setting>="),
        (["optim.lr=interval(1e-4,1e-2)"], "search=optuna"),
        (["loss=glob(*)"], "cannot be listed"),
        (["seed=0,1", "search.trials=3"], "trials"),
        (["search=optuna", "optim.lr=1e-3"], "give settings to choose"),
        (["search=optuna", "seed=0,1"], "the best seed says nothing"),
        (["search=optuna", "optim.lr=interval(1e-2,1e-4)"], "first number must be below"),
        (["search=optuna", "optim.lr=tag(log,interval(0,1))"], "lies above 0"),
        (["search=optuna", "optim.lr=interval(-1,1e-2)"], "above 0"),
        (["search=optuna", "data.batch_size=interval(16,64)"], "an integer"),
    ],
)
def test_mistakes_stop_a_sweep_before_it_starts(words, said):
    with pytest.raises(UserError) as caught:
        plan_of(words)
    assert said in str(caught.value)


def test_an_integer_interval_is_one():
    (axis,) = plan_of(["search=optuna", "data.batch_size=int(interval(16,64))"]).axes
    assert axis.interval == (16, 64)
    assert isinstance(axis.interval[0], int)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["hydra/launcher=jobli"], "uv sync --extra sweeps"), (["hydra.launcher.jobs=2"], "jobs")],
)
def test_launchers_that_are_not_there(words, said, tmp_path):
    with pytest.raises(UserError) as caught:
        make_launcher(words, tmp_path)
    assert said in str(caught.value)
    assert launcher_name(words) in ("jobli", "basic")


@pytest.mark.skipif(not importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher"), reason="needs uv sync --extra sweeps")
@pytest.mark.parametrize(("gpus", "words", "jobs"), [("2,5", [], 2), ("2,5", ["hydra.launcher.n_jobs=4"], 4), ("", [], -1)])
def test_joblib_runs_a_job_a_gpu_unless_told_otherwise(monkeypatch, tmp_path, gpus, words, jobs):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert make_launcher(["hydra/launcher=joblib", *words], tmp_path).joblib["n_jobs"] == jobs


def test_gpus_are_those_that_the_environment_shows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_parallel_jobs_take_gpus_in_turn(tmp_path):
    def slot(*words):
        return Attempt(tmp_path, "job", load(words), [], "job")._slot(["2", "5"])

    slots = [slot() for _ in range(3)]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in slots] == ["2", "5", "2"]
    slots[1][0].close()  # that job has ended
    assert slot()[1]["CUDA_VISIBLE_DEVICES"] == "5"
    assert slot("trainer.device=cpu") == (None, {})


def test_a_job_is_finished_only_by_a_run_of_its_settings(tmp_path):
    words = ["name=seed1", f"trainer.runs={tmp_path}"]
    tree = load([*words, "seed=1"]).tree()
    for status in ("FAILED", "FINISHED"):
        folder = RunFolder(tmp_path, "seed1", tree)
        folder.record("start", app="train", name="seed1", params={}, tags={"monitor": "top1"})
        folder.summary({"best_top1": 0.75, "seconds": 12.0})
        folder.close(status)
    found = runs_of(tmp_path, "seed1", load([*words, "seed=1", "tracking=none"]).tree())
    assert [(run.status, run.monitor, run.score, run.last["seconds"]) for run in found] == [
        ("FAILED", "top1", 0.75, 12.0),
        ("FINISHED", "top1", 0.75, 12.0),
    ]
    assert runs_of(tmp_path, "seed1", load([*words, "seed=1", "optim.lr=0.5"]).tree()) == []
    assert yaml.safe_load((found[0].path / "config.yaml").read_text())["seed"] == 1


def test_the_wish_to_stop_grows(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("lab.sweep.stop.PAUSE", 0.0)
    stop = Stop(tmp_path)
    stop.file.write_text("stop")  # of an earlier sweep
    asked = []
    with stop.by_signals():
        asked.append(stop.requested)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
            asked.append(stop.requested)
    assert asked == ["", "stop", "kill", "leave", "leave"]
    assert signal.getsignal(signal.SIGTERM) == before

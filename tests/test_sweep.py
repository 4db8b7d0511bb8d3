"""Sweeps from the command line: a parent and its children, failures, interruptions, launchers, searches."""

import csv
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from lab.base.records import read_history

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = all(importlib.util.find_spec(f"hydra_plugins.{name}") for name in ("hydra_joblib_launcher", "hydra_submitit_launcher"))
JOB = [
    *("model=tiny_resnet", "trainer.device=cpu", "trainer.max_updates=4", "trainer.log_every=1", "data.image_size=16"),
    "tracking.model=false",
]

# beside a loss: what goes wrong with the run of a seed, as files of this folder say
TROUBLE = """
import os, pathlib, signal, time
from lab.training.trainer import Trainer
here = pathlib.Path(__file__).parent
update = Trainer.update
def troubled(self, group):
    seed = self.config.seed
    if (here / f"raise-{seed}").exists():
        raise ValueError("the disk is on fire")
    while self.done == 2 and (here / "hold").exists() and not self.stop.wanted:
        (here / f"held-{seed}").touch()
        time.sleep(0.05)
    return update(self, group)
Trainer.update = troubled
if (here / "kill").exists():
    (here / "kill").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def trouble(clone):
    """A folder of files that make runs fail, and the words of a run that looks there."""
    folder = clone.path / "trouble"
    folder.mkdir()
    (folder / "loss.py").write_text((ROOT / "examples" / "my_loss.py").read_text() + TROUBLE)
    clone.env |= {"OMP_NUM_THREADS": "1", "WARM_EXECUTABLE": clone.warm.python()}  # jobs are forks, too
    clone.job = [*JOB, "loss=custom", f"loss.target={folder}/loss.py:margin_bce"]
    return folder


def results(sweep: Path) -> dict[str, dict[str, str]]:
    with (sweep / "results.csv").open() as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def the_sweep(clone) -> Path:
    (sweep,) = (path for path in clone.run_folders() if (path / "sweep.yaml").exists())
    return sweep


def runs(sweep: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for config in sorted(sweep.glob("*/config.yaml")):
        found.setdefault(yaml.safe_load(config.read_text())["name"], []).append(config.parent)
    return found


def stored(uri: str, sweep: Path):
    """The sweep's run in MLflow, and its children by name."""
    client = MlflowClient(tracking_uri=uri)
    every = {run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("lossforge").experiment_id])}
    parent = every.pop(sweep.name)
    assert {run.data.tags["mlflow.parentRunId"] for run in every.values()} == {parent.info.run_id}
    return parent, every


def until(condition, process) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_one_job_fails_one_is_killed_and_the_same_words_go_on(clone, trouble):
    (trouble / "raise-1").touch()
    (trouble / "kill").touch()  # the run that comes first, before it has a folder
    done = clone.run("-m", *clone.job, "seed=2,0,1", timeout=900)
    assert done.status == 1, done.output
    assert "ValueError: the disk is on fire" in done.output
    sweep = the_sweep(clone)
    first = results(sweep)
    assert {name: row["status"] for name, row in first.items()} == {"seed2": "KILLED", "seed0": "FINISHED", "seed1": "FAILED"}
    assert first["seed1"]["error"] == "ValueError: the disk is on fire"
    assert first["seed2"]["error"] == "killed by signal 9"
    assert 0 <= float(first["seed0"]["best"]) <= 1
    assert first["seed0"]["metric"] == "top1"

    uri = f"sqlite:///{clone.path / 'mlflow.db'}"
    parent, children = stored(uri, sweep)
    assert parent.info.status == "FAILED"
    assert {name: run.info.status for name, run in children.items()} == {"seed2": "KILLED", "seed0": "FINISHED", "seed1": "FAILED"}
    assert parent.data.params["seed"] == "2,0,1"
    assert parent.data.tags["sweep.best"] == "seed0"
    assert parent.data.tags["sweep.best_run"] == children["seed0"].info.run_id
    assert [parent.data.metrics[f"sweep_{name}"] for name in ("finished", "failed", "killed", "jobs")] == [1, 1, 1, 3]
    assert children["seed1"].data.tags["error"] == "ValueError: the disk is on fire"
    trace = MlflowClient(tracking_uri=uri).download_artifacts(children["seed1"].info.run_id, "error.txt", str(trouble))
    assert "in troubled" in Path(trace).read_text()

    (trouble / "raise-1").unlink()
    again = clone.run("-m", "seed=1,2,0", *clone.job, timeout=900)
    assert again.status == 0, again.output
    assert "1 of 3 jobs finished before" in again.output
    assert "seed2: continues" not in again.output  # it had not begun
    assert the_sweep(clone) == sweep
    last = results(sweep)
    assert {row["status"] for row in last.values()} == {"FINISHED"}
    assert last["seed0"] == first["seed0"]
    assert all(row["metric"] == "top1" and row["best"] for row in last.values()), "each has its score"
    assert {name: len(each) for name, each in runs(sweep).items()} == {"seed2": 2, "seed0": 1, "seed1": 2}
    parent, children = stored(uri, sweep)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["sweep_finished"] == 3
    assert "3 finished" in parent.data.tags["sweep.counts"]
    client = MlflowClient(tracking_uri=uri)
    view = json.loads(client.get_experiment(parent.info.experiment_id).tags[f"mlflow.sharedViewState.{sweep.name}"])
    found = client.search_runs([parent.info.experiment_id], view["searchFilter"], order_by=[f"{view['orderByKey']} DESC"])
    scores = [run.data.metrics["best_top1"] for run in found[:3]]
    assert scores == sorted(scores, reverse=True)
    assert {run.info.run_name for run in found} == {"seed0", "seed1", "seed2"}, "runs of the jobs, and not the sweep's own"
    assert all("best_top1" not in run.data.metrics for run in found[3:]), "those that failed are the last"
    note = parent.data.tags["mlflow.note.content"]
    address = f"#/experiments/{parent.info.experiment_id}/runs?viewStateShareKey={sweep.name}&workflowType=machine_learning"
    assert note.startswith(f"Best: {parent.data.tags['sweep.best']}, top1 **{scores[0]:.3g}**; [all runs with their figures]({address})")
    assert f"| {parent.data.params['seed'][0]} | finished | " in note
    assert f"{address}\n" in again.output
    assert again.output.rstrip().endswith(f"uv run experiments/compare.py sweep={sweep.name}")


@pytest.mark.slow
@pytest.mark.skipif(not LAUNCHERS, reason="needs uv sync --extra sweeps")
def test_ctrl_c_stops_parallel_jobs_which_another_launcher_continues(clone, trouble):
    (trouble / "hold").touch()
    words = [*clone.job, "seed=0,1", "tracking=none"]
    process = subprocess.Popen(
        [sys.executable, clone.script, "-m", *words, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        cwd=clone.path, env=clone.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    until(lambda: all((trouble / f"held-{seed}").exists() for seed in (0, 1)), process)
    second = clone.run("-m", *words)
    assert second.status == 1
    assert "another process works in this folder" in second.output
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: joblib's workers get it as well
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    sweep = the_sweep(clone)
    stopped = runs(sweep)
    for name in ("seed0", "seed1"):
        (folder,) = stopped[name]
        assert read_history(folder).status == "KILLED"
        assert (folder / "checkpoints" / "last.pt").is_file()
        assert "loss by" in (sweep / "logs" / f"{name}.log").read_text()
    assert {row["status"] for row in results(sweep).values()} == {"KILLED"}
    assert read_history(sweep).status == "KILLED"

    (trouble / "hold").unlink()
    done = clone.run("-m", *words, "hydra/launcher=submitit_local", timeout=900)
    assert done.status == 0, done.output
    assert runs(sweep) == stopped
    assert {row["status"] for row in results(sweep).values()} == {"FINISHED"}
    for name in ("seed0", "seed1"):
        kinds = [json.loads(line)["kind"] for line in (stopped[name][0] / "metrics.jsonl").read_text().splitlines()]
        assert kinds.count("resume") == 1
    assert list((sweep / ".submitit").iterdir())

    # what a store did not see it is told later: the sweep's run first, then its children under it
    uri = f"sqlite:///{clone.path / 'later.db'}"
    sent = subprocess.run(
        [clone.warm.python(), "experiments/sync.py", str(sweep), f"tracking.uri={uri}"],
        cwd=clone.path, env=clone.env, capture_output=True, text=True,
    )  # fmt: skip
    assert sent.returncode == 0, sent.stdout + sent.stderr
    parent, children = stored(uri, sweep)
    assert parent.info.status == "FINISHED"
    assert {name: run.info.status for name, run in children.items()} == {"seed0": "FINISHED", "seed1": "FINISHED"}


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    "launcher", ["basic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("joblib", "submitit_local") if LAUNCHERS)]
)
def test_jobs_end_with_a_checkpoint_when_the_sweep_is_killed(clone, trouble, launcher):
    import psutil

    (trouble / "hold").touch()
    parallel = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    words = [*clone.job, "seed=0,1", "tracking=none", f"hydra/launcher={launcher}", *parallel]
    process = subprocess.Popen(
        [sys.executable, clone.script, "-m", *words],
        cwd=clone.path, env=clone.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    seeds = (0,) if launcher == "basic" else (0, 1)
    deadline = time.monotonic() + 600
    while not all((trouble / f"held-{seed}").exists() for seed in seeds):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    below = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    assert len(below) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 600
    while not all(ended(pid) for pid in below):
        assert time.monotonic() < deadline, [pid for pid in below if not ended(pid)]
        time.sleep(0.1)
    found = runs(the_sweep(clone))
    assert len(found) == len(seeds)
    for (folder,) in found.values():
        assert read_history(folder).status == "KILLED"
        assert (folder / "checkpoints" / "last.pt").is_file()


def test_optuna_goes_on_where_it_ended(clone):
    pytest.importorskip("optuna", reason="needs uv sync --extra sweeps")
    clone.env |= {"OMP_NUM_THREADS": "1", "WARM_EXECUTABLE": clone.warm.python()}
    words = [*JOB, "tracking=none", "search=optuna", "optim.lr=tag(log,interval(1e-4,1e-2))", "data.batch_size=choice(32,64)"]
    done = clone.run("-m", *words, "search.trials=1", timeout=900)
    assert done.status == 0, done.output
    again = clone.run("-m", *words, "search.trials=2", timeout=900)
    assert again.status == 0, again.output
    sweep = the_sweep(clone)
    table = results(sweep)
    assert {name: row["status"] for name, row in table.items()} == {"trial-000": "FINISHED", "trial-001": "FINISHED"}
    with sqlite3.connect(sweep / "optuna.db") as database:
        values = [value for (value,) in database.execute("select value from trial_values order by trial_id")]
    assert values == [float(row["best"]) for row in table.values()]
    for name, folders in runs(sweep).items():
        config = yaml.safe_load((folders[0] / "config.yaml").read_text())
        assert 1e-4 <= config["optim"]["lr"] <= 1e-2
        assert config["optim"]["lr"] == float(table[name]["optim.lr"])
        assert config["data"]["batch_size"] == int(table[name]["data.batch_size"])
    assert len({row["optim.lr"] for row in table.values()}) == 2

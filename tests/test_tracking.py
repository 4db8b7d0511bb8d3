"""The store is fed beside the training: several runs at once, failing stores, later replays."""

import json
import sqlite3
import subprocess
import sys
import time

from mlflow.tracking import MlflowClient

SHORT = ["model=tiny_resnet", "trainer.device=cpu", "trainer.max_updates=6", "loss.implementation=torch", "data.image_size=16"]


def test_two_runs_started_at_once_on_a_store_that_does_not_exist(clone):
    runs = [clone.start(*SHORT, f"seed={seed}") for seed in (0, 1)]
    outputs = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert all("incomplete" not in output for output in outputs), outputs
    assert len(clone.run_folders()) == 2
    client = MlflowClient(tracking_uri=f"sqlite:///{clone.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lossforge")
    stored = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.params["seed"] for run in stored) == ["0", "1"]
    assert all(run.info.status == "FINISHED" and "val/top1" in run.data.metrics for run in stored)


def test_a_store_that_cannot_be_used_stops_no_training_and_is_reported(clone):
    (clone.path / "broken.db").write_text("this is no database" * 100)
    done = clone.run(*SHORT, f"tracking.uri=sqlite:///{clone.path}/broken.db", "tracking.patience_seconds=3")
    assert done.status == 0, done.output
    assert "incomplete" in done.output
    (folder,) = clone.run_folders()
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["status"] == "FINISHED"


def test_what_was_missed_is_sent_later(clone):
    done = clone.run(*SHORT, "tracking=none")
    assert done.status == 0, done.output
    assert not (clone.path / "mlflow.db").exists()
    (folder,) = clone.run_folders()
    uri = f"sqlite:///{clone.path / 'later.db'}"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "metr')  # a line that was being written when the machine went down
    began = time.monotonic()
    for _ in range(2):  # the second one finds everything sent
        words = [str(folder), f"tracking.uri={uri}", "tracking.experiment=later"]
        sent = subprocess.run(
            [sys.executable, "experiments/replay.py", *words], cwd=clone.path, env=clone.env, capture_output=True, text=True
        )
        assert (sent.returncode, "is complete" in sent.stdout) == (0, True), sent.stdout + sent.stderr
    assert time.monotonic() - began < 2 * 60  # tracking.patience_seconds: nothing is waited for that will not come
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("later")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert "val/top1" in run.data.metrics
    with sqlite3.connect(clone.path / "later.db") as database:
        assert database.execute("select count(*) from runs").fetchone() == (1,)


def test_the_environments_tracking_uri_is_used(clone):
    place = clone.path / "elsewhere" / "mine.db"
    done = clone.run(*SHORT, MLFLOW_TRACKING_URI=f"sqlite:///{place}")
    assert done.status == 0, done.output
    assert place.exists()
    assert not (clone.path / "mlflow.db").exists()

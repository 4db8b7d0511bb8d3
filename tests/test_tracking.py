"""The store is fed beside the training: several runs at once, failing stores, later replays."""

import contextlib
import inspect
import json
import shlex
import sqlite3
import subprocess
from pathlib import Path

import pytest
import sqlalchemy
from mlflow.store.db import utils
from mlflow.tracking import MlflowClient
from mlflow_tables import copy_tables

from lab.run.active import in_lines

SHORT = ["model=tiny_resnet", "trainer.device=cpu", "trainer.max_updates=6", "loss.implementation=torch", "data.image_size=16"]


def test_a_copied_store_is_equal_to_a_migrated_one(tmp_path, monkeypatch):
    """The copy is of the migrated store itself: MLflow's migrations make indices in an order of their own each time."""
    monkeypatch.setattr(utils, "_initialize_tables", inspect.unwrap(utils._initialize_tables))
    copy_tables()  # afresh, so that the first store is migrated
    dumps = []
    for name in ("migrated", "copied"):
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/{name}.db")
        utils._initialize_tables(engine)
        engine.dispose()
        with contextlib.closing(sqlite3.connect(tmp_path / f"{name}.db")) as store:
            dumps.append(list(store.iterdump()))
    assert dumps[0] == dumps[1]
    assert any(line.startswith("CREATE TABLE") for line in dumps[0])


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 1], ids=["a store that does not exist", "a store with a run"])
def test_two_runs_started_at_once_on_one_store_are_complete_there_and_on_disk(clone, before):
    assert all(clone.run(*SHORT, "seed=7", "name=before").status == 0 for _ in range(before))
    runs = [clone.start(*SHORT, f"seed={seed}", "trainer.log_every=1") for seed in (0, 1)]
    outputs = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert all("incomplete" not in output for output in outputs), outputs
    folders = [folder for folder in clone.run_folders() if not folder.name.endswith("before")]
    assert len(folders) == 2
    client = MlflowClient(tracking_uri=f"sqlite:///{clone.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lossforge")
    stored = [run for run in client.search_runs([experiment.experiment_id]) if run.info.run_name != "before"]
    assert sorted(run.data.params["seed"] for run in stored) == ["0", "1"]
    assert all(run.info.status == "FINISHED" and "val/top1" in run.data.metrics for run in stored)
    by_id = {run.info.run_id: run for run in stored}
    for folder in folders:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert records[-1] == records[-1] | {"kind": "end", "status": "FINISHED"}
        assert all((folder / "checkpoints" / name).is_file() for name in ("best.pt", "best.safetensors", "best.pt2", "last.pt"))
        of = json.loads((folder / "tracking.json").read_text())
        assert by_id[of["run_id"]].data.params["seed"] == records[0]["params"]["seed"]
        assert of["offset"] == (folder / "metrics.jsonl").stat().st_size
        written = {
            (name, record["step"]): float(value)
            for record in records
            if record["kind"] == "metrics"
            for name, value in record["values"].items()
        }
        kept = {(name, point.step): point.value for name, _ in written for point in client.get_metric_history(of["run_id"], name)}
        assert {place: kept.get(place) for place in written} == pytest.approx(written, nan_ok=True)
        sent = {each.path for each in client.list_artifacts(of["run_id"])}
        assert {record["folder"] or Path(record["path"]).name for record in records if record["kind"] == "artifact"} <= sent


def test_a_store_that_cannot_be_used_stops_no_training_and_is_reported(clone):
    (clone.path / "broken.db").write_text("this is no database" * 100)
    done = clone.run(*SHORT, f"tracking.uri=sqlite:///{clone.path}/broken.db", "tracking.patience_seconds=3", "tracking.model=false")
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
    for _ in range(2):  # the second one finds everything sent; neither waits for what will not come
        words = [str(folder), f"tracking.uri={uri}", "tracking.experiment=later", "tracking.patience_seconds=3600"]
        sent = clone.warm.run("experiments/sync.py", words, clone.path, apart=True)
        assert (sent.returncode, "complete, run " in sent.stdout) == (0, True), sent.stdout + sent.stderr
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("later")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert "val/top1" in run.data.metrics
    assert [each.tags[0].value for each in run.inputs.dataset_inputs] == ["training", "validation"]
    (output,) = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert {metric.key: metric.value for metric in model.metrics}["best_top1"] == run.data.metrics["best_top1"]
    assert (Path(model.artifact_location.removeprefix("file://")) / "data" / "model.pt2").stat().st_size > 100_000
    with sqlite3.connect(clone.path / "later.db") as database:
        assert database.execute("select count(*) from runs").fetchone() == (1,)


@pytest.fixture(scope="module")
def told(new_clone):
    """Train as one user; return the output in one line, the experiment, and the run in the store."""
    clone = new_clone()
    done = clone.run(*SHORT, "tracking.tags={note: 'a b'}", "tracking.model=false", USER="ada", LOGNAME="ada")
    assert done.status == 0, done.output
    client = MlflowClient(tracking_uri=f"sqlite:///{clone.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lossforge")
    (run,) = client.search_runs([experiment.experiment_id])
    return done.output.replace("\n", ""), experiment, run


def test_a_run_says_who_started_it_what_came_of_it_and_where_it_is_seen(told):
    _, _, run = told
    assert (run.data.tags["mlflow.user"], run.info.user_id) == ("ada", "ada")
    assert run.data.tags["mlflow.source.name"] == "experiments/train.py"
    _, experiment, run = told
    headline, command, table, links = run.data.tags["mlflow.note.content"].split("\n\n")
    assert headline.startswith(f"held-out top-1 **{run.data.metrics['best_top1']:.2%}**, held-out loss **")
    assert command.splitlines()[1].startswith("uv run experiments/train.py model=tiny_resnet")
    assert "'tracking.tags={note: '\"'\"'a b'\"'\"'}'" in command  # as a shell takes it
    assert f"| held-out loss | {run.data.metrics['best_loss']:.4f} |" in table.splitlines()
    assert f"#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}/artifacts/checkpoints" in links
    output, experiment, run = told
    pages = f"#/experiments/{experiment.experiment_id}/runs"
    assert f"http://127.0.0.1:5000/{pages}/{run.info.run_id}?workflowType=machine_learning" in output
    assert f"{pages}?viewStateShareKey=results&workflowType=machine_learning" in output
    assert "mlflow.sharedViewState.results" in experiment.tags


def test_a_long_command_is_shown_in_lines_that_a_shell_joins():
    words = ["uv", "run", "experiments/train.py", *(f"trainer.setting{number}=a  b's" for number in range(12)), "x" * 100]
    shown = in_lines(shlex.join(words))
    *lines, last = shown.splitlines()
    assert 40 < max(map(len, lines)) <= 80
    assert last == f"  {words[-1]}"
    assert subprocess.run(["bash", "-c", f"printf '%s\\n' {shown}"], capture_output=True, text=True).stdout.splitlines() == words


def test_an_experiment_keeps_what_its_owner_says_of_it(clone):
    uri = f"sqlite:///{clone.path / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri)
    made = client.create_experiment(
        "mine",
        (clone.path / "mlartifacts/mine").as_uri(),
        tags={"mlflow.note.content": "my own words", "mlflow.experimentKind": "finetuning"},
    )
    done = clone.run(*SHORT, f"tracking.uri={uri}", "tracking.experiment=mine", "tracking.model=false")
    assert done.status == 0, done.output
    tags = client.get_experiment(made).tags
    assert (tags["mlflow.note.content"], tags["mlflow.experimentKind"]) == ("my own words", "finetuning")
    assert "metrics.`result/top1`" in json.loads(tags["mlflow.sharedViewState.results"])["selectedColumns"]

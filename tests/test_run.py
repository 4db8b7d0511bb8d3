"""One run from the command line to the store, and what it leaves behind."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

QUICK = [
    "loss=focal",
    "model=tiny_resnet",
    "trainer.device=cpu",
    "trainer.epochs=2",
    "trainer.timing_warmup=5",
    "tracking.system_seconds=1",
]


@pytest.fixture(scope="module")
def ran(new_clone):
    clone = new_clone()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=clone.path, check=True)
    (clone.path / "conf" / "extra.txt").write_text("dirty")
    done = clone.run(*QUICK)
    assert done.status == 0, done.output
    clone.output = done.output
    return clone


def records(folder: Path, kind: str) -> list[dict]:
    return [record for line in (folder / "metrics.jsonl").read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


def client_of(clone):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{clone.path / 'mlflow.db'}")


def the_run(clone):
    client = client_of(clone)
    experiment = client.get_experiment_by_name("lossforge")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


METRICS = {
    "train/loss", "train/top1", "train/top5", "train/lr", "train/images_per_second", "train/step_ms", "train/data_wait_ms",
    "train/loss_ms", "train/gradient_norm", "train/skipped_updates", "train/nonfinite_updates", "val/top1", "val/top5", "val/loss",
    "val/ece", "val/samples", "train/peak_process_mib", "system/cpu_utilization_percentage", "system/system_memory_usage_megabytes",
    "loss_launches", "images_per_second", "seconds", "best_top1", "best_epoch", "loss_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(ran):
    (folder,) = ran.run_folders()
    return folder


def test_a_run_folder_holds_figures_evaluations_and_pictures(folder):
    seen = {name for kind in ("metrics", "summary") for record in records(folder, kind) for name in record["values"]}
    assert seen >= METRICS
    assert [record["status"] for record in records(folder, "end")] == ["FINISHED"]
    evaluations = records(folder, "evaluation")
    assert len(evaluations) == 2
    assert all(sum(map(sum, each["confusion"])) == 360 for each in evaluations)
    assert {"confusion_matrix.png", "calibration.png"} <= {path.name for path in folder.iterdir()}


def test_a_run_writes_only_its_folder_and_the_store(ran):
    top = {path.name for path in ran.path.iterdir()} - {".git"}
    assert top == {"conf", "experiments", "runs", "mlflow.db", "mlflow.db.lock", "mlartifacts"}


def test_checkpoints_load_with_weights_only(ran):
    import timm

    (folder,) = ran.run_folders()
    last = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    best = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    assert {"model", "ema", "optimizer", "schedule", "scaler", "count", "rng", "config", "epoch", "updates", "nonfinite"} <= set(last)
    assert last["updates"] == last["count"] == 2 * 23
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.pt", "best.pt", "best.safetensors", "best.pt2"}
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    model.load_state_dict(best["model"])
    assert best["config"]["loss"]["name"] == "focal"


def test_the_store_holds_figures_settings_origin_and_files(ran):
    _, run = the_run(ran)
    assert run.info.status == "FINISHED"
    assert set(run.data.metrics) >= METRICS
    assert run.data.params["loss.gamma"] == "2.0"
    assert run.data.params["optim.schedule.name"] == "cosine"
    assert run.data.params["model.name"] == "tiny_resnet"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ran.path, capture_output=True, text=True, check=True).stdout.strip()
    assert run.data.tags["git.commit"] == run.data.tags["mlflow.source.git.commit"] == commit
    assert run.data.tags["git.dirty"] == "true"
    assert run.data.tags["mlflow.source.name"] == "experiments/train.py"
    assert run.data.tags["loss.backend"] in ("torch", "triton-interpreted")
    client, run = the_run(ran)
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "metrics.jsonl", "pictures", "checkpoints"} <= names
    assert {item.path for item in client.list_artifacts(run.info.run_id, "pictures")} == {
        "pictures/confusion_matrix.png",
        "pictures/calibration.png",
        "pictures/first_batch.png",
    }
    assert [item.path for item in client.list_artifacts(run.info.run_id, "checkpoints")] == ["checkpoints/best.pt"]


def test_store_and_file_hold_the_same_metrics(ran):
    client, run = the_run(ran)
    (folder,) = ran.run_folders()
    in_file: dict[str, list] = {}
    for record in records(folder, "metrics"):
        for name, value in record["values"].items():
            in_file.setdefault(name, []).append((record["step"], value))
    for record in records(folder, "summary"):
        in_file |= {name: [(0, value)] for name, value in record["values"].items()}
    assert set(in_file) == set(run.data.metrics)
    for name, points in in_file.items():
        stored = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        assert sorted(stored) == sorted(points), name


def test_output_of_a_run_that_is_not_on_a_terminal(ran):
    assert "epoch 2/2 · held-out top-1" in ran.output
    assert "\x1b" not in ran.output
    for row in (
        "held-out top-1",
        "held-out loss",
        "best epoch",
        "training loss",
        "images/s",
        "loss forward + backward",
        "run folder",
        "MLflow",
    ):
        assert row in ran.output
    assert "incomplete" not in ran.output

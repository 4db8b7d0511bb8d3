"""A saved model scored again: the figures that training had, on other data, and what cannot be scored."""

import json
import subprocess
import sys

import pytest
import torch

QUICK = ["loss=ce", "model=tiny_resnet", "trainer.device=cpu", "trainer.epochs=2", "trainer.ema=0.9", "tracking=none"]


@pytest.fixture(scope="module")
def trained(new_clone):
    clone = new_clone()
    done = clone.run(*QUICK)
    assert done.status == 0, done.output
    (clone.folder,) = clone.run_folders()
    return clone


def evaluate(clone, *words):
    command = [sys.executable, "experiments/evaluate.py", *words]
    return subprocess.run(command, cwd=clone.path, env=clone.env, capture_output=True, text=True, timeout=240)


def metrics(folder):
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["values"] for line in lines if line["kind"] == "metrics"]


def test_the_best_checkpoint_scores_as_in_training(trained):
    checkpoint = trained.folder / "checkpoints" / "best.pt"
    done = evaluate(trained, f"checkpoint={checkpoint}", "tracking=mlflow")
    assert done.returncode == 0, done.stderr
    folder = next(path for path in trained.run_folders() if path.name.endswith("evaluate-ce-test_resnet-digits"))
    best = torch.load(checkpoint, weights_only=True)["best"]["values"]
    (values,) = metrics(folder)
    for name, value in best.items():
        assert values[f"val/{name}"] == pytest.approx(value, rel=1e-5), name
    assert (folder / "confusion_matrix.png").stat().st_size > 1000
    assert "held-out top-1" in done.stdout
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{trained.path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("lossforge").experiment_id])
    assert run.data.metrics["val/top1"] == pytest.approx(best["top1"])
    assert run.data.tags["checkpoint"].endswith("best.pt")


def test_other_held_out_data(trained):
    done = evaluate(
        trained, f"checkpoint={trained.folder / 'checkpoints' / 'last.pt'}", "data.split_seed=1", "data.held_out=0.5", "tracking=none"
    )
    assert done.returncode == 0, done.stderr
    assert "898 held-out samples" in done.stdout or "899 held-out samples" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "checkpoint= must be given once"),
        (["checkpoint=nowhere.pt"], "nowhere.pt: there is no such file"),
        (["checkpoint=conf/train.yaml"], "cannot be read"),
        (["checkpoint={best}", "data.hold_out=0.5"], "Did you mean 'held_out'?"),
        (["checkpoint={best}", "data=mnist", "data.download=false"], "data.root"),
    ],
)
def test_mistakes_leave_nothing_behind(trained, words, said):
    before = trained.contents()
    done = evaluate(trained, *(word.format(best=trained.folder / "checkpoints" / "best.pt") for word in words))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert trained.contents() == before

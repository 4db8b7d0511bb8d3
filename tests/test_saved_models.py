"""Where a saved model is found, which run it is linked with, and what it must not be scored on."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from digit_folders import digit_files
from mlflow.tracking import MlflowClient
from PIL import Image
from words import TINY

import evaluate
import predict
import train
from lab.comparison.runs import COMPARE, Store, select
from lab.config.settings import load_for
from lab.run.saved import open_checkpoint
from lab.run.trust import seal_of
from lab.sweep.job import PLAN

QUICK = [*TINY, "trainer.max_updates=4", "tracking.model=false"]


class Trained:
    """A run in MLflow, on digits of which some are kept to test."""

    def __init__(self, root: Path) -> None:
        self.runs, self.uri = root / "runs", f"sqlite:///{root / 'mlflow.db'}"
        assert train.main([*QUICK, "data.test=0.1", "name=first", *self.places]) == 0
        (self.folder,) = self.runs.iterdir()
        self.id = json.loads((self.folder / "tracking.json").read_text())["run_id"]
        self.client = MlflowClient(tracking_uri=self.uri)

    @property
    def places(self) -> list[str]:
        return [f"trainer.runs={self.runs}", f"tracking.uri={self.uri}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return Trained(tmp_path_factory.mktemp("saved"))


def scored(runs, *words):
    """evaluate.py's exit status, what it printed, what it said of errors, and the folder of its run."""
    before = set(runs.iterdir()) if runs.is_dir() else set()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = evaluate.main([*words, f"trainer.runs={runs}"])
    new = (set(runs.iterdir()) if runs.is_dir() else set()) - before
    return status, out.getvalue(), err.getvalue(), next(iter(new), None)


def refused(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        assert evaluate.main([*words, "tracking=none"]) == 1
    return err.getvalue()


def metrics(folder):
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {name: value for line in lines if line["kind"] in ("metrics", "summary") for name, value in line["values"].items()}


def test_a_runs_folder_stands_for_its_best_weights(trained, tmp_path):
    status, said, _, folder = scored(tmp_path, f"checkpoint={trained.folder}", "tracking=none")
    assert status == 0
    best = torch.load(trained.folder / "checkpoints" / "best.pt", weights_only=True)["best"]["values"]
    assert metrics(folder)["val/top1"] == pytest.approx(best["top1"])
    start = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert start["tags"]["checkpoint"].endswith("first/checkpoints/best.pt")
    assert "360 samples of split=val on cpu" in said


def test_an_evaluation_is_nested_in_its_training_and_disturbs_no_comparison(trained, tmp_path):
    status, _, err, folder = scored(tmp_path, f"checkpoint={trained.folder}", f"tracking.uri={trained.uri}", "split=test")
    assert status == 0, err
    run_id = json.loads((folder / "tracking.json").read_text())["run_id"]
    run = trained.client.get_run(run_id)
    assert run.data.tags["mlflow.parentRunId"] == run.data.tags["trained.run_id"] == trained.id
    assert run.data.tags["split"] == "test"
    whole = metrics(trained.folder)
    assert run.data.metrics["test/top1"] == pytest.approx(whole["test/top1"])
    assert "val/top1" not in run.data.metrics
    names = {each.path for each in trained.client.list_artifacts(run_id)}
    assert {"predictions.csv", "per_class.csv"} <= names
    found, *_ = select(Store(trained.uri), load_for(COMPARE, []).config)
    assert [each.id for each in found] == [trained.id]


def test_another_store_gets_a_tag_alone(trained, tmp_path):
    status, *_, folder = scored(tmp_path / "runs", f"checkpoint={trained.folder}", f"tracking.uri=sqlite:///{tmp_path / 'other.db'}")
    assert status == 0
    tags = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["tags"]
    assert tags["trained.run_id"] == trained.id
    assert "mlflow.parentRunId" not in tags


def test_a_place_in_mlflow_counts_as_its_run_signed_it(trained, tmp_path):
    """A checkpoint without its run's folder says where its run is; whoever alters that, with settings that stay signed, is not believed."""
    state = torch.load(trained.folder / "checkpoints" / "last.pt", weights_only=True)
    place = {"uri": trained.uri, "run_id": trained.id}
    ours = state | {"tracking": place, "seal": seal_of(place, state["signature"])}
    altered = [
        ours | {"tracking": place | {"uri": "http://127.0.0.1:9/elsewhere"}},
        ours | {"tracking": place | {"run_id": "1" * 32}},
        ours | {"seal": seal_of(place, "of another run")},
        ours | {"seal": ""},
        {name: each for name, each in ours.items() if name != "seal"},
        ours | {"signature": ""},
    ]
    for number, (each, known) in enumerate([(ours, place), (state, state["tracking"]), *((each, {}) for each in altered)]):
        torch.save(each, path := tmp_path / f"{number}.pt")
        assert open_checkpoint(str(path), []).run == known, number


def test_a_run_id_leads_to_its_folder(trained):
    status, _, err, folder = scored(trained.runs, f"checkpoint=runs:/{trained.id}", "tracking=none")
    assert status == 0, err
    tags = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["tags"]
    assert tags["checkpoint"].endswith("first/checkpoints/best.pt")
    assert tags["trained.run_id"] == trained.id
    shutil.rmtree(folder)


@pytest.mark.parametrize("artifact", ["", "/checkpoints/best.pt"])
def test_a_run_whose_folder_is_not_here_is_downloaded(trained, tmp_path, artifact):
    name = f"runs:/{trained.id}{artifact}"
    status, _, err, folder = scored(tmp_path, f"checkpoint={name}", f"tracking.uri={trained.uri}")
    assert status == 0, err
    assert metrics(folder)["val/top1"] == pytest.approx(metrics(trained.folder)["best_top1"])
    tags = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["tags"]
    assert (tags["checkpoint"], tags["mlflow.parentRunId"]) == (name, trained.id)
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    words = [f"checkpoint={name}", f"out={tmp_path / 'out'}", f"trainer.runs={tmp_path}", f"tracking.uri={trained.uri}"]
    assert predict.main([*words, "trainer.device=cpu", str(tmp_path / "image.png")]) == 0
    assert (tmp_path / "out" / "predictions.jsonl").read_text().count("\n") == 1


def test_what_is_no_saved_model_is_named(trained, tmp_path):
    error = refused(f"checkpoint=runs:/0123abc{'0' * 25}", f"tracking.uri={trained.uri}")
    assert error.startswith(f"error: checkpoint=runs:/0123abc{'0' * 25}: {trained.uri} has no checkpoints/best.pt of such a run: ")
    error = refused(f"checkpoint=runs:/{trained.id}/checkpoints/none.pt", f"tracking.uri={trained.uri}")
    assert "has no checkpoints/none.pt of such a run" in error
    error = refused(f"checkpoint=runs:/{trained.id}", f"tracking.uri=sqlite:///{tmp_path}/none.db", f"trainer.runs={tmp_path}")
    assert f"{tmp_path}/none.db does not exist" in error
    assert not list(tmp_path.iterdir())
    error = refused(f"checkpoint={tmp_path}")
    assert error == f"error: checkpoint={tmp_path}: has no checkpoints/best.pt; a run's folder or a checkpoint is expected.\n"
    assert refused(f"checkpoint={trained.folder}", "split=vla").startswith("error: split=vla: 'vla' is not known.\nDid you mean 'val'?")


def test_a_sweeps_folder_is_left_to_its_own_runs(tmp_path):
    sweep = tmp_path / "runs" / "sweep"
    with contextlib.redirect_stdout(io.StringIO()):
        assert train.main([*QUICK, "data.train_share=0.1", "tracking=none", f"trainer.runs={sweep}"]) == 0
        (job,) = sweep.iterdir()
        (sweep / PLAN).write_text("")
        assert evaluate.main([f"checkpoint={job}"]) == 0
    assert {path.name for path in sweep.iterdir()} == {job.name, PLAN}
    (evaluation,) = set((tmp_path / "runs").iterdir()) - {sweep}
    assert "evaluate" in evaluation.name


@pytest.mark.parametrize("split", ["val", "test", "train"])
def test_each_split_is_scored_without_augmentation(trained, tmp_path, split):
    rows = []
    for _ in range(2 if split == "train" else 1):
        status, said, err, folder = scored(tmp_path, f"checkpoint={trained.folder}", "tracking=none", f"split={split}")
        assert status == 0, err
        rows.append(metrics(folder))
        shutil.rmtree(folder)
    assert rows[0] == rows[-1]
    assert rows[0][f"{split}/samples"] == {"val": 360, "test": 180, "train": 1257}[split]
    assert f"{ {'val': 'held-out', 'test': 'test', 'train': 'training'}[split] } top-1" in said


@pytest.mark.parametrize("word", ["data.test=0.2", "data.test=null", "data.fold=1", "data.folds=7", "data.split_seed=3"])
def test_another_division_of_the_same_digits_is_refused(trained, word):
    name, _, value = word.partition("=")
    error = refused(f"checkpoint={trained.folder}", word, "split=test")
    assert error.startswith(f"error: {name}={'None' if value == 'null' else value}: the model was trained with {name}=")
    assert "another split would hold out images that it has seen" in error


def test_a_run_without_test_images_has_none_to_score(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        assert train.main([*QUICK, "data.train_share=0.1", f"trainer.runs={tmp_path / 'runs'}", "tracking=none"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    error = refused(f"checkpoint={folder}", "split=test", f"trainer.runs={tmp_path / 'more'}")
    assert error.startswith("error: split=test: data=digits has no such images; data.test= names a folder or a share of them")
    assert not (tmp_path / "more").exists()


@pytest.fixture(scope="module")
def of_folder(tmp_path_factory):
    """A run on images of which some are held out, its folder, and images that nothing has seen."""
    root = digit_files(tmp_path_factory.mktemp("folder") / "pictures", train=14, val=6)
    shutil.move(root / "val", root / "later")
    words = [*QUICK, "data=folder", f"data.root={root}", "data.workers=0", "data.batch_size=8", "tracking=none"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert train.main([*words, f"trainer.runs={root.parent / 'runs'}"]) == 0
    (folder,) = (root.parent / "runs").iterdir()
    return folder, root


def test_images_that_nothing_was_chosen_by_are_scored_as_test(of_folder, tmp_path):
    folder, _ = of_folder
    status, _, err, evaluation = scored(tmp_path, f"checkpoint={folder}", "tracking=none", "split=test", "data.test=later")
    assert status == 0, err
    assert metrics(evaluation)["test/samples"] == 18
    rows = (evaluation / "predictions.csv").read_text().splitlines()
    assert rows[1].startswith("later/0/0.png,0,")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.test=train"], "data.test=train: the model was trained on these images; held-out ones are expected."),
        (
            ["data.test=../pictures/train"],
            "data.test=../pictures/train: the model was trained on these images; held-out ones are expected.",
        ),
        (["data.val=./train"], "data.val=./train: the model was trained on these images; held-out ones are expected."),
        (
            ["data.root={root}/..", "data.val=pictures/train", "data.train=pictures/later"],
            "data.val=pictures/train: the model was trained on these images; held-out ones are expected.",
        ),
        (["data.held_out=0.5"], "data.held_out=0.5: the model was trained with data.held_out=0.2; "),
    ],
    ids=str,
)
def test_what_was_trained_on_is_not_scored(of_folder, words, said):
    folder, root = of_folder
    error = refused(f"checkpoint={folder}", "split=test", *(word.format(root=root) for word in words))
    assert error.startswith(f"error: {said}")


@pytest.mark.parametrize("file", ["best.pt", "best.safetensors"])
def test_a_folder_that_has_changed_holds_out_others(of_folder, file):
    folder, root = of_folder
    more = root / "train" / "0" / "more.png"
    shutil.copy(root / "train" / "0" / "0.png", more)
    try:
        error = refused(f"checkpoint={folder / 'checkpoints' / file}")
    finally:
        more.unlink()
    assert error.startswith("error: data.train=train: has 34 images to train on, while the model was trained on 33; ")
    assert "Name the held-out images by data.val= or data.split=." in error

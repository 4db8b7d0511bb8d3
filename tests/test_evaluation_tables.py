"""predictions.csv and per_class.csv of an evaluation: a row a sample, a row a class, checked by other libraries."""

import csv
import json
import math

import pytest
import torch
from digit_folders import digit_files
from sklearn.metrics import average_precision_score, precision_recall_fscore_support

import evaluate

TINY = ["data.workers=0", "trainer.epochs=1"]
SCENES = ["data.train_scenes=12", "data.val_scenes=8", "data.scene_pixels=64", "data.digit_pixels=[14,24]", "data.digits=[1,3]"]


@pytest.fixture
def tables(make_trainer, run_folder, quiet, tmp_path, capsys):
    """Train with these words and evaluate: the trainer, the evaluation's folder, and its two tables."""

    def made(*words):
        trainer = make_trainer(*words)
        trainer.fit(run_folder, quiet)
        runs = tmp_path / "evaluations"
        assert evaluate.main([f"checkpoint={run_folder.path}", "tracking=none", f"trainer.runs={runs}"]) == 0, capsys.readouterr().err
        (folder,) = runs.iterdir()
        trainer.load_weights("best.pt")
        trainer.model.eval()
        found = [list(csv.DictReader((folder / name).open())) if (folder / name).is_file() else None for name in NAMES]
        artifacts = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        sent = {each["path"] for each in artifacts if each["kind"] == "artifact"}
        assert {name for name, table in zip(NAMES, found, strict=True) if table} <= sent
        return trainer, folder, *found

    return made


NAMES = ("predictions.csv", "per_class.csv")


def number(text):
    return float(text) if text else math.nan


def test_a_classifiers_tables(tables, tmp_path):
    root = digit_files(tmp_path / "pictures", train=10, val=7, names=("cat", "dog", "owl"))
    words = ["data=folder", f"data.root={root}", "data.image_size=16", "data.batch_size=8", "data.eval_batch_size=4", *TINY]
    trainer, _, samples, classes = tables(*words)
    assert [row["sample"] for row in samples] == [f"val/{name}/{i}.png" for name in ("cat", "dog", "owl") for i in range(7)]
    with torch.no_grad():
        probability = torch.cat([trainer.model(batch.images).softmax(1) for batch in trainer.data.val])
    for row, p in zip(samples, probability, strict=True):
        assert row["true"] == row["sample"].split("/")[1]
        assert row["predicted"] == trainer.data.classes[int(p.argmax())]
        assert float(row["probability"]) == pytest.approx(p.max().item(), abs=1e-5)
        assert float(row["probability_of_true"]) == pytest.approx(p[trainer.data.classes.index(row["true"])].item(), abs=1e-5)
        assert row["correct"] == str(int(row["true"] == row["predicted"]))
    truth, said = ([row[name] for row in samples] for name in ("true", "predicted"))
    wanted = precision_recall_fscore_support(truth, said, labels=trainer.data.classes, zero_division=math.nan)
    assert [row["class"] for row in classes] == trainer.data.classes
    for name, values in zip(("precision", "recall", "f1", "samples"), wanted, strict=True):
        known = 0.0 if name == "f1" else math.nan  # F1 of a class that is never said: nothing of it was found
        assert [number(row[name]) for row in classes] == pytest.approx([known if v != v else v for v in values], nan_ok=True), name


def test_tables_of_sets_of_labels(tables, tmp_path):
    words = ["task=multilabel", "loss=bce", "data=digit_scenes", f"data.root={tmp_path / 'data'}", "task.threshold=0.2", *SCENES, *TINY]
    trainer, _, samples, classes = tables(*words)
    with torch.no_grad():
        probability = torch.cat([trainer.model(batch.images).sigmoid() for batch in trainer.data.val])
    target = torch.cat([batch.target for batch in trainer.data.val])
    names = trainer.data.classes
    for row, p, t in zip(samples, probability, target, strict=True):
        assert row["true"] == ";".join(name for name, there in zip(names, t.tolist(), strict=True) if there)
        assert row["predicted"] == ";".join(name for name, value in zip(names, p.tolist(), strict=True) if value > 0.2)
        assert row["correct"] == str(int(row["true"] == row["predicted"]))
        assert len(row["probability"].split(";")) == len(row["predicted"].split(";"))
        assert row["sample"].endswith(".png")
    wanted = precision_recall_fscore_support(target.numpy(), (probability > 0.2).numpy(), zero_division=math.nan)
    for name, values in zip(("precision", "recall", "f1", "samples"), wanted, strict=True):
        assert [number(row[name]) for row in classes] == pytest.approx(list(values), nan_ok=True), name
    for row, p, t in zip(classes, probability.T, target.T, strict=True):
        if t.any():
            assert float(row["ap"]) == pytest.approx(average_precision_score(t, p), abs=1e-4)


def test_tables_of_pairs(tables):
    words = ["task=preference", "loss=bradley_terry", "data=digit_pairs", "data.image_size=16", "trainer.max_updates=3"]
    trainer, _, samples, classes = tables(*words, "data.train_pairs=200", "data.val_pairs=60")
    assert classes is None
    from sklearn.datasets import load_digits

    digits = load_digits().target
    for row in samples:
        first, second = (digits[int(i)] for i in row["sample"].split("-"))
        assert row["true"] == ("first" if first > second else "second")
        assert float(row["probability"]) >= 0.5
    right = sum(int(row["correct"]) for row in samples) / 60
    assert right == pytest.approx(trainer.best.values["accuracy"])


def test_tables_of_a_detector(tables, tmp_path):
    words = ["task=detection", "model=fcos_tiny", f"data.root={tmp_path / 'data'}", "model.score_threshold=0.0", *SCENES, *TINY]
    trainer, folder, samples, classes = tables(*words)
    assert samples is None
    assert [row["class"] for row in classes] == [str(digit) for digit in range(10)]
    truth = trainer.data.val.file
    assert [int(row["boxes"]) for row in classes] == truth.counts().tolist()
    for row in classes:
        assert number(row["ap"]) == pytest.approx(trainer.pictured.per_class[row["class"]], nan_ok=True)
        assert not number(row["ap50"]) < number(row["ap"])
    found = json.loads((folder / "detections.json").read_text())
    assert {row["image_id"] for row in found} <= set(truth.image_ids)
    assert set(found[0]) == {"image_id", "file_name", "category_id", "bbox", "score"}
    files = dict(zip(truth.image_ids, truth.files, strict=True))
    assert all(files[row["image_id"]] == str(truth.folder / row["file_name"]) for row in found)

"""A saved model scored again: the figures that training had, on other data, and what cannot be scored."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from digit_folders import digit_files
from PIL import Image
from words import ALONE

from lab.base.errors import UserError
from lab.config.settings import load
from lab.run.resume import Earlier, load_state
from lab.run.saved import Saved, settings_of
from lab.run.trust import Origin

QUICK = ["loss=ce", "model=tiny_resnet", "trainer.device=cpu", "trainer.epochs=2", "trainer.ema=0.9", *ALONE]


@pytest.fixture(scope="module")
def trained(new_clone):
    clone = new_clone()
    done = clone.run(*QUICK)
    assert done.status == 0, done.output
    (clone.folder,) = clone.run_folders()
    return clone


def evaluate(clone, *words):
    return clone.warm.run("experiments/evaluate.py", words, clone.path, apart=True)


def metrics(folder):
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["values"] for line in lines if line["kind"] == "metrics"]


def test_the_best_checkpoint_scores_as_in_training(trained):
    checkpoint = trained.folder / "checkpoints" / "best.pt"
    done = evaluate(trained, f"checkpoint={checkpoint}", "tracking=mlflow")
    assert done.returncode == 0, done.stderr
    folder = next(path for path in trained.run_folders() if path.name.endswith("evaluate-ce-tiny_resnet-digits"))
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


def fitted(folder, *words):
    """A short run of this process; its checkpoints."""
    from lab.run.folder import RunFolder
    from lab.training.assemble import assemble
    from lab.training.console import Console

    settings = load(["model=tiny_resnet", "loss.implementation=torch", "trainer.device=cpu", *words])
    run = RunFolder(folder, "fitted", settings.tree())
    assemble(settings).fit(run, Console(1))
    run.close("FINISHED")
    return run.path / "checkpoints"


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A run on a folder of images of another size than the default, and a copy of the folder elsewhere."""
    root = digit_files(tmp_path_factory.mktemp("pictures"))
    copy = shutil.copytree(root, root.parent / "copy")
    words = ["data=folder", f"data.root={root}", "data.image_size=40", "data.workers=0", "trainer.max_updates=6", "data.batch_size=6"]
    return fitted(root.parent / "runs", *words), copy


@pytest.fixture(scope="module")
def of_digits(tmp_path_factory):
    """A run on a share of the digits, whose pixels have another mean and deviation than all."""
    words = ["data.image_size=16", "data.train_share=0.05", "trainer.max_updates=2"]
    return fitted(tmp_path_factory.mktemp("digits"), *words)


def best_of(checkpoints):
    return torch.load(checkpoints / "best.pt", weights_only=True)["best"]["values"]


def here(capsys, runs, *words):
    """evaluate.py in this process: the exit status, the held-out figures, what was printed, and what was said of errors."""
    import evaluate

    status = evaluate.main([*map(str, words), "tracking=none", f"trainer.runs={runs}"])
    said = capsys.readouterr()
    if status:
        assert "Traceback" not in said.err
        assert not runs.exists()
        return status, {}, said.out, said.err
    (folder,) = runs.iterdir()
    (values,) = metrics(folder)
    return status, {name.removeprefix("val/"): value for name, value in values.items()}, said.out, said.err


@pytest.mark.parametrize("file", ["best.pt", "best.safetensors"])
def test_a_folder_chosen_anew_is_seen_as_in_training(capsys, of_files, tmp_path, file):
    checkpoints, copy = of_files
    status, values, said, _ = here(capsys, tmp_path / "runs", f"checkpoint={checkpoints / file}", "data=folder", f"data.root={copy}")
    assert status == 0
    assert values == best_of(checkpoints)
    assert "changed:" not in said


def test_the_runs_test_images_are_not_needed_for_others(capsys, of_files, tmp_path):
    """A run with data.test, scored on a folder without such images."""
    _, copy = of_files
    root = shutil.copytree(copy, tmp_path / "pictures")
    shutil.copytree(root / "val", root / "test")
    (root / "test" / "0" / "0.png").unlink()
    words = ["data=folder", f"data.root={root}", "data.image_size=16", "data.workers=0", "trainer.max_updates=1", "data.test=test"]
    checkpoints = fitted(tmp_path / "fitted", *words)
    asked = [f"checkpoint={checkpoints / 'best.pt'}", "data=folder", f"data.root={copy}"]
    status, values, _, _ = here(capsys, tmp_path / "runs", *asked)
    assert (status, values["samples"]) == (0, 18)
    status, _, _, err = here(capsys, tmp_path / "none", *asked, "split=test")
    assert (status, "no such folder" in err) == (1, True)
    of_all = [f"checkpoint={checkpoints / 'best.pt'}", "split=all"]
    status, values, _, _ = here(capsys, tmp_path / "all", *of_all)
    assert (status, values["all/samples"]) == (0, len([*root.rglob("*.png")])), "its own test images are of all"
    status, values, _, _ = here(capsys, tmp_path / "others", *of_all, "data=folder", f"data.root={copy}")
    assert (status, values["all/samples"]) == (0, len([*copy.rglob("*.png")]))


def test_every_image_of_another_folder_is_scored(capsys, of_files, tmp_path):
    """Each once, though the folder does not say which are held out, and has images that the run's folder has not."""
    checkpoints, copy = of_files
    root = tmp_path / "others"
    shutil.copytree(copy / "train", root / "train")
    shutil.copy(root / "train" / "0" / "0.png", root / "train" / "0" / "more.png")
    files = sorted(path for path in root.rglob("*.png"))
    asked = [f"checkpoint={checkpoints / 'best.pt'}", "data=folder", f"data.root={root}", "split=all"]
    status, values, said, _ = here(capsys, tmp_path / "runs", *asked)
    assert (status, values["all/samples"]) == (0, len(files))
    assert "the figures are too good" in said
    assert "overall top-1" in said
    (folder,) = (tmp_path / "runs").iterdir()
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["sample"] for row in rows) == [path.relative_to(root).as_posix() for path in files]
    assert all(Path(row["sample"]).parent.name == row["true"] for row in rows)
    (record,) = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"kind": "data"' in line)
    assert sum(each["samples"] for each in record["sets"]) == len(files)


def test_a_folder_may_lack_classes_of_the_model(capsys, of_files, tmp_path):
    """They keep their numbers, and a folder of another class is refused."""
    checkpoints, copy = of_files
    root = shutil.copytree(copy / "val", tmp_path / "few")
    shutil.rmtree(root / "1")
    asked = [f"checkpoint={checkpoints / 'best.pt'}", "data=folder", f"data.root={root}", "data.train=.", "split=all"]
    status, values, said, _ = here(capsys, tmp_path / "runs", *asked)
    assert (status, values["all/samples"]) == (0, 12)
    assert "few has no image of 1" in said
    (folder,) = (tmp_path / "runs").iterdir()
    with (folder / "predictions.csv").open(newline="") as file:
        assert all(Path(row["sample"]).parent.name == row["true"] for row in csv.DictReader(file))
    (root / "0").rename(root / "zero")
    status, _, _, err = here(capsys, tmp_path / "none", *asked)
    assert (status, "class: 'zero' is not known.\nChoices: 0, 1, 2" in err) == (1, True)


def test_what_only_training_needs_is_not_loaded(capsys, tmp_path):
    root = digit_files(tmp_path / "pictures")
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\n\n\ndef chances(targets):\n    return torch.ones(len(targets))\n\n\n"
        "def same(image):\n    return image.resize((16, 16))\n"
    )
    words = ["data=folder", f"data.root={root}", "data.image_size=16", "data.workers=0", "trainer.max_updates=1"]
    checkpoints = fitted(tmp_path / "fitted", *words, f"data.sampler={own}:chances", f"data.transform={own}:same")
    own.unlink()
    status, values, _, _ = here(capsys, tmp_path / "runs", f"checkpoint={checkpoints / 'best.pt'}")
    assert status == 0
    assert values == best_of(checkpoints)


@pytest.mark.parametrize("words", [[], ["data=folder"], ["data.image_size=64"]], ids=str)
def test_predict_sees_images_as_evaluate_does(capsys, of_files, tmp_path, words):
    import predict

    checkpoints, copy = of_files
    assert predict.main([f"checkpoint={checkpoints / 'best.pt'}", f"out={tmp_path}", "top=3", *words, str(copy / "val")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    losses = [
        -math.log(next(each["score"] for each in line["found"] if each["label"] == Path(line["image"]).parent.name)) for line in lines
    ]
    assert len(losses) == 18
    same = sum(losses) / 18 == pytest.approx(best_of(checkpoints)["loss"], abs=1e-5)
    said = capsys.readouterr().out
    assert (same, "changed: data.image_size=64 (the run had 40)" in said) == (
        (False, True) if words == ["data.image_size=64"] else (True, False)
    )


@pytest.mark.parametrize("words", [["data.train_share=1"], ["data.train_share=0.3", "data=digits"]], ids=str)
def test_pixels_are_normalised_as_in_training(capsys, of_digits, tmp_path, words):
    _, values, _, _ = here(capsys, tmp_path / "runs", f"checkpoint={of_digits / 'best.pt'}", *words)
    assert values == best_of(of_digits)


def test_cfg_prints_what_would_hold_and_runs_nothing(capsys, of_files, tmp_path):
    import evaluate

    words = [
        f"checkpoint={of_files[0] / 'best.pt'}",
        "--cfg",
        "data=folder",
        f"data.root={of_files[1]}",
        f"trainer.runs={tmp_path / 'runs'}",
    ]
    assert evaluate.main(words) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert (tree["data"]["image_size"], tree["data"]["root"]) == (40, str(of_files[1]))
    assert not (tmp_path / "runs").exists()


def test_scenes_are_looked_at_in_the_size_of_training():
    """Another kind of data is resized to the edge of the scenes that the model has seen."""
    scenes = Saved(
        "scenes.pt", {"config": load(["task=detection", "data.scene_pixels=64", "data.divisor=16"]).tree(), "origin": Origin.STRANGER}, {}
    )
    settings, changed = settings_of(scenes, ["data=coco", "data.root=photos"])
    assert (settings.config.data.shortest, settings.config.data.longest, settings.config.data.divisor) == (64, None, 16)
    assert changed == []
    settings, changed = settings_of(scenes, ["data=coco", "data.shortest=100", "model.score_threshold=0.2"])
    assert settings.config.data.shortest == 100
    assert sorted(changed) == ["data.shortest=100 (the run had 64)", "model.score_threshold=0.2 (the run had 0.05)"]
    coco = Saved("coco.pt", {"config": load(["task=detection", "data=coco", "data.shortest=320"]).tree(), "origin": Origin.STRANGER}, {})
    settings, _ = settings_of(coco, ["data=digit_scenes"])
    assert (settings.config.data.shortest, settings.config.data.longest) == (320, 1333)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("empty.pt", b"", "cannot be read: it is not a checkpoint, or only a part of one (0 bytes)"),
        ("text.jpg", b"hello there", "cannot be read: it is not a checkpoint, or only a part of one"),
        ("half.pt", 0.5, "cannot be read: it is not a checkpoint, or only a part of one"),
        ("broken.safetensors", b"no header", "cannot be read: "),
        ("empty.safetensors", b"", "cannot be read: "),
        ("other.safetensors", {"weight": torch.ones(1)}, "is none that this version's train.py saved."),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:-1] and " " not in value else "",
)
def test_a_file_that_is_no_checkpoint_is_named(capsys, of_digits, tmp_path, file, content, said):
    from safetensors.torch import save_file

    import predict

    path = tmp_path / file
    if isinstance(content, dict):
        save_file(content, path)
    else:
        whole = (of_digits / "best.pt").read_bytes()
        path.write_bytes(content if isinstance(content, bytes) else whole[: int(len(whole) * content)])
    status, _, _, error = here(capsys, tmp_path / "runs", f"checkpoint={path}")
    assert status == 1
    assert error.startswith(f"error: checkpoint={path}: {said}")
    assert error.count("\n") == 1
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    assert predict.main([f"checkpoint={path}", f"out={tmp_path / 'out'}", str(tmp_path / "image.png")]) == 1
    assert capsys.readouterr().err == error
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"^resume=.*: "):
        load_state(Earlier(tmp_path, path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=tiny_vit"], "error: checkpoint: its weights do not fit the model that the settings describe"),
        (["data=folder", "data.root={copy}"], "error: data: its images have 3 channels; the model takes 1.\n"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_weights_is_said(capsys, of_digits, of_files, tmp_path, words, said):
    given = [f"checkpoint={of_digits / 'best.pt'}", *(word.format(copy=of_files[1]) for word in words)]
    status, _, _, error = here(capsys, tmp_path / "runs", *given)
    assert status == 1
    assert error.startswith(said)

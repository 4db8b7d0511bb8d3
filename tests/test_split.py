"""What is held out, what is scored once at the end, and what no split is made of."""

import json
import shutil
import struct

import numpy as np
import pytest
import torch
from digit_folders import digit_files
from words import ALONE

from lab.base.errors import UserError
from lab.config.schema import DigitsConfig
from lab.config.settings import load
from lab.data.load import load_data
from lab.data.sets import Norm
from lab.data.split import split
from lab.detectors.scenes import _digits

CPU = torch.device("cpu")
NORM = Norm([0.5], [0.5])
MORE = "; give it more images, or take a larger share."
SMALL = ["data.image_size=16", "trainer.epochs=2", "optim.lr=3e-3"]


@pytest.fixture
def pictures(tmp_path):
    """Twenty images of each of three classes, none of them held out."""
    root = digit_files(tmp_path / "pictures", train=20, names=("cat", "dog", "owl"))
    shutil.rmtree(root / "val")
    return root


def words(root, *more):
    return ["data=folder", f"data.root={root}", "data.image_size=16", "data.batch_size=8", "data.workers=0", *more]


def test_each_class_has_its_share_in_every_part():
    targets = [label for label, count in enumerate((100, 40, 60)) for _ in range(count)]
    parts = split(DigitsConfig(held_out=0.2), targets, ["a", "b", "c"], test=0.1)
    counted = [np.bincount([targets[i] for i in part]).tolist() for part in parts]
    assert counted == [[70, 28, 42], [20, 8, 12], [10, 4, 6]]
    assert sorted(i for part in parts for i in part) == list(range(200))
    assert split(DigitsConfig(held_out=0.2, split_seed=1), targets, ["a", "b", "c"], test=0.1) != parts


def test_folds_hold_out_every_image_once_and_never_a_test_image():
    targets = [label for label in range(3) for _ in range(20)]
    folds = [split(DigitsConfig(fold=fold, folds=4), targets, ["a", "b", "c"], test=0.2) for fold in range(4)]
    tested = {tuple(sorted(test)) for _, _, test in folds}
    assert len(tested) == 1
    (test,) = tested
    assert len(test) == 12
    assert sorted(i for _, val, _ in folds for i in val) == sorted(set(range(60)) - set(test))
    for train, val, _ in folds:
        assert sorted([*train, *val, *test]) == list(range(60))
        assert np.bincount([targets[i] for i in val]).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("settings", "test", "said"),
    [
        ({"fold": 3, "folds": 3}, None, "data.fold=3: 0 to 2 are expected with data.folds=3."),
        ({"held_out": 0.6}, 0.4, "data.test=0.4: with data.held_out=0.6 no image is left to train on."),
        (
            {"held_out": 0.01},
            None,
            f"data.held_out=0.01: class 'owl', of 4 images, has no held-out one{MORE}",
        ),
        (
            {"held_out": 0.01},
            0.5,
            f"data.held_out=0.01: class 'owl', of 4 images, has no held-out one{MORE}",
        ),
        ({}, 0.01, f"data.test=0.01: class 'owl', of 4 images, has no test one{MORE}"),
        ({"held_out": 0.001}, None, "data.held_out=0.001: takes 1 of 404 images of 3 classes; each class needs one taken and one left."),
        ({"held_out": 0.995}, None, "data.held_out=0.995: takes 402 of 404 images of 3 classes; each class needs one taken and one left."),
        (
            {"fold": 0, "folds": 5},
            None,
            "data.fold=0 of data.folds=5: class 'owl' has too few images to divide: 4; at least 5 are expected.",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(settings, test, said):
    targets = [0] * 200 + [1] * 200 + [2] * 4
    with pytest.raises(UserError) as caught:
        split(DigitsConfig(**settings), targets, ["cat", "dog", "owl"], test)
    assert str(caught.value) == said


def test_a_named_class_may_have_no_image():
    parts = split(DigitsConfig(held_out=0.5), [0, 0, 2, 2], ["a", "b", "c"])
    assert [len(part) for part in parts] == [2, 2, 0]


def test_a_class_of_one_image_is_refused():
    with pytest.raises(UserError, match=r"^data.held_out=0.2: class 'b' has too few images to divide: 1; at least 2 are expected.$"):
        split(DigitsConfig(), [0, 0, 0, 1], ["a", "b"])


@pytest.fixture
def data_of(make_trainer, pictures):
    """Load the pictures with these settings."""
    return lambda *settings: make_trainer(*words(pictures, *settings)).data


@pytest.fixture
def later(pictures):
    """Add a folder of five test images of each class."""
    digit_files(pictures.parent / "more", train=5, val=1, names=("cat", "dog", "owl"))
    shutil.move(pictures.parent / "more" / "train", pictures / "later")
    return pictures / "later"


def test_a_folder_of_test_images_is_a_part_of_its_own(later, data_of):
    data = data_of("data.test=later")
    assert (data.train.samples, data.val.samples, data.test.samples) == (48, 12, 15)
    assert all(key.startswith("later/") for key in data.test.keys)


def test_a_folder_of_test_images_that_lacks_a_class_is_refused(later, data_of):
    shutil.rmtree(later / "owl")
    with pytest.raises(UserError, match=r"^data.train and data.test hold different classes: owl in one of them only\. A folder may lack"):
        data_of("data.test=later")


def test_a_folder_of_test_images_may_lack_a_named_class(later, pictures, make_trainer):
    shutil.rmtree(later / "owl")
    trainer = make_trainer(*words(pictures, "data.test=later", "data.classes=[owl,dog,cat]"))
    data = trainer.data
    assert (data.classes, data.test.samples) == (["owl", "dog", "cat"], 10)
    assert all(data.classes[label] in data.test.keys[i] for batch in data.test for label, i in zip(batch.target, batch.index, strict=True))
    assert [note for note in trainer.notes if note.endswith("has no image of owl")]


def test_a_folder_of_a_class_that_is_not_named_is_refused(later, data_of):
    with pytest.raises(UserError, match=r"class: 'owl' is not known\.\nDid you mean 'owls'"):
        data_of("data.test=later", "data.classes=[cat,dog,owls]")


def test_a_folder_without_an_image_of_a_class_is_refused(later, data_of):
    (later / "cat" / "dog").mkdir()
    with pytest.raises(UserError, match=r"has no image of a class\. Images are files"):
        data_of("data.train=later/cat", "data.test=later", "data.classes=[cat,dog,owl]")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.test=train"], "data.test=train: is data.train, too; images that nothing else uses are expected."),
        (["data.test=./val"], "data.test=./val: is data.val, too; images that nothing else uses are expected."),
        (["data.val=train"], "data.val=train: is data.train, too; images that nothing else uses are expected."),
        (
            ["data.fold=1"],
            "data.fold=1: divides the training images, but there are held-out images already, those of val/. Leave data.fold out.",
        ),
        (["data.test=0.1"], "data.test=0.1: a folder in data.root is expected; only sets held in memory take a share."),
        (["data.test=nowhere"], "data.test={root}/nowhere: no such folder."),
    ],
)
def test_parts_of_a_folder_that_are_none_are_refused(make_trainer, tmp_path, more, said):
    root = digit_files(tmp_path / "pictures")
    with pytest.raises(UserError) as caught:
        make_trainer(*words(root, *more))
    assert str(caught.value) == said.format(root=root)


def mnist(root, train=60, test=30):
    """Files as MNIST's, of random pixels."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes())
        labels = np.arange(count, dtype=np.uint8) % 10
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return root


def test_a_sets_own_test_images_choose_only_where_they_do_not_test(tmp_path):
    def data_of(*more):
        given = ["data=mnist", "data.download=false", "data.image_size=28", f"data.root={mnist_root}", *more]
        return load_data(load(given).config.data, NORM, CPU, 0)

    mnist_root = mnist(tmp_path)
    plain = data_of()
    assert (plain.train.samples, plain.val.samples, plain.test) == (60, 30, None)
    assert plain.held_out == "the set's own test images"
    tested = data_of("data.test=true", "data.held_out=0.2")
    assert (tested.train.samples, tested.val.samples) == (48, 12)
    assert torch.equal(tested.test.images, plain.val.images)
    assert set(torch.bincount(tested.val.targets).tolist()) == {1, 2}
    assert torch.bincount(tested.train.targets, minlength=10).min() >= 4
    fold = data_of("data.fold=1", "data.folds=3")
    assert (fold.train.samples, fold.val.samples, fold.test) == (40, 20, None)


def test_scenes_to_test_have_digits_of_their_own(make_trainer, tmp_path):
    scenes = [f"data.root={tmp_path}", "data.train_scenes=5", "data.val_scenes=4", "data.test_scenes=3", "data.scene_pixels=64"]
    data = make_trainer("task=detection", "model=fcos_tiny", *scenes, "data.digit_pixels=[14,24]", "data.workers=0", "data.test=0.3").data
    assert [loader.samples for loader in (data.train, data.val, data.test)] == [5, 4, 3]
    config = load(["task=detection", "data.test=0.3"]).config.data
    known = [{glyph.tobytes() for glyph in glyphs} for glyphs, _ in _digits(config)]
    assert [len(each) for each in known] == pytest.approx([0.5 * 1797, 0.2 * 1797, 0.3 * 1797], abs=3)
    assert not known[2] & (known[0] | known[1])


def test_pairs_to_test_are_of_digits_of_their_own(make_trainer):
    data = make_trainer(
        *("task=preference", "loss=bradley_terry", "data=digit_pairs", "data.image_size=16", "data.test=0.2"),
        *("data.train_pairs=50", "data.val_pairs=40", "data.test_pairs=30"),
    ).data
    used = [{digit for key in loader.keys for digit in key.split("-")} for loader in (data.train, data.val, data.test)]
    assert [loader.samples for loader in (data.train, data.val, data.test)] == [50, 40, 30]
    assert not used[0] & used[1]
    assert not (used[0] | used[1]) & used[2]


def values_of(folder):
    """Every metric with the steps that it was recorded at."""
    found = {}
    for line in (folder.path / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.get("values", {}).items() if record["kind"] == "metrics" else ():
            found.setdefault(name, []).append((record["step"], value))
    return found


@pytest.mark.parametrize("ema", [[], ["trainer.ema=0.5"]], ids=["plain", "ema"])
def test_the_best_weights_are_scored_once_on_the_test_images(make_trainer, run_folder, quiet, ema):
    trainer = make_trainer(*SMALL, "data.test=0.1", "trainer.epochs=3", "data.train_share=0.2", *ema)
    trainer.fit(run_folder, quiet)
    found = values_of(run_folder)
    ((step, top1),) = found["test/top1"]
    assert step == trainer.done
    assert found["test/samples"] == [(step, 180.0)]
    best, last = (torch.load(run_folder.path / "checkpoints" / f"{name}.pt", weights_only=True) for name in ("best", "last"))
    kept = trainer.model.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in last["model"].items()), "the model is the last one again"
    model = trainer.task.model()
    model.load_state_dict(best["ema"] or best["model"])
    test = trainer.data.test
    with torch.no_grad():
        guess = model.eval()((test.images - test.mean) / test.std).argmax(1)
    assert top1 == pytest.approx((guess == test.targets).float().mean().item(), abs=1e-6)
    from lab.training.summary import rows

    table = rows(trainer, trainer.values | trainer.finish())
    assert table["test top-1"] == f"{top1:.2%}"
    assert table["test"].startswith("180 samples, scored once with the best epoch's weights; loss ")


def test_a_run_that_was_killed_before_the_test_is_scored_when_it_goes_on(make_trainer, run_folder, quiet):
    from lab.run.folder import RunFolder

    given = [*SMALL, "data.test=0.1", "data.train_share=0.2"]
    trainer = make_trainer(*given)
    trainer.fit(run_folder, quiet)
    killed = RunFolder(run_folder.path.parent, "killed", {})
    shutil.copytree(run_folder.path / "checkpoints", killed.path / "checkpoints")
    again = make_trainer(*given)
    again.restore(torch.load(killed.path / "checkpoints" / "last.pt", weights_only=True))
    again.fit(killed, quiet)
    killed.close("FINISHED")
    whole, rest = ({name: v for name, v in values_of(each).items() if name.startswith("test/")} for each in (run_folder, killed))
    assert rest == whole
    assert whole["test/top1"]
    assert "train/loss" not in values_of(killed)


def test_a_longer_run_says_that_its_test_images_were_scored(tmp_path, capsys):
    import train

    runs = tmp_path / "runs"
    given = [*SMALL, "data.test=0.1", "data.train_share=0.1", "model=tiny_resnet", "trainer.device=cpu", *ALONE]
    assert train.main([*given, f"trainer.runs={runs}"]) == 0
    assert "warning" not in capsys.readouterr().out
    (folder,) = runs.iterdir()
    assert train.main([f"resume={folder}", "trainer.epochs=3"]) == 0
    said = capsys.readouterr().out
    assert "warning: the test images were scored before" in said
    assert "test top-1" in said

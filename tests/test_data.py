"""Folders of images, and weights and groups from CSV files."""

import pytest
import torch
from PIL import Image

from lab.base.errors import UserError


@pytest.fixture
def pictures(tmp_path):
    for part, count in (("train", 6), ("val", 3)):
        for number, name in enumerate(("cat", "dog", "owl")):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 30), (80 * number, 10 * i, 60)).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def words(pictures, *more):
    return ["data=folder", f"data.root={pictures}", "data.image_size=32", "data.batch_size=5", "data.workers=0", *more]


def table(tmp_path, text):
    path = tmp_path / "notes.csv"
    path.write_text(text)
    return f"data.csv={path}"


def every_row(header="path,weight,group", row="train/{name}/{i}.png,{weight},{group}", change=None):
    lines = [header]
    for number, name in enumerate(("cat", "dog", "owl")):
        lines += [row.format(name=name, i=i, weight=i + number / 10, group=number % 2) for i in range(6)]
    if change:
        at, line = change
        lines[at] = line
    return "\n".join(lines) + "\n"


def test_weights_and_groups_of_a_csv_file_reach_their_images(make_trainer, pictures, tmp_path):
    loss = ["loss=preference_bce", "loss.group_weight=[1,3]"]
    for part in ("train", "val"):
        (pictures / part / "owl").rename(pictures / part / "owle\u0301")  # as macOS writes é
    trainer = make_trainer(*words(pictures, table(tmp_path, every_row().replace("owl", "owl\u00e9")), *loss))
    paths = trainer.data.train.keys
    for batch in trainer.data.train:
        for index, weight, group, target in zip(batch.index, batch.weight, batch.group, batch.target, strict=True):
            number = int(paths[index].rpartition("/")[2].removesuffix(".png"))
            assert weight.item() == pytest.approx(number + target.item() / 10)
            assert group.item() == target.item() % 2
        trainer.update([batch])
    assert trainer.guard.total.item() == 0


def test_digits_take_a_csv_file_by_index(make_trainer, tmp_path):
    from sklearn.datasets import load_digits

    labels = load_digits().target
    lines = ["index,label,weight", *(f"{i},{label},{1 + i % 3}" for i, label in enumerate(labels))]
    trainer = make_trainer("data.image_size=16", "data.augment=false", table(tmp_path, "\n".join(lines)))
    keys = {int(weight) for batch in trainer.data.train for weight in batch.weight}
    assert keys == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (every_row(change=(4, "train/cat/3.png,heavy,0")), ["row 5", "column weight", "'heavy'"]),
        (every_row(change=(4, "train/cat/3.png,1,1.5")), ["row 5", "column group", "'1.5'"]),
        (every_row(change=(4, "train/cat/3.png,1")), ["row 5", "column group", "empty"]),
        (every_row(change=(4, "train/cat/2.png,1,0")), ["row 5", "column path", "already given in row 4"]),
        (every_row(change=(4, "train/cat/33.png,1,0")), ["1 of 18 training samples", "train/cat/3.png"]),
        (every_row("path,wieght,group"), ["row 1", "wieght", "'weight'"]),
        (every_row("path,label,group", "train/{name}/{i}.png,dog,{group}"), ["row 2", "column label", "'dog'", "'cat'"]),
        ("weight,group\n1,0\n", ["row 1", "path or index"]),
        ("path,label\n", ["row 1", "weight or group"]),
    ],
)
def test_a_fault_of_a_csv_file_is_named(make_trainer, pictures, tmp_path, text, said):
    with pytest.raises(UserError) as caught:
        make_trainer(*words(pictures, table(tmp_path, text)))
    assert [each for each in ["notes.csv", *said] if each not in str(caught.value)] == [], str(caught.value)


def test_faults_of_a_folder_are_named(make_trainer, pictures):
    with pytest.raises(UserError, match=r"data.root=.*nowhere"):
        make_trainer(*words(pictures / "nowhere"))
    with pytest.raises(UserError, match=r"data.val=.*holdout"):
        make_trainer(*words(pictures, "data.val=holdout"))
    (pictures / "val" / "fox").mkdir()
    Image.new("RGB", (8, 8)).save(pictures / "val" / "fox" / "0.png")
    with pytest.raises(UserError, match="different classes: fox"):
        make_trainer(*words(pictures))
    with pytest.raises(UserError, match="use one of them"):
        make_trainer("data.csv=some.csv", "data.class_weight={1: 2}")


def test_digits_are_split_by_class_and_without_overlap(make_trainer):
    one, two = (make_trainer("data.image_size=16", "data.augment=false", f"seed={seed}") for seed in (0, 1))
    assert (one.data.train.samples, one.data.val.samples) == (1437, 360)
    per_class = torch.bincount(one.data.val.targets, minlength=10)
    assert per_class.min() >= 34
    assert torch.equal(one.data.val.images, two.data.val.images)
    train = {tuple(image.flatten().tolist()) for image in one.data.train.images}
    assert sum(tuple(image.flatten().tolist()) in train for image in one.data.val.images) == 0


def test_models_of_a_fixed_size_take_the_datas(make_trainer):
    trainer = make_trainer("model=vit_tiny", "data.image_size=32", "+model.args.patch_size=8")
    assert trainer.model.patch_embed.grid_size == (4, 4)
    assert trainer.model(next(iter(trainer.data.val)).images[:2]).shape == (2, 10)

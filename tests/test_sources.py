"""What holds for every source of images of one class each: the same images, written in each form, are the same data."""

import contextlib
import io
import json
import re
import shutil
import tarfile
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image

from lab.base.errors import UserError
from lab.config.schema import TrainConfig
from lab.data.images import files as images
from lab.data.load import load_data
from lab.data.sets import Chained, Norm
from lab.data.specs import SOURCES
from lab.run.saved import _refuse_seen, refuse_changed

NAMES = ["ant", "bee", "cow"]
CPU = torch.device("cpu")
FEW = {"image_size": 16, "batch_size": 4, "workers": 0, "crop_pct": 1.0, "interpolation": "nearest", "augment": False}
CUSTOM = """
import torch
class Made(torch.utils.data.Dataset):
    classes = ["ant", "bee", "cow"]
    def __init__(self, rows):
        self.rows = rows
        self.targets = [self.classes.index(name) for _, name in rows]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, position):
        return torch.full((3, 16, 16), 3 * self.rows[position][0], dtype=torch.uint8), self.targets[position]
def made(split, **parts):
    return Made(parts[split]) if split in parts else None
"""


def rows(numbers, shift=0):
    """Images as bright as their number, of classes in turn."""
    return [(number, NAMES[(number + shift) % 3]) for number in numbers]


def png(number):
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (3 * number,) * 3).save(file, "PNG")
    return file.getvalue()


def folder(root, parts):
    for part, name, number in ((part, name, number) for part, found in parts.items() for number, name in found):
        (root / part / name).mkdir(parents=True, exist_ok=True)
        (root / part / name / f"{number}.png").write_bytes(png(number))
    return {"root": str(root)} | ({"test": "test"} if "test" in parts else {})


def table(root, parts):
    root.mkdir(exist_ok=True)
    lines = ["path,label,part"]
    for part, name, number in ((part, name, number) for part, found in parts.items() for number, name in found):
        (root / f"{number}.png").write_bytes(png(number))
        lines.append(f"{number}.png,{name},{part}")
    (root / "labels.csv").write_text("\n".join(lines))
    return {"file": str(root / "labels.csv")} | ({"split": "part"} if "val" in parts else {})


def npz(root, parts):
    root.mkdir(exist_ok=True)
    for part, found in parts.items():
        pixels = np.stack([np.full((16, 16, 3), 3 * number, np.uint8) for number, _ in found])
        np.savez(root / f"{part}.npz", images=pixels, labels=np.array([name for _, name in found]))
    return {"file" if part == "train" else part: f"{root / part}.npz" for part in parts}


def webdataset(root, parts):
    root.mkdir(exist_ok=True)
    for part, found in parts.items():
        with tarfile.open(root / f"{part}.tar", "w") as tar:
            for number, name in found:
                for ending, content in (("png", png(number)), ("cls", name.encode())):
                    info = tarfile.TarInfo(f"{number}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return {"shards" if part == "train" else part: f"{root / part}.tar" for part in parts}


def hf(root, parts):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=NAMES)})
    made = {
        {"val": "validation"}.get(part, part): datasets.Dataset.from_dict(
            {
                "picture": [{"bytes": png(number), "path": None} for number, _ in found],
                "kind": [NAMES.index(name) for _, name in found],
            },
            kinds,
        )
        for part, found in parts.items()
    }
    datasets.DatasetDict(made).save_to_disk(str(root))
    return {"path": str(root)} | ({"test": "test"} if "test" in parts else {})


def custom(root, parts):
    root.mkdir(exist_ok=True)
    (root / "made.py").write_text(CUSTOM)
    return {"target": f"{root / 'made.py'}:made", "args": dict(parts)}


WRITERS = {each.__name__: each for each in (folder, table, npz, webdataset, hf, custom)}
TWO = {"train": range(12), "val": range(12, 18)}
FILES = ("folder", "table", "webdataset")
"""Sources whose images are checked before a run."""


@pytest.fixture(params=WRITERS)
def source(request):
    return request.param


def configured(form, settings):
    return SOURCES[form].schema(**{"name": form} | FEW | settings)


@pytest.fixture
def opened(tmp_path):
    """Open data of these parts, written in a form, or where `settings` name it."""

    def open_data(form, parts, **settings):
        written = WRITERS[form](tmp_path / "data", parts) if parts else {}
        return load_data(configured(form, written | settings), Norm([0.5] * 3, [0.5] * 3), CPU, 0)

    return open_data


def seen(data, loader):
    """Return each sample's number, as its pixels say it, and its class, in the order of the keys."""
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (data.norm.mean, data.norm.std))
    found = {
        index: (round(float(image.mean()) * 255 / 3), data.classes[int(target)])
        for batch in loader
        for index, image, target in zip(batch.index.tolist(), batch.images * std + mean, batch.target, strict=True)
    }
    assert sorted(found) == list(range(loader.samples)), "each sample once"
    assert len(set(loader.keys)) == loader.samples
    return [found[index] for index in sorted(found)]


def test_each_part_has_its_images_with_their_classes(opened, source):
    parts = {"train": rows(range(30)), "val": rows(range(30, 39)), "test": rows(range(39, 45))}
    data = opened(source, parts)
    assert (data.classes, data.counts.tolist()) == (NAMES, [10, 10, 10])
    for part, expected in parts.items():
        assert sorted(seen(data, getattr(data, part))) == sorted(expected)
    assert sorted(seen(data, data.plain())) == sorted(parts["train"])
    assert data.held_out.startswith("of ")
    assert [note for note in data.notes if "no training image" in note] == []


@pytest.mark.parametrize("more", [{"held_out": 0.2}, {"folds": 5, "fold": 2}], ids=["share", "fold"])
def test_equal_shares_of_the_classes_are_held_out_by_the_splits_seed(opened, source, more):
    parts = {"train": rows(range(30))}
    data, other, again = (opened(source, parts, **more, **extra) for extra in ({}, {"split_seed": 1}, {"batch_size": 8, "augment": True}))
    train, val = (seen(data, loader) for loader in (data.plain(), data.val))
    assert sorted(train + val) == sorted(parts["train"])
    assert [[name for _, name in val].count(each) for each in NAMES] == [2, 2, 2]
    assert data.held_out.endswith("data.held_out=0.2" if "held_out" in more else "data.fold=2 of data.folds=5")
    assert seen(again, again.val) == val
    assert seen(other, other.val) != val


@pytest.mark.parametrize(("form", "share"), [("table", "test"), ("hf", "test_share")])
def test_a_share_of_the_images_is_for_testing(opened, form, share):
    data = opened(form, {"train": rows(range(30))}, **{share: 0.2}, held_out=0.2)
    found = [seen(data, loader) for loader in (data.train, data.val, data.test)]
    assert [len(each) for each in found] == [18, 6, 6]
    assert sorted(row for each in found for row in each) == sorted(rows(range(30)))
    with pytest.raises(UserError, match=rf"^data.{share}=0.2: divides the training images, .* Leave data.{share} out\.$"):
        opened(form, {"train": rows(range(12)), "val": rows(range(12, 18))}, **{share: 0.2})


def test_a_fold_beside_held_out_images_is_refused(opened, source):
    with pytest.raises(UserError, match=r"^data.fold=1: divides the training images, but .* already, those of .*\. Leave data.fold out\.$"):
        opened(source, {"train": rows(range(12)), "val": rows(range(12, 18))}, fold=1)


def test_images_and_labels_identify_the_data(opened, source, tmp_path):
    """Of a saved model's data, which a random split divides: a label that changed, or an image more, scores no model."""

    def written(found):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        config = configured(source, WRITERS[source](tmp_path / "data", {"train": found}))
        return load_data(config, Norm([0.5] * 3, [0.5] * 3), CPU, 0), TrainConfig(data=config)

    one, config = written(rows(range(30)))
    state = {"config": {"data": asdict(config.data)}, "samples": 24, "data": one.identity("train")}
    for found, said in (
        (rows(range(30)), None),
        (rows(range(30), 1), "has other images or labels than the model was trained on"),
        (rows(range(33)), "has 26 images to train on, while the model was trained on 24"),
    ):
        data, config = written(found)
        assert (data.identity("train") == one.identity("train")) == (said is None)
        assert data.identity("train") != data.identity("val")
        with contextlib.nullcontext() if said is None or source == "custom" else pytest.raises(UserError, match=said):
            refuse_changed(state, config, data)
        if len(found) == 30:  # a state of a version that did not record it
            refuse_changed({name: value for name, value in state.items() if name != "data"}, config, data)


@pytest.mark.parametrize("form", ["folder", "npz", "webdataset", "hf"])
def test_what_was_trained_on_is_not_scored(form, tmp_path):
    """Parts are compared by their files, or by the data set's folder and the split."""
    known = asdict(configured(form, WRITERS[form](tmp_path / "data", {part: rows(range(6)) for part in ("train", "val", "test")})))
    train, val, test = SOURCES[form].parts
    known[val] = known[val] or {"folder": "val", "hf": "validation"}[form]
    places = SOURCES[form].places_of(known)
    assert [len(places[part]) for part in ("train", "val", "test")] == [1, 1, 1]
    assert len(set.union(*places.values())) == 3
    for more, said in (
        ({val: known[train]}, f"data.{val}=.*: the model was trained on these images"),
        ({test: known[train]}, f"data.{test}=.*: the model was trained on these images"),
        ({test: known[val]}, f"data.{test}=.*: the best epoch was chosen by these images"),
        ({"held_out": 0.5}, "data.held_out=0.5: the model was trained with data.held_out=0.2"),
        ({"split_seed": 2}, "data.split_seed=2: the model was trained with"),
    ):
        with pytest.raises(UserError, match=said):
            _refuse_seen(known, known | more)
    _refuse_seen(known, known)
    for name in SOURCES[form].splits:
        with pytest.raises(UserError, match=f"data.{name}=0.5: the model was trained with"):
            _refuse_seen(known, known | {name: 0.5})


@pytest.mark.parametrize("form", ["folder", "table", "npz", "webdataset"])
def test_named_classes_have_their_order_and_others_are_refused(opened, form):
    parts = {"train": rows(range(12)), "val": rows(range(12, 18))}
    data = opened(form, parts, classes=["cow", "eel", "bee", "ant"])
    assert (data.classes, data.counts.tolist()) == (["cow", "eel", "bee", "ant"], [4, 0, 4, 4])
    assert sorted(seen(data, data.train)) == sorted(parts["train"])
    with pytest.raises(UserError, match=r"class: 'cow' is not known"):
        opened(form, parts, classes=["ant", "bee"])


@pytest.mark.parametrize("form", ["table", "npz", "webdataset"])
def test_a_label_is_the_index_of_a_class_that_is_named(opened, form):
    parts = {part: [(number, str(NAMES.index(name))) for number, name in rows(numbers)] for part, numbers in TWO.items()}
    data = opened(form, parts, classes=NAMES)
    assert sorted(seen(data, data.val)) == sorted(rows(TWO["val"]))
    for others in (["ant", "bee"], ["0", "1", "3"]):
        with pytest.raises(UserError, match=r"class: '2' is not known"):
            opened(form, parts, classes=others)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("folder", "data.train and data.val hold different classes: cow in one of them only"),
        ("table", "data.label=label: no training image is of cow, which held-out images have"),
        ("npz", r"data.val=.*: class: 'cow' is not known"),
        ("webdataset", r"val.tar: sample 14: class: 'cow' is not known"),
        ("hf", "no training image is of cow, which held-out images have"),
        ("custom", "no training image is of cow, which held-out images have"),
    ],
)
def test_a_class_that_only_held_out_images_have_is_named(opened, form, said):
    parts = {"train": [row for row in rows(TWO["train"]) if row[1] != "cow"], "val": rows(TWO["val"])}
    if form in ("hf", "custom"):
        assert said in opened(form, parts).notes
    else:
        with pytest.raises(UserError, match=said):
            opened(form, parts)


def test_weights_of_classes_and_of_samples_reach_their_images(opened, source, tmp_path):
    def weights(**more):
        data = opened(source, {"train": rows(range(12))}, **more)
        return {
            data.train.keys[index]: (float(weight), data.classes[int(target)])
            for batch in data.train
            for index, weight, target in zip(batch.index.tolist(), batch.weight, batch.target, strict=True)
        }

    found = weights(class_weight={"ant": 2.0, 1: 3.0})
    assert len(found) == 9
    assert all(weight == {"ant": 2, "bee": 3, "cow": 1}[name] for weight, name in found.values())
    if source != "table":  # whose columns have them
        given = {key: 1 + number / 8 for number, key in enumerate(sorted(found))}
        (tmp_path / "notes.csv").write_text("\n".join(["path,weight", *(f"{key},{weight}" for key, weight in given.items())]))
        assert {key: weight for key, (weight, _) in weights(csv=str(tmp_path / "notes.csv")).items()} == given


def damage(root, form, number, change):
    """Change an image in its file, or in its shard without another size."""
    if form == "webdataset":
        with tarfile.open(root / "train.tar") as tar:
            member = tar.getmember(f"{number}.png")
        whole = bytearray((root / "train.tar").read_bytes())
        first = member.offset_data
        whole[first : first + member.size] = change(bytes(whole[first : first + member.size]))
        (root / "train.tar").write_bytes(whole)
    else:
        (path,) = root.rglob(f"{number}.png")
        path.write_bytes(change(path.read_bytes()))


def cut(content):
    return content[:40] + bytes(len(content) - 40)


def spoilt(content):
    """The pixels are wrong, while the head and the end are those of a PNG."""
    return content[:45] + bytes(8) + content[53:]


@pytest.mark.parametrize("form", FILES)
def test_damaged_images_are_named_together_or_left_out(opened, form, tmp_path, capsys, monkeypatch):
    """What was found of many images is kept, and looked at again where files change."""
    where = WRITERS[form](tmp_path / "data", {"train": rows(range(30))})
    for number in (7, 20):
        damage(tmp_path / "data", form, number, cut)
    monkeypatch.setattr(images, "CACHE", tmp_path / "checked")
    for few in (5000, 4, 4):
        monkeypatch.setattr(images, "FEW", few)
        with pytest.raises(UserError) as caught:
            opened(form, {}, **where)
        head, *lines = str(caught.value).splitlines()
        assert head.endswith(": 2 corrupt entries; data.skip_corrupt=true leaves them out.")
        assert {re.search(r"(\d+)(\.png)?: cannot be read as an image", line)[1] for line in lines} == {"7", "20"}
        assert images.CACHE.exists() == (few == 4)
    data = opened(form, {}, **where, skip_corrupt=True)
    assert "2 corrupt entries are left out" in capsys.readouterr().out
    kept = [row for row in rows(range(30)) if row[0] not in (7, 20)]
    assert sorted(seen(data, data.train) + seen(data, data.val)) == sorted(kept)
    (stamp,) = (tmp_path / "checked").iterdir()
    assert len(json.loads(stamp.read_text())) == 2
    damage(tmp_path / "data", form, 7, lambda _: png(7))
    for check in ("headers", "pixels"):
        with pytest.raises(UserError, match="1 corrupt entries"):
            opened(form, {}, **where, check=check)
    damage(tmp_path / "data", form, 9, cut)
    (next((tmp_path / "data").rglob("9.png"), tmp_path / "data" / "train.tar").parent / "new.txt").touch()
    with pytest.raises(UserError, match="2 corrupt entries"):
        opened(form, {}, **where)


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_is_damaged_within_is_found_before_the_run_or_named_in_it(opened, form, workers, tmp_path):
    where = WRITERS[form](tmp_path / "data", {"train": rows(range(12))})
    damage(tmp_path / "data", form, 3, spoilt)
    data = opened(form, {}, **where | {"workers": workers})
    with pytest.raises(UserError, match=r"3(\.png)?: cannot be read as an image") as caught:
        list(Chained([data.plain(), data.val]))
    assert str(caught.value).startswith(str(tmp_path))
    assert "data.check=pixels with data.skip_corrupt=true" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(UserError, match="1 corrupt entries"):
        opened(form, {}, **where, check="pixels")
    data = opened(form, {}, **where, check="pixels", skip_corrupt=True)
    assert data.train.samples + data.val.samples == 11


@pytest.mark.parametrize("form", FILES)
def test_a_part_without_a_usable_image_is_refused(opened, form, tmp_path):
    where = WRITERS[form](tmp_path / "data", {"train": rows(range(6)), "val": rows(range(6, 12))})
    for number in range(6):
        damage(tmp_path / "data", form, number, cut)
    with pytest.raises(UserError, match=r": has no image to use\.$"):
        opened(form, {}, **where, skip_corrupt=True)


@pytest.mark.parametrize("form", ["folder", "table", "npz", "webdataset", "hf"])
def test_more_bytes_than_the_limit_are_not_read(opened, form, monkeypatch, tmp_path):
    where = WRITERS[form](tmp_path / "data", {"train": rows(range(12))})
    monkeypatch.setattr(images, "most_bytes", lambda: 60)
    with pytest.raises(UserError, match=r"takes [\d,]+ bytes; at most 60 are read, and LOSSFORGE_MAX_BYTES sets another limit"):
        list(opened(form, {}, **where).train)


def test_channels_are_measured_and_read_as_they_are(opened, source):
    data = opened(source, {"train": rows(range(12))}, channels=3)
    pixels = torch.tensor([3 * number / 255 for number, _ in seen(data, data.plain())])
    assert data.norm.mean == pytest.approx([pixels.mean().item()] * 3)
    assert data.norm.std == pytest.approx([pixels.std(correction=0).item()] * 3)
    with pytest.raises(UserError, match=r"channels=2 expects|has 3 channels; 2 are expected|is not \(image, class index\)"):
        opened(source, {"train": rows(range(12))}, channels=2)


@pytest.mark.parametrize("form", [*FILES, "hf"])
@pytest.mark.parametrize("channels", [None, 3])
def test_photos_that_exif_turns_are_shown_upright(opened, form, channels, monkeypatch):
    def turned(number, turn):
        file, exif, pixels = io.BytesIO(), Image.Exif(), np.zeros((16, 16, 3), np.uint8)
        pixels[:4, :12] = 3 * number + 100
        exif[0x0112] = turn
        Image.fromarray(np.ascontiguousarray(np.rot90(pixels, {1: 0, 3: 2, 6: 1, 8: 3}[turn]))).save(file, "PNG", exif=exif)
        return file.getvalue()

    parts, found = {"train": rows(range(6)), "val": rows(range(6, 12))}, []
    for turns in ((1, 1, 1, 1), (1, 3, 6, 8)):
        monkeypatch.setitem(globals(), "png", lambda number, turns=turns: turned(number, turns[number % 4]))
        data = opened(form, parts, channels=channels)
        found.append(torch.cat([batch.images for batch in data.val]))
    assert torch.equal(*found)


@pytest.mark.parametrize("form", [*FILES, "hf"])
def test_transparency_is_said(opened, form, monkeypatch):
    def clear(number):
        file = io.BytesIO()
        Image.new("RGBA", (16, 16), (3 * number,) * 4).save(file, "PNG")
        return file.getvalue()

    monkeypatch.setitem(globals(), "png", clear)
    parts, said = {"train": rows(range(10)), "val": rows(range(10, 20))}, "10 of 10 training images have transparency (alpha)"
    assert [note for note in opened(form, parts).notes if note.startswith(f"{said}, which is left out; data.channels=4 reads it, too")]
    assert not [note for note in opened(form, parts, channels=4).notes if note.startswith(said)]

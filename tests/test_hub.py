"""Hugging Face data sets from local files: splits and columns found or named, and what is wrong with them."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from lab.base.errors import UserError
from lab.config.settings import load
from lab.run.saved import refuse_changed

datasets = pytest.importorskip("datasets")

FEW = ["data.image_size=16", "data.batch_size=8", "data.workers=0", "data.augment=false", "tracking=none"]
NAMES = ["ant", "bee", "cow"]


def rows(count, first=0):
    """Images as bright as their number, of classes in turn."""
    images = [Image.fromarray(np.full((16, 16, 3), 3 * (first + number), np.uint8)) for number in range(count)]
    return {"picture": images, "kind": [number % 3 for number in range(count)], "other": [str(number % 2) for number in range(count)]}


FEATURES = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=NAMES), "other": datasets.Value("string")})


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def save(**counts):
        parts = {name: datasets.Dataset.from_dict(rows(count, 20 * i), FEATURES) for i, (name, count) in enumerate(counts.items())}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
        return tmp_path / "saved"

    return save


def words(path, *more):
    return ["data=hf", f"data.path={path}", *FEW, *more]


def brightness(data, loader):
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (data.norm.mean, data.norm.std))
    return {
        loader.keys[index]: (round(float(image.mean()) * 255 / 3), int(target))
        for batch in loader
        for index, image, target in zip(batch.index.tolist(), batch.images * std + mean, batch.target, strict=True)
    }


def test_splits_and_columns_are_found_by_their_names_and_types(make_trainer, saved):
    data = make_trainer(*words(saved(train=12, validation=6, test=6), "data.test=test")).data
    assert data.classes == NAMES
    for number, (part, count) in enumerate((("train", 12), ("val", 6), ("test", 6))):
        found = brightness(data, getattr(data, part))
        assert found == {f"{part}-{row}": (20 * number + row, row % 3) for row in range(count)}


def test_without_a_held_out_split_some_are_held_out(make_trainer, saved):
    data = make_trainer(*words(saved(train=30), "data.test_share=0.2", "data.held_out=0.2")).data
    found = [brightness(data, getattr(data, part)) for part in ("train", "val", "test")]
    assert [len(each) for each in found] == [18, 6, 6]
    assert sorted(row for each in found for row, _ in each.values()) == list(range(30))
    assert all(target == row % 3 for each in found for row, target in each.values())
    assert make_trainer(*words(saved(train=30), "data.label=other")).data.classes == ["0", "1"]


def save_again(folder, count, shift):
    """Save a data set again, in the same folder, with so many rows and other labels by `shift`."""
    shutil.rmtree(folder)
    given = rows(count)
    given["kind"] = [(kind + shift) % 3 for kind in given["kind"]]
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(given, FEATURES)}).save_to_disk(str(folder))


@pytest.mark.parametrize(
    ("count", "shift", "said"),
    [
        (33, 0, "data.train=train: has 26 images to train on, while the model was trained on 24; "),
        (30, 1, "data.train=train: has other images or labels than the model was trained on; "),
    ],
)
def test_a_data_set_that_has_changed_scores_no_model_and_continues_no_run(make_trainer, saved, count, shift, said):
    folder = saved(train=30)
    run = make_trainer(*words(folder))
    state = {"config": {"data": run.tree["data"]}, "samples": run.data.train.samples, "data": run.identity, "classes": run.data.classes}
    same = make_trainer(*words(folder))
    refuse_changed(state, same.config, same.data)
    assert same.identity == run.identity

    save_again(folder, count, shift)
    other = make_trainer(*words(folder))
    with pytest.raises(UserError, match=said):
        refuse_changed(state, other.config, other.data)
    with pytest.raises(UserError, match="the training data has changed"):
        other.restore(state)

    earlier = {name: value for name, value in state.items() if name != "data"}  # of a version that did not record it
    if count == 30:
        refuse_changed(earlier, other.config, other.data)


def test_a_data_set_with_held_out_images_of_its_own_may_grow(make_trainer, saved):
    folder = saved(train=30, validation=6)
    run = make_trainer(*words(folder))
    state = {"config": {"data": run.tree["data"]}, "samples": 24, "data": "of other images"}
    refuse_changed(state, run.config, run.data)


def test_a_folder_of_images_is_opened(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for part in ("train", "validation"):
        for label, name in enumerate(("ant", "bee")):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (16, 16), (90 * label,) * 3).save(tmp_path / "images" / part / name / f"{number}.png")
    data = make_trainer(*words(tmp_path / "images")).data
    assert (data.classes, data.train.samples, data.val.samples) == (["ant", "bee"], 8, 8)
    assert all(row == 30 * target for row, target in brightness(data, data.val).values())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.image=pictur"], r"data.image=pictur: column: 'pictur' is not known.\nDid you mean 'picture'"),
        (["data.train=trian"], r"data.train=trian: split of .*: 'trian' is not known"),
        (["data.val=train"], r"different splits are expected"),
        (["data.label=other", "data.test_share=0.2"], r"data.fold and data.test_share divide the training split"),
        (["data.image=other"], r"an image is a str"),
    ],
)
def test_what_is_wrong_is_named(make_trainer, saved, more, said):
    path = saved(train=12, validation=6)
    with pytest.raises(UserError, match=said):
        list(make_trainer(*words(path, *more)).data.train)


def test_a_name_that_is_nowhere_is_refused(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"data.path=.*nothing: cannot be opened"):
        make_trainer(*words(tmp_path / "nothing"))


def test_the_library_s_name_for_it_leads_to_ours():
    with pytest.raises(UserError, match=r"data=beans: 'beans' is not known(.|\n)*data=hf asks for data.path"):
        load(["data=hf", "data.name=beans"])


def test_without_the_library_it_is_said(make_trainer, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "datasets" else find(name, *more))
    with pytest.raises(UserError, match="the library datasets is not installed"):
        make_trainer(*words("beans"))


@pytest.mark.parametrize("where", ["an address", "a file outside", "a file that is gone", "another column"])
def test_a_row_opens_no_address_and_no_file_outside(make_trainer, tmp_path, where):
    import socket

    import pyarrow
    import pyarrow.parquet

    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    address = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
    Image.new("RGB", (16, 16)).save(tmp_path / "secret.png")
    content = (tmp_path / "secret.png").read_bytes()
    cell = {
        "an address": (None, address),
        "a file outside": (None, str(tmp_path / "secret.png")),
        "a file that is gone": (None, "gone.png"),
    }.get(where, (content, None))
    image = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    columns = {
        "picture": pyarrow.array([dict(zip(("bytes", "path"), cell, strict=True))] * 12, image),
        "beside": pyarrow.array([{"bytes": None, "path": address}] * 12, image),
        "kind": pyarrow.array([0, 1, 2] * 4, pyarrow.int64()),
    }
    kinds = {"picture": datasets.Image(), "beside": datasets.Image(), "kind": datasets.ClassLabel(names=NAMES)}
    folder = tmp_path / "theirs"
    folder.mkdir()
    table = pyarrow.table(columns).replace_schema_metadata(datasets.Features(kinds).arrow_schema.metadata)
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    data = make_trainer(*words(folder, "data.image=picture")).data
    if where == "another column":
        assert sum(len(batch.target) for batch in data.train) > 0
    else:
        with pytest.raises(
            UserError, match=r"leads out of the data set|which is not opened|has the path 'gone.png', and .*theirs/gone.png is not a file"
        ) as caught:
            list(data.train)
        assert "data.check" not in str(caught.value), "data=hf has no such setting"
    with pytest.raises(TimeoutError):
        server.accept()


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("named", ["http://127.0.0.1:9/x.csv", "../x.csv", "/x.csv"])
def test_a_folders_description_names_files_of_the_folder_only(make_trainer, tmp_path, file, named):
    text = f"configs:\n- config_name: default\n  data_files: {named}\n"
    (tmp_path / file).write_text(f"---\n{text}---\n" if file == "README.md" else text)
    (tmp_path / "x.csv").write_text("a\n1\n")
    with pytest.raises(UserError, match="its description names"):
        make_trainer(*words(tmp_path))


def test_what_was_trained_on_is_not_scored(saved):
    """Splits are compared by the data set's folder or name, its configuration and the split."""
    from lab.run.saved import _refuse_seen

    path = saved(train=12, validation=6, test=6)
    known = load(words(path)).tree()["data"]
    for more, said in (
        ({"val": "train", "train": "test"}, "data.val=train: the model was trained on these images"),
        ({"test": "train"}, "data.test=train: the model was trained on these images"),
        ({"held_out": 0.5}, "data.held_out=0.5: the model was trained with"),
        ({"test_share": 0.5}, "data.test_share=0.5: the model was trained with"),
    ):
        with pytest.raises(UserError, match=said):
            _refuse_seen(known, known | more)
    _refuse_seen(known, known | {"path": "another/set", "test": "train"})

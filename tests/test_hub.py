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
        (
            ["data.label=other", "data.test_share=0.2"],
            r"data.test_share=0.2: divides the training images, .* those of the set's own held-out split",
        ),
        (["data.image=other"], r"data.image=other: holds string; a column of images is expected"),
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


def test_classes_are_the_texts_or_numbers_of_a_column(make_trainer, saved):
    path = saved(train=60)
    assert make_trainer(*words(path, "data.label=other")).data.classes == ["0", "1"]
    many = datasets.Dataset.from_dict(rows(60), FEATURES).remove_columns("other").add_column("other", [number % 11 for number in range(60)])
    shutil.rmtree(path)
    datasets.DatasetDict({"train": many}).save_to_disk(str(path))
    assert make_trainer(*words(path, "data.label=other")).data.classes == [str(number) for number in range(11)]


def test_a_parquet_file_that_unpacks_to_very_much_is_refused(make_trainer, tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    from lab.data.images import files

    cells = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(1_000_000, np.int32)), pyarrow.array(["x"]))
    pyarrow.parquet.write_table(pyarrow.table({"picture": cells}), tmp_path / "train.parquet")
    monkeypatch.setattr(files, "most_bytes", lambda: 10_000_000)
    with pytest.raises(UserError, match=r"train.parquet: takes [\d,]{9,} bytes; at most 10,000,000 are read, and LOSSFORGE_MAX_BYTES"):
        make_trainer(*words(tmp_path))


def test_a_label_of_no_class_is_named(make_trainer, tmp_path):
    """The library marks with -1 what has no label."""
    given = rows(12) | {"kind": [0, 1, 2] * 3 + [0, 1, -1]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(given, FEATURES)}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=r"data.label=kind, split train, row 11: class: '-1' is not known"):
        make_trainer(*words(tmp_path / "saved"))

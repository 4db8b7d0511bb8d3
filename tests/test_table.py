"""Images and their labels in a table: one class, several, or numbers, with columns for the split, weights and groups."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from words import ALONE

import train
from lab.base.errors import UserError
from lab.data.images import files as images
from lab.run.resume import named
from lab.run.saved import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
COUNT = 24


@pytest.fixture
def pictures(tmp_path):
    """Grey images of 16 × 16 pixels, each as bright as its number, and what a table says of them."""
    (tmp_path / "images").mkdir()
    for number in range(COUNT):
        Image.new("RGB", (16, 16), (10 * number,) * 3).save(tmp_path / "images" / f"{number}.png")
    return pandas.DataFrame(
        {
            "path": [f"images/{number}.png" for number in range(COUNT)],
            "species": ["cat", "dog", "owl"] * (COUNT // 3),
            "tags": [["", "furry", "furry; small", "small;wings"][number % 4] for number in range(COUNT)],
            "age": [number / 2 for number in range(COUNT)],
            "x": range(COUNT),
            "part": (["Train"] * 2 + ["validation"] + ["test"]) * (COUNT // 4),
            "trust": [0.5 + number for number in range(COUNT)],
            "site": ["north", "south"] * (COUNT // 2),
        }
    )


def words(file, *more):
    small = ["data.image_size=16", "data.batch_size=8", "data.workers=0", "data.augment=false", "tracking=none"]
    return ["data=table", f"data.file={file}", *small, *more]


def written(table, tmp_path, kind="csv"):
    file = tmp_path / f"labels.{kind}"
    if kind == "parquet":
        table.to_parquet(file)
    else:
        table.to_csv(file, index=False, sep="\t" if kind == "tsv" else ",")
    return file


def by_key(loader, values="target"):
    """What each sample of a loader has, by its image's number."""
    found = {}
    for batch in loader:
        for index, value in zip(batch.index.tolist(), getattr(batch, values), strict=True):
            found[int(Path(loader.keys[index]).stem)] = value.tolist()
    return found


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_every_image_has_its_rows_class(make_trainer, pictures, tmp_path, kind):
    data = make_trainer(*words(written(pictures, tmp_path, kind), "data.label=species")).data
    assert data.classes == ["cat", "dog", "owl"]
    found = by_key(data.train) | by_key(data.val)
    assert found == {number: number % 3 for number in range(COUNT)}
    assert data.train.samples + data.val.samples == COUNT
    batch = next(iter(data.val))
    brightness = (batch.images[:, 0, 0, 0] * data.norm.std[0] + data.norm.mean[0]) * 255
    numbers = [int(Path(data.val.keys[index]).stem) for index in batch.index.tolist()]
    assert brightness.round().int().tolist() == [10 * number for number in numbers]
    assert data.counts.tolist() == np.bincount(list(by_key(data.train).values())).tolist()


def test_columns_say_split_weights_and_groups(make_trainer, pictures, tmp_path):
    table = written(pictures, tmp_path)
    data = make_trainer(*words(table, "data.label=species", "data.split=part", "data.weight=trust", "data.group=site")).data
    parts = {name: sorted(by_key(getattr(data, name))) for name in ("train", "val", "test")}
    assert parts == {
        "train": [number for number in range(COUNT) if number % 4 < 2],
        "val": [number for number in range(COUNT) if number % 4 == 2],
        "test": [number for number in range(COUNT) if number % 4 == 3],
    }
    assert by_key(data.train, "weight") == {number: 0.5 + number for number in parts["train"]}
    assert by_key(data.val, "group") == {number: number % 2 for number in parts["val"]}
    assert data.groups == 2
    assert "data.split=part" in data.held_out


LABELS = {0: [], 1: ["furry"], 2: ["furry", "small"], 3: ["small", "wings"]}


@pytest.mark.parametrize("form", ["text", "list", "columns"])
def test_several_labels_are_in_a_cell_or_a_column_each(make_trainer, pictures, tmp_path, form):
    label, kind = "tags", "csv"
    if form == "list":
        pictures["tags"], kind = [LABELS[number % 4] for number in range(COUNT)], "parquet"
    if form == "columns":
        label = "[furry,small,wings]"
        for name in ("furry", "small", "wings"):
            pictures[name] = [name in LABELS[number % 4] for number in range(COUNT)]
    trainer = make_trainer("task=multilabel", "model=tiny_resnet", *words(written(pictures, tmp_path, kind), f"data.label={label}"))
    data = trainer.data
    assert data.classes == ["furry", "small", "wings"]
    found = by_key(data.train) | by_key(data.val)
    assert found == {number: [float(name in LABELS[number % 4]) for name in data.classes] for number in range(COUNT)}
    train = torch.tensor(list(by_key(data.train).values()))
    assert trainer.task.prior() == pytest.approx(train.mean().item())


def test_one_column_of_yes_and_no_is_one_class(make_trainer, pictures, tmp_path):
    pictures["furry"] = [number % 2 for number in range(COUNT)]
    file = written(pictures, tmp_path)
    trainer = make_trainer("task=multilabel", "model=tiny_resnet", *words(file, "data.label=[furry]"))
    assert trainer.data.classes == ["furry"]
    assert by_key(trainer.data.val) == {number: [number % 2] for number in by_key(trainer.data.val)}
    with pytest.raises(UserError, match=r"data.label=furry: holds yes or no, as a column of one class; write data.label=\[furry\]"):
        make_trainer("task=multilabel", "model=tiny_resnet", *words(file, "data.label=furry"))


def test_numbers_of_one_or_more_columns_are_targets(make_trainer, pictures, tmp_path):
    file = written(pictures, tmp_path)
    trainer = make_trainer("task=regression", *words(file, "data.label=age"))
    assert by_key(trainer.data.train) | by_key(trainer.data.val) == {number: [number / 2] for number in range(COUNT)}
    trainer = make_trainer("task=regression", *words(file, "data.label=[age,x]", "data.fold=1", "data.folds=4"))
    assert trainer.data.classes == ["age", "x"]
    assert by_key(trainer.data.val) == {number: [number / 2, float(number)] for number in by_key(trainer.data.val)}
    assert trainer.data.val.samples == COUNT // 4
    ages = torch.tensor(list(by_key(trainer.data.train).values()))
    torch.testing.assert_close(trainer.model.target_mean, ages.mean(0))


def test_a_run_on_a_table_is_scored_again_and_predicts(pictures, tmp_path, warm):
    """From the command line, with a table whose images lie elsewhere."""
    (tmp_path / "tables").mkdir()
    file = written(pictures, tmp_path / "tables")

    def app(name, *more):
        done = warm.run(str(ROOT / "experiments" / name), more, tmp_path, apart=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    chosen = words(Path("tables", "labels.csv"), f"data.root={tmp_path}", "data.label=species", "trainer.device=cpu", "model=tiny_resnet")
    app("train.py", *chosen, "trainer.max_updates=2", "tracking.model=false")
    (run,) = (tmp_path / "runs").iterdir()
    sets = next(record for line in (run / "metrics.jsonl").open() if (record := json.loads(line))["kind"] == "data")["sets"]
    assert [(each["name"], each["context"]) for each in sets] == [("labels", "training"), ("labels", "validation")]
    app("evaluate.py", f"checkpoint=runs/{run.name}", "trainer.device=cpu", "tracking=none")
    (folder,) = (tmp_path / "runs").glob("*evaluate*")
    predictions = pandas.read_csv(folder / "predictions.csv").set_index("sample")
    expected = pictures.set_index("path")["species"]
    assert (predictions["true"] == expected[predictions.index]).all()
    app("predict.py", f"checkpoint=runs/{run.name}", "images/3.png", "trainer.device=cpu", "out=said")
    (line,) = (tmp_path / "said" / "predictions.jsonl").read_text().splitlines()
    assert {each["label"] for each in json.loads(line)["found"]} == {"cat", "dog", "owl"}
    table = pandas.read_csv(file)
    shutil.copytree(tmp_path / "images", tmp_path / "others" / "images")
    pandas.concat([table, table.assign(path="others/" + table["path"])]).to_csv(file, index=False)
    done = warm.run(str(ROOT / "experiments" / "evaluate.py"), [f"checkpoint=runs/{run.name}", "tracking=none"], tmp_path, apart=True)
    assert done.returncode == 1
    assert "the split holds out ones that it has seen" in done.stderr


def changed(table, row, column, value):
    return table.assign(**{column: [value if number == row else each for number, each in enumerate(table[column])]})


@pytest.mark.parametrize(
    ("more", "change", "said"),
    [
        (
            ["data.label=specie"],
            None,
            r"=specie: .*labels.csv has no such column: 'specie' is not known.\nDid you mean 'species'.*\nChoices: age, part, path, site",
        ),
        (["data.label=[species,tags]"], None, r"data.label=.*: task=classification takes one column"),
        (["data.label=3"], None, r"data.label=3: a column's name, or a list"),
        (["data.label=species"], ("species", 4, ""), r"labels.csv, row 6, column species: is empty"),
        (["data.label=species"], ("path", 4, "images/2.png"), r"row 6, column path: 'images/2.png' is given twice"),
        (["data.label=species"], ("path", 4, "./images/2.png"), r"row 6, .*'./images/2.png' is given twice: row 4 names this image, too"),
        (["data.label=species"], ("path", 4, "images/2.PNG"), r"row 6, column path: 'images/2.png' is given twice: row 4"),
        (["data.label=species"], ("path", 4, "images/none.png"), r"1 corrupt entries.*\nimages/none.png: no such file"),
        (["data.label=species", "data.split=part"], ("part", 4, "later"), r"row 6, column part: 'later' is not known"),
        (
            ["data.label=species", "data.split=part", "data.test=0.2"],
            None,
            r"data.test=0.2: divides the training images, .* those of labels.csv, data.split=part. Leave data.test out",
        ),
        (["data.label=species", "data.split=part"], ("species", 6, "elk"), r"no training image is of elk, .* Move rows of it to train, or"),
        (["data.label=species", "data.weight=trust"], ("trust", 2, -1), r"row 4, column trust: '-1.0'; a finite number of at least 0"),
        (["data.label=species", "data.classes=[cat,dog]"], None, r"row 4, column species: class: 'owl' is not known"),
        (["data.label=species", "data.weight=trust", "data.class_balance=0.9"], None, r"by data.weight and data.group, or by class"),
        (["data.label=age"], None, r"data.label=age: has 24 different values in 24 rows; .*Numbers are for task=regression"),
        (
            ["data.label=species", "data.root=."],
            None,
            r"data.root=.*: has none of the images .* data.image=path names, such as images/0.png",
        ),
        (["task=regression", "data.label=age"], ("age", 2, "old"), r"row 4, column age: 'old'; a finite number is expected"),
        (["task=regression", "data.label=age", "data.mixup=0.2"], None, r"data.mixup=0.2: is for images of one class each"),
        (["data.label=species", "data.classes=[cat,dog,owl,cat]"], None, r"data.classes=.*: 'cat' is named twice"),
        (["task=multilabel", "data.label=tags", "data.separator=|"], None, r"data.separator=\|: divides no cell .*, but 12 of 24 have ';'"),
        (["task=multilabel", "data.label=[age,x]"], None, r"row 3, column age: '0.5'; 0 or 1 is expected"),
    ],
)
def test_what_is_wrong_is_named_with_its_row_and_column(make_trainer, pictures, tmp_path, more, change, said):
    table = pictures.astype(object)
    if change:
        table = changed(table, change[1], change[0], change[2])
    with pytest.raises(UserError, match=said):
        make_trainer(*words(written(table, tmp_path), *more), "model=tiny_resnet")


def test_columns_that_differ_by_a_space_are_refused(make_trainer, pictures, tmp_path):
    with pytest.raises(UserError, match=r"data.file=.*labels.csv: has two columns 'species'"):
        make_trainer(*words(written(pictures.rename(columns={"tags": " species"}), tmp_path), "data.label=species"))


@pytest.mark.parametrize("column", ["path", "species", "site"])
@pytest.mark.parametrize(
    ("cell", "said"), [(None, "is empty"), (["a", "b"], r"\['a' 'b'\]; one value is expected")], ids=["missing", "list"]
)
def test_a_cell_of_parquet_without_one_value_is_named(make_trainer, pictures, tmp_path, column, cell, said):
    cells = pandas.Series([cell] * COUNT) if cell else pictures[column].where(pictures["x"] != 0).convert_dtypes()
    file = written(pictures.assign(**{column: cells}), tmp_path, "parquet")
    with pytest.raises(UserError, match=rf"row 1, column {column}: {said}"):
        make_trainer(*words(file, "data.label=species", "data.group=site"))


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        ([0.0, 1.0], ["0", "1"]),
        ([b"cat", "café".encode()], ["café", "cat"]),
        ([b"c\xe9", b"d"], ["c\\xe9", "d"]),
        ([0.5, 1.0], ["0.5", "1"]),
    ],
    ids=["integers that were floats", "bytes", "bytes that are not UTF-8", "floats"],
)
def test_classes_of_parquet_are_their_texts(make_trainer, pictures, tmp_path, cells, classes):
    table = pictures.assign(species=(cells * COUNT)[:COUNT], path=pictures["path"].str.encode("utf-8"))
    data = make_trainer(*words(written(table, tmp_path, "parquet"), "data.label=species")).data
    assert sorted(data.classes) == sorted(classes)
    assert data.counts.sum() == data.train.samples


def test_a_class_that_only_held_out_images_have_is_taken_where_it_is_named(make_trainer, pictures, tmp_path):
    table = changed(pictures, 6, "species", "elk")
    data = make_trainer(*words(written(table, tmp_path), "data.label=species", "data.split=part", "data.classes=[cat,dog,owl,elk]")).data
    assert "no training image is of elk, which held-out images have" in data.notes


@pytest.mark.parametrize("ending", [".png", ".PNG"])
def test_images_that_are_named_without_their_ending_are_found(make_trainer, pictures, tmp_path, ending):
    """As in Kaggle's tables."""
    for path in (tmp_path / "images").iterdir():
        path.rename(path.with_suffix(ending))
    file = written(pictures.assign(path=pictures["path"].str.removesuffix(".png")), tmp_path)
    data = make_trainer(*words(file, "data.label=species")).data
    assert by_key(data.train) | by_key(data.val) == {number: number % 3 for number in range(COUNT)}
    assert f"data.image=path: names no ending, and files {ending} are read" in data.notes


def test_a_folder_is_listed_once_for_all_names_and_endings(tmp_path, monkeypatch):
    """To ask for each takes minutes on a network's file system."""
    (tmp_path / "a.png").touch()
    names = images.Names(tmp_path)
    monkeypatch.setattr(os.path, "exists", lambda _: pytest.fail("the system was asked"))
    assert [names.holds(each) for each in ("a.png", "./a.png", "a", "a.jpg", "none/a.png")] == [True, True, False, False, False]


def test_missing_labels_of_parquet_are_no_class(make_trainer, pictures, tmp_path):
    for tags in (pandas.array(["small;furry", None] * (COUNT // 2), dtype="string"), [["small", None], ["furry"]] * (COUNT // 2)):
        data = make_trainer("task=multilabel", *words(written(pictures.assign(tags=tags), tmp_path, "parquet"), "data.label=tags")).data
        assert data.classes == ["furry", "small"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("labels.xlsx", b"", "a file .csv, .tsv or .parquet is expected"),
        ("labels.csv", None, "cannot be read"),
        ("labels.csv", b"path,label\n", "has no rows"),
        ("labels.csv", b"path,label\n0.png,caf\xe9\n", "byte 0xe9 is not of UTF-8, .* or: iconv -f cp1252 -t utf-8 OLD > NEW"),
        ("labels.csv", b"path,label\n0.png,cat,small\n", "'small' is in no column, in the row that begins with '0.png'"),
        ("labels.parquet", b"PAR1 this is none", "cannot be read"),
    ],
)
def test_a_file_that_is_not_a_table_is_refused(make_trainer, tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"data.file=.*{said}"):
        make_trainer(*words(tmp_path / name))


def test_a_comma_at_the_end_of_rows_is_no_cell(make_trainer, pictures, tmp_path):
    file = written(pictures, tmp_path)
    head, *rows = file.read_text().splitlines()
    file.write_text("\n".join([head, *(f"{row}," for row in rows)]))
    assert make_trainer(*words(file, "data.label=species")).data.classes == ["cat", "dog", "owl"]


def test_damaged_images_are_left_out(make_trainer, pictures, tmp_path, capsys):
    (tmp_path / "images" / "5.png").write_bytes(b"no image")
    data = make_trainer(*words(written(pictures, tmp_path), "data.label=species", "data.skip_corrupt=true", "data.weight=trust")).data
    found = by_key(data.train) | by_key(data.val)
    assert found == {number: number % 3 for number in range(COUNT) if number != 5}
    weights = by_key(data.train, "weight") | by_key(data.val, "weight")
    assert weights == {number: 0.5 + number for number in found}
    assert "1 corrupt entries are left out" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["order", "fold", "other rows"])
def test_the_damaged_image_of_a_large_table_is_found_when_rows_have_other_positions(make_trainer, pictures, tmp_path, monkeypatch, change):
    """What an earlier run found is cached for many images, and must not be taken for that of other rows."""
    monkeypatch.setattr(images, "FEW", 4)
    monkeypatch.setattr(images, "CACHE", tmp_path / "checked")
    (tmp_path / "images" / "7.png").write_bytes(b"no image")
    rows = pictures[pictures.index != 7] if change == "other rows" else pictures
    more = ["data.label=species", "data.skip_corrupt=true", "data.folds=3"]
    second = {"order": [], "fold": ["data.fold=1"], "other rows": []}[change], pictures[::-1] if change == "order" else pictures
    for changed_words, table in (([], rows), second):
        data = make_trainer(*words(written(table, tmp_path), *more, *changed_words)).data
        kept = {int(Path(key).stem) for loader in (data.train, data.val) for key in loader.keys}
        assert kept == set(range(COUNT)) - {7}


@pytest.mark.parametrize("way", ["absolute", "by ..", "through a link"])
def test_a_path_leads_out_of_the_folder_only_where_it_may(make_trainer, pictures, tmp_path, way):
    outside = tmp_path / "outside.png"
    outside.write_bytes((tmp_path / "images" / "4.png").read_bytes())
    (tmp_path / "images" / "link.png").symlink_to(outside)
    pictures["path"] = [path.removeprefix("images/") for path in pictures["path"]]
    pictures.loc[4, "path"] = {"absolute": str(outside), "by ..": "../outside.png", "through a link": "link.png"}[way]
    asked = words(written(pictures, tmp_path), f"data.root={tmp_path / 'images'}", "data.label=species", "data.image_size=16")
    with pytest.raises(UserError, match=r"row 6, column path: .* leads out of .*data.images_outside=true"):
        make_trainer(*asked)
    make_trainer(*asked, "data.images_outside=true")


def test_a_run_goes_on_with_its_table_in_another_folder(pictures, tmp_path):
    """A run's settings have the table's whole path, which a renamed project does not have any more."""
    (old := tmp_path / "old").mkdir()
    (tmp_path / "images").rename(old / "images")
    pictures.to_csv(old / "table.csv", index=False)
    small = ["model=tiny_resnet", "trainer.device=cpu", "trainer.max_updates=2", "trainer.save_updates=1", *ALONE]
    of_table = ["data=table", f"data.file={old / 'table.csv'}", "data.label=species", "data.image_size=16", "data.workers=0"]
    assert train.main([*small, *of_table, "data.batch_size=4", f"trainer.runs={tmp_path / 'runs'}"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    new = old.rename(tmp_path / "new")
    shutil.copy(new / "table.csv", new / "other.csv")
    more = [f"resume={run}", "trainer.max_updates=3"]
    with pytest.raises(UserError, match=r"would change what the run learns:\n  data.file=.*other\.csv"):
        named(str(run), [*more, f"data.file={new / 'other.csv'}"])
    assert train.main([*more, f"data.file={new / 'table.csv'}"]) == 0
    assert load_checkpoint(run / "checkpoints" / "last.pt")["updates"] == 3

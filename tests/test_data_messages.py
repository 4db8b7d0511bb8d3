"""What an app says, and does, about names, paths and tables that people meet."""

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from digit_folders import digit_files

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.cells import first_row
from lab.data.samples import class_of

EXPERIMENTS = str(Path(__file__).resolve().parents[1] / "experiments")
SMALL = ["data.image_size=16", "data.batch_size=4", "data.workers=0", "data.augment=false", "tracking=none"]


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("data.root=/tmp/my data (1)", "data.root='/tmp/my data (1)'"),
        ("data.train=train (copy)", "data.train='train (copy)'"),
        ("data.root=/a/[x]", "data.root='/a/[x]'"),
        ("data.root=a,b", "data.root='a,b'"),
    ],
)
def test_a_value_that_needs_quotes_is_shown_with_them(word, cure):
    with pytest.raises(UserError) as caught:
        load(["data=folder", word])
    assert str(caught.value).startswith(word)
    assert str(caught.value).endswith(f'quoted: "{cure}"') or str(caught.value).endswith(f'too: "{cure}"')
    name, _, value = word.partition("=")
    with pytest.raises(UserError, match=r"Within a list a text with such characters is quoted: \['a \(1\)',b\]"):
        load(["data=folder", "data.classes=[a (1),b]"])
    assert getattr(load(["data=folder", cure]).config.data, name.removeprefix("data.")).endswith(value)


def test_a_place_that_does_not_exist_is_named_before_torch_is_imported(tmp_path):
    """To import torch and timm takes seconds."""
    words = [
        *(["data=folder", "data.root=none"], ["data=npz", "data.file=none"], ["data=table", f"data.file={__file__}", "data.root=none"]),
        *(["task=detection", "data=boxes", "data.root=none"], ["task=detection", "data=coco", "data.root=none"]),
        *(["task=segmentation", "data=mask_folder", "data.classes=[a,b]", "data.root=none"],),
    ]
    code = f"import sys, train\nfor each in {words}: assert train.main(each) == 1\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": EXPERIMENTS}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.decode().splitlines() == [
        f"error: {each[-1].replace('none', f'{tmp_path}/none')}: no such file or folder." for each in words
    ]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_classes_of_other_unicode_forms_are_one_class(make_trainer, tmp_path, form):
    """macOS writes folders' names in another form than tables and other systems have."""
    name, other = (unicodedata.normalize(each, "café") for each in (form, "NFD" if form == "NFC" else "NFC"))
    root = digit_files(tmp_path / "pictures", names=(name, "dog"))
    (root / "val" / name).rename(root / "val" / other)
    data = make_trainer("data=folder", f"data.root={root}", *SMALL).data
    assert data.classes == [unicodedata.normalize("NFC", "café"), "dog"]
    assert (data.train.samples, data.val.samples) == (16, 12)
    assert make_trainer("data=folder", f"data.root={root}", *SMALL, f"data.classes=[dog,'{other}']").data.counts.tolist() == [8, 8]
    rows = [f"train/{name}/{number}.png,{(name, other)[number % 2]}" for number in range(8)]
    rows += [f"train/dog/{number}.png,dog" for number in range(8)]
    (root / "t.csv").write_text("\n".join(["path,label", *rows]))
    assert class_of(other, data.classes, "x") == 0
    table = make_trainer("data=table", f"data.file={root / 't.csv'}", *SMALL).data
    assert table.classes == data.classes


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_table_is_found(make_trainer, tmp_path, delimiter):
    root = digit_files(tmp_path / "pictures", names=("cat", "dog"))
    rows = [f'"train/{name}/{number}.png"{delimiter}{name}' for name in ("cat", "dog") for number in range(8)]
    file = root / "t.csv"
    file.write_text("\n".join([f"path{delimiter}label", *rows]))
    assert first_row(file) == (["path", "label"], delimiter)
    words = ["data=table", f"data.file={file}", *SMALL]
    assert make_trainer(*words).data.classes == ["cat", "dog"]
    assert make_trainer(*words, f"data.delimiter='{delimiter}'").data.classes == ["cat", "dog"]
    with pytest.raises(UserError, match=r"has no such column: 'label' is not known"):
        make_trainer(*words, "data.delimiter=':'")
    with pytest.raises(UserError, match=r"data\.delimiter='ab': one character is expected"):
        make_trainer(*words, "data.delimiter=ab")


def test_a_relative_path_is_kept_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    assert load(["data=folder", "data.root=pictures"]).config.data.root == str(tmp_path / "pictures")
    assert load(["data=table", "data.file=t.csv"]).config.data.file == str(tmp_path / "t.csv")
    assert load(["data=webdataset", "'data.shards=a-{0..3}.tar'".strip("'")]).config.data.shards == str(tmp_path / "a-{0..3}.tar")
    assert load(["data=hf", "data.path=set"]).config.data.path == str(tmp_path / "set")
    assert load(["data=hf", "data.path=ylecun/mnist"]).config.data.path == "ylecun/mnist"
    assert load(["data=folder", "data.root='~/x'"]).config.data.root == os.path.expanduser("~/x")
    assert load(["task=detection", "data=coco", "data.root=c"]).config.data.root == str(tmp_path / "c")


def test_a_resume_names_the_class_that_was_renamed(make_trainer, tmp_path, run_folder, quiet):
    root = digit_files(tmp_path / "pictures", names=("cat", "dog"))
    words = ["data=folder", f"data.root={root}", *SMALL, "trainer.max_updates=1"]
    trainer = make_trainer(*words)
    trainer.fit(run_folder, quiet)
    from lab.run import checkpoint

    state = checkpoint.load(run_folder.path / "checkpoints" / "last.pt")
    for part in ("train", "val"):
        (root / part / "cat").rename(root / part / "lynx")
    with pytest.raises(UserError, match=r"16 samples of 2 classes, while the run has seen 16 of 2\. Gone: 'cat'\. New: 'lynx'\.$"):
        make_trainer(*words).restore(state)
    for part in ("train", "val"):
        (root / part / "lynx").rename(root / part / "cat")
    (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "zero.png")
    with pytest.raises(UserError, match="the training data has changed: its samples have other names or labels"):
        make_trainer(*words).restore(state)

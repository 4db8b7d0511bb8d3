"""Data of somebody else, damaged or made to harm: each file ends in an error that names it, or in the right samples."""

import contextlib
import copy
import io
import json
import math
import os
import random
import shutil
import tarfile
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import evaluate
import train
from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.images.files import UNREADABLE, most_bytes, read_rgb
from lab.data.images.pixels import read_pixels
from lab.data.load import load_data, opened
from lab.data.sets import Norm
from lab.data.sources.table import read_images
from lab.detectors.annotations.coco_file import read_coco
from lab.run import checkpoint
from lab.run.saved import load_checkpoint
from lab.run.trust import Origin, origin_of

CPU, GREY = torch.device("cpu"), Norm([0.5] * 3, [0.5] * 3)
FEW = ["data.image_size=16", "data.workers=0", "tracking=none"]
JUNK: list[Any] = [
    *(None, True, -1, 0, 7, 1e30, 10**400, math.nan, math.inf, "", "x", "../../x", "a\0b", "\x1b[31m", [], [1, "a"], {}, {"a": 1}),
    *("9" * 5000, [[[[1]]]], 2**63, -(2**63) - 1, 1.5),
]


def seen(data):
    """Read every sample."""
    return sum(len(batch.target) for part in (data.train, data.val) for batch in part)


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [each for key, value in items for each in [(*path, key), *paths_in(value, (*path, key))]]


def altered(tree: Any, choice: random.Random) -> Any:
    tree = copy.deepcopy(tree)
    *above, last = choice.choice(paths_in(tree))
    owner = tree
    for key in above:
        owner = owner[key]
    if choice.random() < 0.15:
        del owner[last]
    else:
        owner[last] = copy.deepcopy(choice.choice(JUNK))
    return tree


def test_an_altered_coco_file_is_refused_or_read(tmp_path):
    for number in range(3):
        Image.effect_noise((32, 24), 40).save(tmp_path / f"{number}.png")
    tree = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 32, "height": 24} for i in range(3)],
        "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        "annotations": [
            {"id": i, "image_id": i % 3, "category_id": 1 + i % 2, "bbox": [1, 2, 10, 12], "area": 120, "iscrowd": 0} for i in range(6)
        ],
    }
    refused = longest = 0
    for number in range(400):
        choice = random.Random(number)
        path = tmp_path / "altered.json"
        path.write_text(json.dumps(altered(altered(tree, choice), choice)))
        how = {"check": choice.choice(["off", "headers", "pixels"]), "skip_corrupt": choice.random() < 0.6}
        try:
            file = read_coco(path, tmp_path, settings=("data.train_annotations", "data.train_images"), **how)
            sizes = [file.open(position).size for position in range(len(file))]
            assert set(sizes) <= {(32, 24)}
            assert len(file.boxes) == len(file.labels) <= 6
        except UserError as error:
            refused += 1
            longest = max(longest, len(str(error)))
    assert 50 < refused < 350
    assert longest < 30_000


def tar(path, entries):
    with tarfile.open(path, "w") as file:
        for name, content, about in entries:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in about.items():
                setattr(member, key, value)
            file.addfile(member, io.BytesIO(content))
    return path


def samples(count=20):
    picture = io.BytesIO()
    Image.effect_noise((16, 16), 40).save(picture, "PNG")
    return [entry for i in range(count) for entry in ((f"{i:03}.png", picture.getvalue(), {}), (f"{i:03}.cls", str(i % 2).encode(), {}))]


def of_shard(path, *more):
    settings = load(["data=webdataset", f"data.shards={path}", *FEW, *more])
    return load_data(settings.config.data, GREY, CPU, 0)


SPECIAL: dict[str, list[Any]] = {
    "a link out": [("x.png", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), ("x.cls", b"0", {})],
    "a hard link out": [("x.png", b"", {"type": tarfile.LNKTYPE, "linkname": "../../x"}), ("x.cls", b"0", {})],
    "a pipe": [("x.png", b"", {"type": tarfile.FIFOTYPE}), ("x.cls", b"0", {})],
    "a device": [("x.png", b"", {"type": tarfile.CHRTYPE}), ("x.cls", b"0", {})],
    "a size of many digits": [("x.png", b"x", {"pax_headers": {"size": "9" * 30}}), ("x.cls", b"0", {})],
    "a sparse file": [
        ("x.png", b"x", {"pax_headers": {"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999", "GNU.sparse.major": "1"}}),
        ("x.cls", b"0", {}),
    ],
    "an array of objects": [("x.npy", b"\x93NUMPY\x01\0v\0{'descr':'|O','shape':(10**9,)}", {}), ("x.cls", b"0", {})],
    "a deep label": [("x.png", b"x", {}), ("x.json", b"[" * 100_000, {})],
    "a label of many digits": [samples(1)[0], ("000.cls", b"9" * 5000, {})],
    "a label that is not UTF-8": [("x.png", b"x", {}), ("x.cls", b"\xff\xfe", {})],
    "an empty image": [("x.png", b"", {}), ("x.cls", b"0", {})],
}


@pytest.mark.parametrize("what", SPECIAL)
def test_a_strange_member_of_a_shard_is_named_or_left_out(tmp_path, what):
    path = tar(
        tmp_path / "shard.tar", [*samples(), *SPECIAL[what]] if what != "a label of many digits" else [*samples()[2:], *SPECIAL[what]]
    )
    with pytest.raises(UserError):
        seen(of_shard(path, "data.classes=[0,1]"))
    assert not list(tmp_path.glob("x*"))


@pytest.mark.slow
def test_a_shard_with_other_bytes_is_refused_or_read(tmp_path):
    whole = bytearray(tar(tmp_path / "shard.tar", samples()).read_bytes())
    path = tmp_path / "altered.tar"
    for number in range(60):
        choice, data = random.Random(number), bytearray(whole)
        for _ in range(choice.choice([1, 3, 20])):
            data[choice.randrange(len(data))] = choice.randrange(256)
        for start in range(0, len(data) - 511, 512):  # a whole header, so that its fields are read
            if data[start + 257 : start + 262] == b"ustar":
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            assert seen(of_shard(path, f"data.skip_corrupt={choice.choice(['true', 'false'])}")) <= 20


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(20):
        Image.effect_noise((16, 16), 40).save(folder / f"{number}.png")
    return folder


def of_table(file, pictures, kind="class"):
    settings = load(["data=table", f"data.file={file}", f"data.root={pictures}", *FEW])
    return opened(read_images(settings.config.data, kind), settings.config.data, GREY, CPU, 0)


def test_a_path_of_any_length_in_a_table_is_named(tmp_path, pictures):
    file = tmp_path / "table.csv"
    file.write_text("path,label\n" + "".join(f"{'x' * 5000}{i}.png,{'ab'[i % 2]}\n" for i in range(20)))
    with pytest.raises(UserError, match="has none of the images"):
        of_table(file, pictures)


@pytest.mark.parametrize(("rows", "letters"), [(1_000_000, 1), (20_000, 100_000), (20_000, -100_000)])
def test_a_table_that_unpacks_to_very_much_is_refused(tmp_path, pictures, limit, rows, letters):
    """A few bytes stand for a million equal rows, or for a long text in each; letters below 0: in a list."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    limit(100_000_000)
    cells = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * abs(letters)]))
    if letters < 0:
        cells = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), cells)
    parquet.write_table(pa.table({"path": cells, "label": cells}), tmp_path / "table.parquet")
    assert (tmp_path / "table.parquet").stat().st_size < 20_000
    with pytest.raises(UserError, match=r"takes [\d,]{11,} bytes; at most 100,000,000 are read, and LOSSFORGE_MAX_BYTES"):
        of_table(tmp_path / "table.parquet", pictures)


@pytest.fixture
def limit(monkeypatch):
    """Sets the limit of bytes."""

    def set_to(number):
        monkeypatch.setenv("LOSSFORGE_MAX_BYTES", str(number))
        most_bytes.cache_clear()

    yield set_to
    most_bytes.cache_clear()


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_header_of_a_shard_that_says_it_is_large_is_not_read(tmp_path, kind):
    """The file has a hole of 6 GiB, which takes no room on the disk, and tarfile would read it whole."""
    path, header = tmp_path / "shard.tar", tarfile.TarInfo("x")
    header.type, header.size = kind, 6 * 2**30
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, header.size + 2048)
    with pytest.raises(UserError, match=r"shard.tar: is broken: a header of a file has 6,442,450,944 bytes; at most 1,048,576 are read"):
        of_shard(path)


@pytest.mark.parametrize("what", ["an image", "an array", "a table", "annotations"])
def test_a_file_larger_than_the_limit_is_not_read(tmp_path, limit, what):
    """Each has a hole of 6 GiB."""
    path = tmp_path / "0.png"
    Image.effect_noise((16, 16), 40).save(path)
    os.truncate(path, 6 * 2**30)
    with pytest.raises((UserError, *UNREADABLE), match=r"takes 6,442,450,944 bytes; at most 4,294,967,296|more than 4,294,967,296 bytes"):
        {
            "an image": lambda: read_rgb(path),
            "an array": lambda: read_pixels(path.rename(tmp_path / "0.npy"), 1),
            "a table": lambda: of_table(path.rename(tmp_path / "t.csv"), tmp_path),
            "annotations": lambda: read_coco(path, tmp_path, settings=("a", "b"), check="off", skip_corrupt=False),
        }[what]()
    if what == "an image":
        limit(40)
        Image.new("L", (9, 9)).save(path)
        with pytest.raises(UNREADABLE, match="at most 40 are read"):
            read_rgb(path)
        limit("many")
        with pytest.raises(UserError, match=r"LOSSFORGE_MAX_BYTES, or max_bytes of .*: many; a whole number from 1 is expected"):
            read_rgb(path)


@pytest.mark.slow
def test_a_table_of_strange_columns_is_refused_or_read(tmp_path, pictures):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    names, labels = [f"{i}.png" for i in range(20)], ["ab"[i % 2] for i in range(20)]
    columns = {
        "path": [
            names,
            [name.encode() for name in names],
            [None] * 20,
            [[name] for name in names],
            ["a\0b"] * 20,
            [f"\x1b{n}" for n in names],
        ],
        "label": [
            *([label.encode() for label in labels], [{"a": 1}] * 20, [math.nan] * 20, [True, False] * 10, ["9" * 10**5, "8"] * 10),
            *(pa.array([0, 10**8] * 10, pa.date32()), pa.array([0, 2**62] * 10, pa.timestamp("us")), pa.array(labels).dictionary_encode()),
        ],
    }
    file = tmp_path / "table.parquet"
    for name, given in columns.items():
        for column in given:
            parquet.write_table(pa.table({"path": names, "label": labels} | {name: column}), file)
            for kind in ("class", "labels", "numbers"):
                with contextlib.suppress(UserError):
                    assert seen(of_table(file, pictures, kind)) == 20
    whole = pa.table({"path": names, "label": labels})
    parquet.write_table(whole, file)
    content = file.read_bytes()
    for number in range(60):
        choice, data = random.Random(number), bytearray(content)
        for _ in range(choice.choice([1, 3, 20])):
            data[choice.randrange(len(data))] = choice.randrange(256)
        file.write_bytes(data)
        with contextlib.suppress(UserError):
            assert seen(of_table(file, pictures)) == 20
    for about in ({}, {"index_columns": ["path"], "columns": [], "column_indexes": []}, 7):
        parquet.write_table(whole.replace_schema_metadata({b"pandas": json.dumps(about).encode()}), file)
        assert seen(of_table(file, pictures)) == 20


datasets = pytest.importorskip("datasets")


def of_hub(path):
    return load_data(load(["data=hf", f"data.path={path}", *FEW]).config.data, GREY, CPU, 0)


def saved(folder):
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b"])})
    rows = {"picture": [Image.fromarray(np.full((16, 16, 3), i, np.uint8)) for i in range(12)], "kind": [i % 2 for i in range(12)]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features)}).save_to_disk(str(folder))
    return folder


def test_a_saved_data_set_names_files_and_parts_beside_it(tmp_path):
    folder, other = saved(tmp_path / "theirs"), saved(tmp_path / "mine")
    assert seen(of_hub(folder)) == 12
    (arrow,) = (other / "train").glob("*.arrow")
    state, parts = folder / "train" / "state.json", folder / "dataset_dict.json"
    before = {path: path.read_text() for path in (state, parts)}
    for path, changes in (
        (state, [{"_data_files": [{"filename": str(arrow)}]}, {"_data_files": [{"filename": f"../../mine/train/{arrow.name}"}]}]),
        (state, [{"_data_files": 7}, {"_data_files": [7]}]),
        (parts, [{"splits": ["../mine/train"]}, {"splits": [".."]}, {"splits": 7}]),
    ):
        for change in changes:
            path.write_text(json.dumps(json.loads(before[path]) | change))
            with pytest.raises(UserError, match=path.name):
                of_hub(folder)
        path.write_text(before[path])
    os.mkfifo(folder / "train" / "pipe.arrow")
    with pytest.raises(UserError, match="is not a regular file"):
        of_hub(folder)


def test_a_saved_data_set_with_other_bytes_is_refused_or_read(tmp_path):
    """A wrong offset in memory that is mapped would end the process."""
    folder = saved(tmp_path / "theirs")
    (arrow,) = (folder / "train").glob("*.arrow")
    whole = arrow.read_bytes()
    for number in range(40):
        choice, data = random.Random(number), bytearray(whole)
        for _ in range(choice.choice([1, 5, 50])):
            data[choice.randrange(len(data))] = choice.randrange(256)
        arrow.unlink()
        arrow.write_bytes(data)
        with contextlib.suppress(UserError):
            assert seen(of_hub(folder)) <= 12


BOMB = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 1}]" for i in range(20)) + "\nconfigs: *a19\n"


@pytest.mark.parametrize("text", [BOMB, "a: " + "[" * 100_000, "a: !!int ''", "a: !!timestamp foo"], ids=["bomb", "deep", "int", "time"])
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_a_folders_description_does_not_expand(tmp_path, file, text):
    (tmp_path / file).write_text(f"---\n{text}\n---\n" if file == "README.md" else text)
    with pytest.raises(UserError, match=r"has references|its description cannot be read"):
        of_hub(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    words = ["model=tiny_resnet", "trainer.device=cpu", "data.image_size=16", "trainer.max_updates=1", "loss.implementation=torch"]
    assert train.main([*words, "tracking=none", f"trainer.runs={runs}", "name=own"]) == 0
    (folder,) = runs.iterdir()
    return folder


def test_a_signature_is_of_settings_and_folder_not_of_weights(run, tmp_path, capsys):
    """Other weights under a signed run's settings are data, told by the digest on record; code beside them is not the user's."""
    kept = shutil.copytree(run, tmp_path / "kept")
    best = run / "checkpoints" / "best.pt"
    state = torch.load(best, weights_only=True)
    words = ["tracking=none", f"trainer.runs={tmp_path / 'runs'}"]
    try:
        checkpoint.save(state | {"model": {name: value + 1 for name, value in state["model"].items()}}, best)
        assert (origin_of(run), load_checkpoint(best)["origin"]) == (Origin.HERE, Origin.HERE)
        assert evaluate.main([f"checkpoint={run}", *words]) == 1
        assert "is not the file whose digest" in capsys.readouterr().err
        ran = tmp_path / "ran"
        (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
        code = state["config"]["trainer"] | {"callbacks": [f"{tmp_path / 'theirs.py'}:X"]}
        checkpoint.save(state | {"config": state["config"] | {"trainer": code}}, best)
        records = run / "metrics.jsonl"
        records.write_text("".join(line for line in records.read_text().splitlines(keepends=True) if "sha256" not in line))
        assert load_checkpoint(best)["origin"] is Origin.STRANGER
        assert evaluate.main([f"checkpoint={run}", *words]) == 1
        assert "trainer.callbacks" in capsys.readouterr().err
        assert not ran.exists()
    finally:
        shutil.copytree(kept, run, dirs_exist_ok=True)


@pytest.mark.parametrize("change", ["weights of nan", "names that are not UTF-8", "names of control characters"])
def test_a_hostile_checkpoint_is_exported_or_refused_in_a_line(run, tmp_path, capsys, change):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    state = torch.load(run / "checkpoints" / "best.pt", weights_only=True)
    names = {"names that are not UTF-8": "caf\udce9 {}", "names of control characters": '\x1b[31m"\u202e{}'}
    if change == "weights of nan":
        state["model"] = {name: value * math.nan if value.is_floating_point() else value for name, value in state["model"].items()}
    checkpoint.save(state, tmp_path / "theirs.pt")
    words = [f"checkpoint={tmp_path / 'theirs.pt'}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}", "export.format=onnx"]
    if change == "weights of nan":
        assert evaluate.main(words) == 1
        said = capsys.readouterr()
        assert "nan" in said.err
        assert "Traceback" not in said.err
        return
    from lab.config.settings import reload
    from lab.run.export import export
    from lab.run.onnx import write_onnx

    classes = [names[change].format(i) for i in range(10)]
    config = reload(state["config"], []).config
    images = torch.zeros(2, 1, 16, 16)
    write_onnx(export(config, state | {"classes": classes}, lambda: images), images, tmp_path / "x.onnx")
    held = {each.key: each.value for each in onnx.load(tmp_path / "x.onnx").metadata_props}
    assert json.loads(held["model.json"])["classes"] == classes

"""What a stranger's file says is text wherever it is shown, and a small file does not fill the memory."""

import json
import re
import shutil
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from PIL import Image
from words import ALONE, TINY

import sync
import train
from lab.base.errors import UserError
from lab.data.images.files import MOST_PIXELS, UNREADABLE, most_pixels, read_rgb
from lab.data.images.pixels import read_pixels
from lab.run import checkpoint
from lab.run.saved import read_checkpoint

QUICK = [*TINY, "trainer.max_updates=1", "loss.implementation=torch"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert train.main([*QUICK, *ALONE, f"trainer.runs={runs}", "name=own"]) == 0
    (folder,) = runs.iterdir()
    return folder


@pytest.fixture
def most(monkeypatch):
    """Sets the limit of pixels."""
    before = Image.MAX_IMAGE_PIXELS

    def set_to(text):
        monkeypatch.setenv("LOSSFORGE_MAX_PIXELS", text)
        most_pixels.cache_clear()

    most_pixels.cache_clear()
    yield set_to
    most_pixels.cache_clear()
    Image.MAX_IMAGE_PIXELS = before


def test_a_checkpoint_that_unpacks_to_more_is_refused_before(tmp_path):
    """Zeros of 1.2 GB in a file of a megabyte; of torch's own files no part is compressed."""
    whole, packed = tmp_path / "whole.pt", tmp_path / "packed.pt"
    torch.save({"model": {"x": torch.zeros(2)}}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for part in source.infolist():
            if "/data/" not in part.filename:
                target.writestr(part.filename, source.read(part))
                continue
            with target.open(part.filename, "w", force_zip64=True) as file:
                for _ in range(1200):
                    file.write(bytes(2**20))
    assert packed.stat().st_size < 4e6
    with pytest.raises(UserError, match=r"unpacks to 1,258,\d+,\d+ bytes"):
        read_checkpoint(packed, "checkpoint")
    assert read_checkpoint(whole, "checkpoint")["model"]["x"].tolist() == [0, 0]


def repacked(path: Path, source: dict, pickle: bytes | None = None, name: str = "data.pkl", extra: dict | None = None) -> Path:
    """Write a file of torch.save with another pickle, name of its pickle or further parts."""
    torch.save(source, path)
    with zipfile.ZipFile(path) as file:
        parts = {each: file.read(each) for each in file.namelist()}
    with zipfile.ZipFile(path, "w") as target:
        for part, content in parts.items():
            folder, _, own = part.partition("/")
            target.writestr(f"{folder}/{name if own == 'data.pkl' else own}", pickle or content if own == "data.pkl" else content)
        for part, content in (extra or {}).items():
            target.writestr(f"{folder}/{part}", content)
    return path


EMPTY_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQK\0"
EMPTY_TENSOR += b"K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
NAMED = ("builtins bytearray", "__builtin__ bytearray", "torch Tensor", "torch.storage UntypedStorage", "torch LongTensor")
CALLS = {f"names {each.replace(' ', '.')}, and": f"c{each.replace(' ', chr(10))}\n(K\x08tR.".encode() for each in NAMED} | {
    "names torch.FloatTensor, and": b"ctorch\nFloatTensor\n(K\x08t\x81.",
    "changed after it was made": EMPTY_TENSOR + b")b.",
    "shape (2, 1000), and 8 bytes": EMPTY_TENSOR.replace(b"K\x02\x85K\x01\x85", b"(K\x02M\xe8\x03t(K\x01K\0t") + b".",
    "shape of other kinds than sizes": EMPTY_TENSOR.replace(b"K\x02\x85K\x01\x85", b"X\x01\0\0\0a\x85K\x01\x85") + b".",
    "cannot be read": b"\x96" + (2**40).to_bytes(8, "little") + b".",  # a bytearray of a length that is not there
    "a storage is not described as one": EMPTY_TENSOR.replace(b"ctorch\nFloatStorage\n", b"ctorch\nfloat16\n") + b".",
    "a storage of 9 elements has 8 bytes": EMPTY_TENSOR.replace(b"cpuK\x02t", b"cpuK\x09t") + b".",
    "a storage of 1 elements has 8 bytes": EMPTY_TENSOR.replace(b"cpuK\x02t", b"cpuK\x01t") + b".",
    "a tensor is not described as one": b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\0K\x02\x85K\x01\x85\x89NtR.",
    "a key is neither a text nor a number": b"}K\x01\x85" + b"q\0h\0\x86" * 60 + b"K\x01s.",
}


@pytest.mark.parametrize("said", CALLS)
def test_a_checkpoint_names_only_what_it_needs(tmp_path, said):
    """8 bytes here, and as many as a stranger likes elsewhere; torch finds the pickle by its name in any letters."""
    for name, needed in (("data.pkl", said), ("Data.pkl", "a part 'Data.pkl'")):
        path = repacked(tmp_path / name, {"x": torch.zeros(2)}, b"\x80\x02" + CALLS[said], name)
        with pytest.raises(UserError, match=re.escape(needed)):
            read_checkpoint(path, "checkpoint")


def test_what_torch_saves_of_tensors_is_read(tmp_path):
    """A state_dict has metadata, a parameter and a view; of the guard's tensor alone nothing is changed."""
    module = torch.nn.BatchNorm1d(3)
    wide = torch.arange(12.0).view(3, 4)
    plain = repacked(
        tmp_path / "plain.pt",
        {"model": module.state_dict(), "p": module.weight, "view": wide.T[1:], "b": torch.ones(2).bool(), "dtype": torch.bfloat16},
    )
    state = read_checkpoint(plain, "checkpoint")
    assert state["model"].keys() == module.state_dict().keys()
    assert torch.equal(state["view"], wide.T[1:])
    assert isinstance(state["p"], torch.nn.Parameter)
    assert state["dtype"] is torch.bfloat16
    unchanged = repacked(tmp_path / "one.pt", {"x": torch.tensor([3.0, 4.0])}, b"\x80\x02" + EMPTY_TENSOR + b".")
    assert read_checkpoint(unchanged, "checkpoint").tolist() == [3, 4]


@pytest.mark.filterwarnings("ignore:.*(torch.jit|nested tensors|Duplicate name)")
def test_an_archive_of_other_parts_is_not_read(tmp_path):
    script, nested = tmp_path / "script.pt", tmp_path / "nested.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), script)
    torch.save({"model": {"x": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}}, nested)
    for path, said in (
        (script, "is a TorchScript archive, and is not read"),
        (nested, r"names torch\._utils\._rebuild_nested_tensor"),
        (repacked(tmp_path / "other.pt", {}, extra={"more/data.pkl": b"."}), "a part 'more/data.pkl'"),
        (repacked(tmp_path / "twice.pt", {}, extra={"version": b"3"}), "an archive of other parts"),
    ):
        with pytest.raises(UserError, match=said):
            read_checkpoint(path, "checkpoint")


def test_a_part_that_differs_from_its_checksum_is_named(tmp_path):
    """One bit of the weights, which torch would read as another number."""
    path = tmp_path / "flipped.pt"
    checkpoint.save({"model": {"x": torch.full((64,), 3.0)}}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), 3.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="the checksum of its part data/0 is wrong"):
        checkpoint.load(path)


def test_an_archive_after_other_bytes_is_refused(tmp_path):
    """torch would read the bytes before it, whose checksums nobody looks at."""
    path = tmp_path / "joined.pt"
    torch.save({}, path)
    old = tmp_path / "old.pt"
    torch.save({"x": 1}, old, _use_new_zipfile_serialization=False)
    path.write_bytes(old.read_bytes() + path.read_bytes())
    with pytest.raises(UserError, match="is not a checkpoint"):
        read_checkpoint(path, "checkpoint")


def picture(path: Path, width: int, height: int, bits: int = 8, kind: int = 0) -> Path:
    """Write a small PNG of very many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize("kind", ["8 bits", "16 bits", "array"])
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, most, kind):
    path = tmp_path / "large"
    if kind == "array":
        import numpy as np

        path = tmp_path / "large.npy"
        np.save(path, np.zeros((13_000, 13_000), bool))
    else:
        picture(path, 13_000, 13_000, 16 if kind == "16 bits" else 8, 2)
    reads = [lambda: read_pixels(path, 1 if kind == "array" else 3), *([] if kind == "array" else [lambda: read_rgb(path)])]
    for read in reads:
        with pytest.raises(UNREADABLE, match=r"13000 x 13000 pixels; at most 89,478,485 are read"):
            read()


def test_the_limit_of_pixels_is_one_setting(tmp_path, most, monkeypatch):
    path = tmp_path / "image.png"
    Image.new("L", (20, 30)).save(path)
    assert (read_rgb(path).size, most_pixels()) == ((20, 30), MOST_PIXELS)
    most("599")
    with pytest.raises(UNREADABLE, match="20 x 30 pixels; at most 599"):
        read_rgb(path)
    most("600")
    assert read_rgb(path).size == (20, 30)
    most("many")
    with pytest.raises(UserError, match="LOSSFORGE_MAX_PIXELS"):
        read_rgb(path)
    monkeypatch.delenv("LOSSFORGE_MAX_PIXELS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "lossforge.yaml").write_text("max_pixels: 599\n")
    most_pixels.cache_clear()
    with pytest.raises(UNREADABLE, match="at most 599"):
        read_rgb(path)


def test_a_name_of_millions_of_letters_is_no_class(capsys):
    from lab.data.sets import Data
    from lab.run.checkpoint_checks import fault
    from lab.training.console import Console

    with pytest.raises(UserError, match=r"class 'aaaa+'…: its name has 2,000,000 characters; at most 1,000 are taken"):
        Data(["b", "a" * 2_000_000], 3, *[None] * 3)
    assert "at most 1000 characters" in fault({"classes": ["a" * 1001]})
    Console(1, quiet=True).table("t", {"a" * 2_000_000: "b" * 2_000_000 + "\nc"})
    assert len(capsys.readouterr().out) < 50_000
    assert len(str(UserError("a" * 2_000_000 + "\nb"))) < 2100


def test_a_strangers_description_is_shown_as_text(run, tmp_path):
    """MLflow's page would fetch a picture from the stranger's address."""
    theirs = shutil.copytree(run, tmp_path / "theirs")
    file = theirs / "config.yaml"
    file.write_text(file.read_text().rpartition("# signature")[0])
    note = "```\n![x](http://127.0.0.1:9/seen) [click](http://127.0.0.1:9)\n\x1b[31m"
    records = theirs / "metrics.jsonl"
    first = json.loads(records.read_text().splitlines()[0])
    text = records.read_text().replace(first["run_folder"], "/elsewhere/run")
    for kind, field in (("tags", "values"), ("resume", "tags")):
        text += json.dumps({"kind": kind, "time": 2e9, "step": 1, field: {"mlflow.note.content": note, "theirs": "kept"}}) + "\n"
        records.write_text(text)
        store = f"sqlite:///{tmp_path}/{kind}.db"
        assert sync.main([str(theirs), f"tracking.uri={store}"]) == 0
        (found,) = MlflowClient(tracking_uri=store).search_runs(["1"])
        shown = found.data.tags["mlflow.note.content"]
        assert shown == "````\n" + note.replace("\x1b", "\\x1b") + "\n````"
        assert found.data.tags["theirs"] == "kept"


def test_an_error_of_a_strangers_text_does_not_control_the_terminal(run, tmp_path):
    from lab.run.active import write_error
    from lab.run.folder import RunFolder

    folder = RunFolder(tmp_path, "run", {})
    write_error(folder, "cannot read \x1b[2J")
    folder.release()
    assert (folder.path / "error.txt").read_text() == "cannot read \\x1b[2J"

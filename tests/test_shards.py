"""WebDataset shards: the samples that the library itself reads, each once, and what is wrong with a shard."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.specs import SOURCES

webdataset = pytest.importorskip("webdataset")

FEW = ["data.image_size=16", "data.batch_size=4", "data.workers=0", "tracking=none"]
PLAIN = [*FEW, "data.augment=false", "data.crop_pct=1"]
NAMES = ["ant", "bee", "cow"]


def png(number, channels=3):
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, channels), 3 * number, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(path, samples):
    """Write samples with the library: maps from endings to bytes, texts, numbers or objects for JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{path.stem}_{number:03d}"} | sample)
    return path


def members(path, **contents):
    """Write a shard by tarfile, from names of members; `__` stands for a dot."""
    with tarfile.open(path, "w") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def shards(tmp_path):
    """Three shards of 10 images as bright as their number."""
    for shard in range(3):
        numbers = range(10 * shard, 10 * shard + 10)
        write(tmp_path / f"train-{shard:03d}.tar", [{"png": png(number), "cls": number % 3} for number in numbers])
    return tmp_path / "train-{000..002}.tar"


def words(shards, *more):
    return ["data=webdataset", f"data.shards={shards}", *PLAIN, *more]


def numbers(data, loader):
    """Return each sample's number, as its pixels say it, and its class, by its key."""
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (data.norm.mean, data.norm.std))
    return [
        (loader.keys[index], round(float(image.mean()) * 255 / 3), int(target))
        for batch in loader
        for index, image, target in zip(batch.index.tolist(), batch.images * std + mean, batch.target, strict=True)
    ]


def test_the_samples_are_those_that_the_library_reads(make_trainer, shards):
    data = make_trainer(*words(shards, "data.workers=2")).data
    assert data.classes == ["0", "1", "2"]
    assert (data.train.samples, data.val.samples) == (24, 6)
    found = numbers(data, data.train) + numbers(data, data.val)
    library = webdataset.WebDataset(str(shards), shardshuffle=False).decode("rgb8").to_tuple("__url__", "__key__", "png", "cls")
    expected = [(f"{url.rpartition('/')[2]}/{key}", int(image.mean()) // 3, label) for url, key, image, label in library]
    assert len(expected) == 30
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("labels", "more", "classes"),
    [
        ([{"cls": NAMES[number % 3]} for number in range(12)], [], NAMES),
        ([{"txt": f" {NAMES[number % 3]}\n"} for number in range(12)], [], NAMES),
        ([{"json": number % 3} for number in range(12)], ["data.classes=[cow,bee,ant]"], ["cow", "bee", "ant"]),
        ([{"json": {"id": 7, "kind": NAMES[number % 3]}, "txt": "a text"} for number in range(12)], ["data.label=json:kind"], NAMES),
        ([{"cls": NAMES[number % 3], "txt": "a text", "json": {}} for number in range(12)], [], NAMES),
    ],
)
def test_labels(make_trainer, tmp_path, labels, more, classes):
    rows = [{"png": png(number)} | label for number, label in enumerate(labels)]
    for part in ("train", "val", "test"):
        write(tmp_path / part / "0.tar", rows)
    parts = [f"data.{part}={tmp_path}/{part}/*.tar" for part in ("val", "test")]
    data = make_trainer(*words(f"{tmp_path}/train/*.tar", *parts, *more)).data
    assert data.classes == classes
    for loader in (data.train, data.val, data.test):
        assert {number: target for _, number, target in numbers(data, loader)} == {number: number % 3 for number in range(12)}


def test_one_of_several_images_is_chosen(make_trainer, tmp_path):
    rows = [{"left.png": png(number), "right.png": png(50), "cls": number % 2} for number in range(8)]
    data = make_trainer(*words(write(tmp_path / "0.tar", rows), "data.image=left.png")).data
    assert max(number for _, number, _ in numbers(data, data.train)) < 8


class Poison:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_in_a_shard_is_unpickled(make_trainer, tmp_path):
    """The endings that the library's decoders unpickle, and an image of numpy that is a pickle."""
    ran = tmp_path / "ran"
    poison = pickle.dumps(Poison(ran))
    pickle.loads(poison).close()
    ran.unlink()
    rows = [{"png": png(number), "cls": str(number % 2).encode()} for number in range(8)]
    contents = {
        f"{number}__{ending}": content
        for number, row in enumerate(rows)
        for ending, content in (row | {"pyd": poison, "pickle": poison, "pkl": poison, "pth": poison}).items()
    }
    trainer = make_trainer(*words(members(tmp_path / "0.tar", **contents)))
    assert len(numbers(trainer.data, trainer.data.train)) == 6
    for ending in ("pyd", "pickle"):
        with pytest.raises(UserError, match=rf"data.label={ending}: an ending cls, txt, json is expected"):
            make_trainer(*words(tmp_path / "0.tar", f"data.label={ending}"))
    file = io.BytesIO()
    np.save(file, np.array([Poison(ran)], dtype=object), allow_pickle=True)
    shard = members(
        tmp_path / "1.tar", **{f"{n}__{end}": each for n in range(8) for end, each in (("npy", file.getvalue()), ("cls", b"%d" % (n % 2)))}
    )
    with pytest.raises(UserError, match=r"1\.tar: sample 0: cannot be read as an image .*allow_pickle=False"):
        make_trainer(*words(shard, "data.channels=1"))
    assert not ran.exists()


def cut(path):
    with tarfile.open(path) as tar:
        first = tar.getmembers()[15].offset_data
    path.write_bytes(path.read_bytes()[: first + 10])


def cut_between_members(path):
    with tarfile.open(path) as tar:
        end = tar.getmembers()[15].offset
    path.write_bytes(path.read_bytes()[:end])


def damage(path):
    with tarfile.open(path) as tar:
        first = tar.getmembers()[10].offset
    content = bytearray(path.read_bytes())
    content[first : first + 512] = b"x" * 512
    path.write_bytes(bytes(content))


def compress(path):
    import gzip

    path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, r"train-001.tar: is broken: unexpected end of data, after \d samples"),
        (cut_between_members, r"train-001.tar: is cut off at byte \d+, after 8 samples"),
        (damage, r"train-001.tar: is damaged at byte \d+, after 5 samples"),
        (compress, r"train-001.tar: is compressed; unpack it by gunzip"),
        (lambda path: path.write_text("no tar"), r"train-001.tar: is broken: "),
        (lambda path: write(path, [{"png": png(1)}]), r"train-001.tar: sample train-001_000: has no label \(of .png\)"),
        (lambda path: write(path, [{"cls": 1}]), r"train-001.tar: sample train-001_000: has no image \(of .cls\)"),
        (lambda path: write(path, [{"png": png(1), "jpg": png(1), "cls": 1}]), r"train-001_000: has (jpg and png|png and jpg) \(of"),
        (lambda path: write(path, [{"png": png(1)[:60], "cls": 1}]), r"train-001.tar: sample train-001_000: cannot be read as an image"),
        (lambda path: write(path, [{"png": png(1), "cls": b"\xff"}]), r"sample train-001_000: .cls cannot be read"),
        (lambda path: write(path, [{"png": png(1), "cls": b" "}]), r"sample train-001_000: .cls says ''; the name or number"),
        (lambda path: write(path, [{"png": png(1), "json": {"a": 1}}]), r"has the fields a; data.label=json:FIELD names one"),
        (lambda path: members(path, a__png=png(1), a__PNG=png(2), a__cls=b"1"), r"sample a: has two files .png"),
    ],
)
def test_what_is_wrong_names_the_shard_and_the_sample(make_trainer, shards, change, said):
    change(shards.parent / "train-001.tar")
    with pytest.raises(UserError, match=said):
        make_trainer(*words(shards))
    data = make_trainer(*words(shards, "data.skip_corrupt=true", "data.check=pixels")).data
    found = {number for _, number, _ in numbers(data, data.train) + numbers(data, data.val)}
    assert {*range(10), *range(20, 30)} <= found


def test_a_member_that_is_lacking_where_a_setting_names_it(make_trainer, shards):
    with pytest.raises(UserError, match=r"train-000.tar: sample train-000_000: has no .jpg, as data.image says, but .cls, .png|.png, .cls"):
        make_trainer(*words(shards, "data.image=jpg"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.val={here}/val-*.tar"], r"data.val=.*val-\*.tar: matches no file"),
        (["data.val={here}/train-{{000..004}}.tar"], r"data.val: .*train-003.tar: no such file"),
        (["data.val={here}/gone-*.tar"], r"data.val: .*gone-0.tar: no such file"),
        (["data.val={here}/train-002.tar"], r"train-002.tar is named twice"),
        (["data.val={here}/held.tar"], r"held.tar: sample held_000: class: '9' is not known"),
    ],
)
def test_wrong_settings(make_trainer, shards, more, said):
    write(shards.parent / "held.tar", [{"png": png(1), "cls": 9}])
    (shards.parent / "gone-0.tar").symlink_to("nowhere.tar")
    with pytest.raises(UserError, match=said):
        make_trainer(*words(shards, *(each.format(here=shards.parent) for each in more)))


def test_braces_that_the_shell_expanded_are_refused():
    assert load(["data=webdataset", "data.shards=a=b/{00..11}.tar"]).config.data.shards == str(Path("a=b/{00..11}.tar").absolute())
    with pytest.raises(UserError, match=r"data.shards is given 2 times; .* put quotes around it"):
        load(["data=webdataset", "data.shards=a/0.tar", "data.shards=a/1.tar"])


def test_shards_are_compared_by_their_files_however_a_pattern_names_them(shards, tmp_path):
    known = load(words(shards)).tree()["data"]
    places = SOURCES["webdataset"].places_of
    assert places(known)["train"] == {str(tmp_path / f"train-{number:03d}.tar") for number in range(3)}
    assert places(known | {"shards": str(tmp_path / "train-*.tar")}) == places(known)
    assert places(known | {"val": str(tmp_path / "gone-{0..9}.tar")})["val"] == {str(tmp_path / "gone-{0..9}.tar")}

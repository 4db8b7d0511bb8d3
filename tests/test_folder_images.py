"""Damaged files among a folder's images: all named before anything starts, or left out."""

import os
import shutil
import unicodedata

import pytest
import torch
from digit_folders import digit_files
from PIL import Image

from lab.base.errors import UserError
from lab.base.seeds import seeded
from lab.data.images import files as images
from lab.results import prediction


@pytest.fixture
def pictures(tmp_path):
    """Eight images of each of two classes to train on, six of each held out."""
    return digit_files(tmp_path / "pictures", names=("cat", "dog"))


def words(root, *more):
    return ["data=folder", f"data.root={root}", "data.image_size=32", "data.batch_size=5", "data.workers=0", *more]


def damage(root):
    """A file of each kind that cannot be used; what is said of each, by its name."""
    whole = Image.open(root / "train" / "cat" / "3.png")
    whole.convert("RGB").resize((200, 200)).save(root / "val" / "dog" / "5.jpg", quality=95)
    jpeg = (root / "val" / "dog" / "5.jpg").read_bytes()
    for name, content in {
        "train/cat/0.png": b"",
        "train/dog/1.png": b"this is text",
        "train/dog/2.png": (root / "train" / "dog" / "2.png").read_bytes()[:80],
        "val/cat/4.png": b"\x89PNG\r\n\x1a\n",
        "val/dog/5.jpg": jpeg[: len(jpeg) // 2],
    }.items():
        (root / name).write_bytes(content)
    Image.new("I;16", (16, 16)).save(root / "val" / "cat" / "5.png")
    (root / "train" / "cat" / "1.png").unlink()
    (root / "train" / "cat" / "1.png").symlink_to("nowhere.png")
    Image.new("1", (20_000, 20_000)).save(root / "train" / "dog" / "3.png")
    return {
        "train/cat/0.png": "cannot be read as an image",
        "train/cat/1.png": "no such file",
        "train/dog/1.png": "cannot be read as an image",
        "train/dog/2.png": "cannot be read as an image",
        "train/dog/3.png": "decompression bomb",
        "val/cat/4.png": "cannot be read as an image",
        "val/cat/5.png": "has pixels of mode I;16; 8 bits a channel are expected; data.channels reads it as it is.",
        "val/dog/5.jpg": "cannot be read as an image",
    }


def test_every_damaged_image_is_named_at_once(make_trainer, pictures):
    wrong = damage(pictures)
    with pytest.raises(UserError) as caught:
        make_trainer(*words(pictures))
    head, *lines = str(caught.value).splitlines()
    assert head == f"{pictures}: 8 corrupt entries; data.skip_corrupt=true leaves them out."
    assert [line.partition(": ")[0] for line in lines] == list(wrong)
    assert [line for line, said in zip(lines, wrong.values(), strict=True) if said not in line] == []


@pytest.mark.parametrize("more", [[], ["data.channels=1"]])
def test_a_pipe_is_named_and_not_waited_for(make_trainer, pictures, more):
    os.mkfifo(pictures / "train" / "cat" / "pipe.png")
    (pictures / "val" / "dog" / "gone.png").symlink_to("/nowhere.png")
    with pytest.raises(UserError) as caught:
        make_trainer(*words(pictures, *more))
    lines = str(caught.value).splitlines()
    assert {"train/cat/pipe.png: is not a regular file.", "val/dog/gone.png: no such file."} <= set(lines)


def test_classes_in_the_folder_itself_are_led_to(make_trainer, pictures):
    with pytest.raises(UserError, match=r"train: no such folder\. Give data\.train=\. if the folders of the classes are in .*val itself\."):
        make_trainer(*words(pictures / "val"))
    assert make_trainer(*words(pictures / "val", "data.train=.")).data.classes == ["cat", "dog"]


def test_empty_folders_and_those_of_systems_stop_no_run(make_trainer, pictures):
    """@eaDir holds copies of the images beside it, and __MACOSX hidden files of their names."""
    seen = make_trainer(*words(pictures)).data
    for folder in ("train", "val", "train/cat", "val/dog"):
        for name, file in (("__MACOSX", "._0.png"), ("@eaDir", "0.png"), ("@eaDir/1.png", "SYNOPHOTO_THUMB_XL.png")):
            (pictures / folder / name).mkdir(parents=True)
            shutil.copy(pictures / "val" / "cat" / "0.png", pictures / folder / name / file)
        for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
            (pictures / folder / name).write_bytes(b"x")
    (pictures / "train" / "empty").mkdir()
    (pictures / "val" / "void").mkdir()
    data = make_trainer(*words(pictures)).data
    assert (data.train.keys, data.val.keys, data.classes) == (seen.train.keys, seen.val.keys, ["cat", "dog"])
    assert data.notes == [f"{pictures}: folders without a file are no classes of their own: train/empty, val/void"]


def test_an_empty_folder_of_held_out_images_is_said(make_trainer, pictures):
    shutil.rmtree(pictures / "val" / "dog")
    (pictures / "val" / "dog").mkdir()
    data = make_trainer(*words(pictures)).data
    assert (data.val.samples, data.classes) == (6, ["cat", "dog"])
    assert f"{pictures / 'val'} has no image of dog" in data.notes


@pytest.mark.parametrize("name", ["valid", "validation"])
def test_other_names_of_held_out_images_are_known(make_trainer, pictures, name):
    expected = make_trainer(*words(pictures)).data.val.keys
    (pictures / "val").rename(pictures / name)
    data = make_trainer(*words(pictures)).data
    assert data.val.keys == [key.replace("val/", f"{name}/") for key in expected]
    assert (data.train.samples, data.held_out) == (16, f"of {name}/")
    (pictures / "val").mkdir()
    with pytest.raises(UserError, match=rf"has val/ and {name}/; data.val= names one of them\.$"):
        make_trainer(*words(pictures))
    assert make_trainer(*words(pictures, f"data.val={name}")).data.val.samples == 12


def test_files_that_are_passed_over_are_counted_by_kind(make_trainer, pictures):
    for number in range(4):
        (pictures / "train" / "cat" / f"{number}.HEIC").write_bytes(b"")
    for number in range(2):
        (pictures / "train" / "dog" / f"{number}.txt").write_bytes(b"")
    (pictures / "train" / "README").write_bytes(b"")
    (pictures / "val" / "labels.txt").write_bytes(b"")
    assert make_trainer(*words(pictures)).data.notes == [
        f"{pictures / 'train'}: 7 files passed over: 4 .heic, 2 .txt, 1 without an ending",
        f"{pictures / 'val'}: 1 file passed over: 1 .txt",
    ]
    files, missing, said = prediction.images([pictures], pictures / "out")
    assert (len(files), missing, said) == (16 + 12, [], "8 files passed over: 4 .heic, 3 .txt, 1 without an ending")


def test_test_images_that_are_not_used_are_said(make_trainer, pictures):
    shutil.copytree(pictures / "val", pictures / "test")
    said = f"{pictures / 'test'} is not used; data.test=test scores its images once at the end"
    assert said in make_trainer(*words(pictures)).data.notes
    assert said not in make_trainer(*words(pictures, "data.test=test")).data.notes


def test_a_link_to_a_parent_is_not_followed(make_trainer, pictures):
    seen = make_trainer(*words(pictures)).data
    (pictures / "train" / "cat" / "all").symlink_to("../..")
    (pictures / "train" / "cat" / "part").symlink_to("..")
    (pictures / "train" / "cat" / "self").symlink_to(".")
    (pictures / "val" / "dog" / "root").symlink_to("/")
    data = make_trainer(*words(pictures)).data
    assert (data.train.keys, data.val.keys) == (seen.train.keys, seen.val.keys)
    assert torch.equal(data.counts, seen.counts)
    assert data.notes == [
        f"{pictures}: 4 links are not followed (the first: train/cat/all); they lead to folders that are read for themselves, "
        "or that hold such folders"
    ]


def test_links_into_another_class_or_part_are_not_followed(make_trainer, pictures):
    """They would give the images of one class to another, and training images to the held-out ones."""
    seen = make_trainer(*words(pictures)).data
    (pictures / "train" / "cat" / "dogs").symlink_to("../dog")
    (pictures / "train" / "cat" / "one.png").symlink_to("../dog/1.png")
    (pictures / "val" / "cat" / "one.png").symlink_to("../../train/cat/1.png")
    (pictures / "val" / "again").symlink_to("../train/dog")
    data = make_trainer(*words(pictures)).data
    assert (data.train.keys, data.val.keys) == (seen.train.keys, seen.val.keys)
    assert any("4 links are not followed (the first: train/cat/dogs)" in note for note in data.notes)


def test_links_that_lead_elsewhere_are_followed_once_and_said(make_trainer, pictures, tmp_path):
    """A class that is a link, a folder and a file in a class: a subset of a large set is often made so."""
    seen = make_trainer(*words(pictures)).data
    (pictures / "train" / "dog").rename(tmp_path / "dogs")
    (pictures / "train" / "dog").symlink_to(tmp_path / "dogs")
    (tmp_path / "more").mkdir()
    for number in range(3):
        shutil.copy(pictures / "val" / "cat" / f"{number}.png", tmp_path / "more" / f"{number}.png")
    (tmp_path / "more" / "back").symlink_to(tmp_path / "more")
    (pictures / "train" / "cat" / "a").symlink_to(tmp_path / "more")
    (pictures / "train" / "cat" / "b").symlink_to(tmp_path / "more")
    (tmp_path / "farm").mkdir()
    shutil.copy(pictures / "val" / "cat" / "5.png", tmp_path / "farm" / "5.png")
    (pictures / "train" / "cat" / "x.png").symlink_to(tmp_path / "farm" / "5.png")
    (pictures / "train" / "cat" / "twice.png").symlink_to("0.png")  # of its own class: drawn more often, as its user wants
    data = make_trainer(*words(pictures)).data
    more = ["train/cat/a/0.png", "train/cat/a/1.png", "train/cat/a/2.png", "train/cat/twice.png", "train/cat/x.png"]
    assert sorted(data.train.keys) == sorted([*seen.train.keys, *more])
    assert data.counts.tolist() == [8 + 5, 8]
    assert data.notes == [
        f"{pictures}: 3 links to folders or files elsewhere are followed (the first: train/cat/a)",
        f"{pictures}: 2 links are not followed (the first: train/cat/a/back); they lead to folders that are read for themselves, "
        "or that hold such folders",
    ]


def test_images_of_every_format_are_read(make_trainer, pictures):
    for kind in ("gif", "jp2", "avif", "JPG", "webp", "jfif", "jpe"):
        Image.open(pictures / "train" / "cat" / "0.png").convert("RGB").save(pictures / "train" / "cat" / f"0.{kind}")
    (pictures / "train" / "cat" / "notes.txt").write_text("no image")
    data = make_trainer(*words(pictures, "data.batch_size=1")).data
    assert data.train.samples == 16 + 7
    assert sum(len(batch.target) for batch in data.train) == 23


def test_what_counts_as_an_image_is_said(make_trainer, pictures):
    (pictures / "train" / "cow").mkdir()
    (pictures / "train" / "cow" / "1.heic").write_bytes(b"")
    with pytest.raises(UserError, match=r"for the classes cow \(1 file passed over: 1 \.heic\)\..* Images are files \.avif, .*\.webp\."):
        make_trainer(*words(pictures))


def test_one_class_is_said(make_trainer, tmp_path):
    assert make_trainer(*words(digit_files(tmp_path / "one", names=("cat",)))).data.notes == [
        f"{tmp_path / 'one' / 'train'} holds one class, cat, so that every prediction is right."
    ]


def test_a_size_that_enlarges_small_images_is_said(make_trainer, pictures):
    (note,) = make_trainer(*words(pictures), "data.image_size=128").data.notes
    assert note.startswith("data.image_size=128: images are enlarged 8.0 times, the median one from 16×16, and a step computes 4 times as ")
    assert note.endswith("much as with data.image_size=64")


def test_a_share_beside_held_out_images_is_said(make_trainer, pictures):
    assert make_trainer(*words(pictures)).data.notes == []
    (note,) = make_trainer(*words(pictures), "data.held_out=0.3").data.notes
    assert note == f"data.held_out=0.3: has no effect, because {pictures / 'val'} holds the held-out images"
    shutil.rmtree(pictures / "val")
    assert make_trainer(*words(pictures), "data.held_out=0.3").data.notes == []


def test_an_rgb_image_is_what_pillow_converts_it_to(pictures):
    """Without the copy that convert makes, also where EXIF says that it lies on its side, and after its file is gone."""
    photo, exif = Image.new("RGB", (6, 4), (9, 8, 7)), Image.Exif()
    photo.putpixel((0, 0), (200, 100, 0))
    exif[0x0112] = 6
    photo.save(pictures / "0.png", exif=exif)
    found = images.read_rgb(pictures / "0.png")
    (pictures / "0.png").unlink()
    assert (found.mode, found.size, found.getpixel((3, 0))) == ("RGB", (4, 6), (200, 100, 0))
    grey = Image.new("L", (2, 2), 5)
    assert images.in_rgb(grey).getpixel((0, 0)) == (5, 5, 5)


def test_a_class_whose_name_is_not_utf_8_is_refused(make_trainer, pictures):
    for part in ("train", "val"):
        (pictures / part / "cat").rename(pictures / part / os.fsdecode(b"caf\xe9"))
    with pytest.raises(UserError, match="its name is not UTF-8") as caught:
        make_trainer(*words(pictures))
    assert "caf\\udce9" in str(caught.value)


def test_names_of_either_form_of_unicode_have_one_order(make_trainer, pictures):
    """macOS writes é as e and an accent, which sorts before f, while é in one character sorts after z."""
    seen = []
    for form in ("NFC", "NFD"):
        shutil.rmtree(target := pictures.with_name(form), ignore_errors=True)
        shutil.copytree(pictures, target)
        for part in ("train", "val"):
            (target / part / "cat").rename(target / part / unicodedata.normalize(form, "élan"))
            dogs = (target / part / "dog").rename(target / part / "whippet")
            for name in ("z.png", "écru.png"):
                shutil.copy(dogs / "0.png", dogs / unicodedata.normalize(form, name))
        data = make_trainer(*words(target)).data
        seen.append([data.classes, [unicodedata.normalize("NFC", key) for key in data.train.keys]])
    assert seen[0] == seen[1]
    assert seen[0][0] == ["whippet", "élan"]


def test_hidden_files_and_folders_are_not_seen(make_trainer, pictures):
    seen = make_trainer(*words(pictures)).data
    for name in (".hidden.jpg", "._0.png", ".thumbnails/0.png"):
        (pictures / "train" / "cat" / name).parent.mkdir(exist_ok=True)
        (pictures / "train" / "cat" / name).write_bytes(b"no image")
    (pictures / "train" / ".ipynb_checkpoints").mkdir()
    whole = pictures.rename(pictures.parent / ".pictures")  # the root's own name does not count
    data = make_trainer(*words(whole)).data
    assert (data.classes, data.train.samples, data.train.keys) == (["cat", "dog"], 16, seen.train.keys)
    assert [path.name for path in prediction.images([whole / "train"], whole / "out")[0]] == [f"{number}.png" for number in range(8)] * 2


@pytest.mark.parametrize("policy", ["foo", "original-x5", "3"])
def test_an_unknown_policy_of_augmentation_is_refused(make_trainer, pictures, policy):
    with pytest.raises(UserError, match=rf"^data.auto_augment={policy}: timm knows no such policy \(Unknown .*\); rand-m9-mstd0.5"):
        make_trainer(*words(pictures, f"data.auto_augment='{policy}'"))


@pytest.mark.parametrize("erase", [0.0, 1.0])
def test_pixels_are_normalised_after_they_are_read_to_the_bits_of_timms_transform(make_trainer, pictures, erase):
    from timm.data import create_transform

    trainer = make_trainer(*words(pictures), f"data.random_erase={erase}")
    config, data = trainer.config.data, trainer.data
    look = {"mean": tuple(data.norm.mean), "std": tuple(data.norm.std), "interpolation": config.interpolation}
    augmented = {"scale": (config.crop_scale, 1.0), "hflip": config.horizontal_flip, "re_prob": erase}
    augmented |= {"auto_augment": config.auto_augment, "color_jitter": config.color_jitter or None}
    expected = {
        "train": create_transform((3, 32, 32), is_training=True, **look, **augmented),
        "val": create_transform((3, 32, 32), crop_pct=config.crop_pct, crop_mode=config.crop_mode, **look),
    }
    for name, transform in expected.items():
        loader = getattr(data, name)
        read, asked = loader.epochs.loader.dataset, next(iter(loader.epochs.sampler))
        assert read[asked[0]][0].dtype == (torch.float32 if erase and name == "train" else torch.uint8)
        for (position, seed), seen in zip(asked, next(iter(loader)).images, strict=True):
            with seeded(seed):
                assert torch.equal(seen, transform(read.samples.image(position)))

"""Damaged files among a folder's images: all named before anything starts, or left out."""

import json
import os
import shutil

import pytest
import torch
from folder_parts import digit_files
from PIL import Image

from lab.config.errors import UserError
from lab.data import images
from lab.data.seeds import seeded
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


def test_a_folder_without_an_image_is_named(make_trainer, pictures):
    (pictures / "train" / "empty").mkdir()
    with pytest.raises(UserError, match=r"Found no valid file for the classes empty\. Remove a folder that is not a class\."):
        make_trainer(*words(pictures))


def test_images_of_every_format_are_read(make_trainer, pictures):
    for kind in ("gif", "jp2", "avif", "JPG", "webp"):
        Image.open(pictures / "train" / "cat" / "0.png").convert("RGB").save(pictures / "train" / "cat" / f"0.{kind}")
    (pictures / "train" / "cat" / "notes.txt").write_text("no image")
    data = make_trainer(*words(pictures, "data.batch_size=1")).data
    assert data.train.samples == 16 + 5
    assert sum(len(batch.target) for batch in data.train) == 21


def test_what_counts_as_an_image_is_said(make_trainer, pictures):
    (pictures / "train" / "cow").mkdir()
    (pictures / "train" / "cow" / "1.heic").write_bytes(b"")
    with pytest.raises(UserError, match=r"for the classes cow\..* Images are files \.avif, .*\.webp\."):
        make_trainer(*words(pictures))


def test_one_class_is_said(make_trainer, tmp_path):
    assert make_trainer(*words(digit_files(tmp_path / "one", names=("cat",)))).data.notes == [
        f"{tmp_path / 'one' / 'train'} holds one class, cat, so that every prediction is right."
    ]


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


def test_few_classes_have_no_top5(make_trainer, run_folder, quiet, pictures):
    trainer = make_trainer(*words(pictures, "trainer.epochs=1", "trainer.log_every=1"))
    trainer.fit(run_folder, quiet)
    assert "val/top1" in trainer.values
    assert "train/top1" in trainer.values
    assert [name for name in trainer.values if "top5" in name] == []
    best = {name.removeprefix("val/"): value for name, value in trainer.values.items()}
    assert [name for name in trainer.task.rows(best) if "top-5" in name] == []
    assert "top-5" not in trainer.task.headline(trainer.pictured)


def test_damaged_images_are_left_out(make_trainer, run_folder, quiet, pictures, capsys):
    damage(pictures)
    trainer = make_trainer(*words(pictures, "data.skip_corrupt=true", "trainer.epochs=1"))
    assert f"{pictures}: 8 corrupt entries are left out (data.skip_corrupt=true); the first: train/cat/0.png" in capsys.readouterr().out
    assert (trainer.data.train.samples, trainer.data.val.samples) == (11, 10)  # 5.jpg is beside 5.png
    targets = [int(target) for batch in trainer.data.val for target in batch.target]
    assert [targets.count(label) for label in (0, 1)] == [4, 6]
    trainer.fit(run_folder, quiet)
    assert trainer.values["val/samples"] == 10


def test_a_part_without_an_image_is_refused(make_trainer, pictures):
    for path in (pictures / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"/val: has no image to use"):
        make_trainer(*words(pictures, "data.skip_corrupt=true"))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_is_damaged_within_is_found_before_the_run_or_named_in_it(make_trainer, pictures, workers):
    path = pictures / "val" / "cat" / "2.png"
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + bytes(20) + whole[80:])
    trainer = make_trainer(*words(pictures, f"data.workers={workers}"))
    with pytest.raises(UserError) as caught:
        list(trainer.data.val)
    assert str(caught.value).startswith(f"{path}: cannot be read as an image")
    assert "data.check=pixels with data.skip_corrupt=true" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(UserError, match=r"1 corrupt entries.*\nval/cat/2.png: cannot be read"):
        make_trainer(*words(pictures, "data.check=pixels"))
    assert make_trainer(*words(pictures, "data.check=pixels", "data.skip_corrupt=true")).data.val.samples == 11


def test_what_a_large_folder_holds_is_looked_at_once(make_trainer, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "FEW", 4)
    monkeypatch.setattr(images, "CACHE", tmp_path / "checked")
    (pictures / "val" / "dog" / "0.png").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(UserError, match="1 corrupt entries"):
            make_trainer(*words(pictures))
    (stamp,) = (tmp_path / "checked").iterdir()
    assert len(json.loads(stamp.read_text())) == 1
    (pictures / "train" / "cat" / "new.png").write_bytes(b"")
    with pytest.raises(UserError, match="2 corrupt entries"):
        make_trainer(*words(pictures))


def test_a_turned_photo_is_seen_upright(make_trainer, pictures):
    """An orientation in EXIF is followed, as predict.py does."""
    path = pictures / "val" / "cat" / "0.png"
    upright = Image.open(path).convert("L").resize((32, 32))
    upright.save(path)
    plain = next(iter(make_trainer(*words(pictures)).data.val)).images[0]
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    upright.rotate(180).save(path, exif=exif)
    turned = next(iter(make_trainer(*words(pictures)).data.val)).images[0]
    assert (turned - plain).abs().max() < 1e-6


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

"""A transform of the user's own: what it gets and returns, the same numbers again, and what is refused."""

import re

import numpy as np
import pytest
import torch
from digit_folders import digit_files
from PIL import Image

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.transforms import held_out_transform
from lab.run.trust import naming_code
from lab.tasks.inference import reader

OWN = """
import numpy
import torch
from torchvision.transforms import v2

drawn = v2.Compose([v2.RandomResizedCrop(16), v2.ColorJitter(0.5)])
made = v2.Compose([v2.Resize((16, 16)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
normalised = v2.Compose([made, v2.Normalize([0.5] * 3, [0.1] * 3)])
upside_down = lambda image: image.resize((16, 16)).transpose(1)
array = lambda image: numpy.asarray(image.resize((16, 16)))
large = lambda image: image.resize((20, 20))
text = lambda image: "image"
fails = lambda image: image.nothing
flat = lambda image: numpy.zeros(16)
tensor_of_rows = lambda image: torch.zeros(16, 16)
differs = lambda image: image.resize((16, 16) if image.getpixel((0, 0)) == (1, 2, 3) else (16, 17))  # fits the first image only
value = 3
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    root = digit_files(tmp_path / "pictures")
    return ["data=folder", f"data.root={root}", "data.image_size=16", "data.batch_size=5", "data.workers=0"]


def pixels(data, batch):
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (data.norm.mean, data.norm.std))
    return batch.images * std + mean


@pytest.mark.parametrize(("name", "change"), [("made", lambda a: a), ("array", lambda a: a), ("upside_down", lambda a: a[::-1])])
def test_its_images_are_normalised_and_seen(make_trainer, words, tmp_path, name, change):
    data = make_trainer(*words, f"data.val_transform=own.py:{name}").data
    batch = next(iter(data.val))
    for image, index in zip(pixels(data, batch), batch.index.tolist(), strict=True):
        file = np.asarray(Image.open(tmp_path / "pictures" / data.val.keys[index]).convert("RGB"))
        expected = torch.from_numpy(np.ascontiguousarray(change(file))).permute(2, 0, 1) / 255
        torch.testing.assert_close(image, expected, atol=1e-5, rtol=0)


def test_training_images_have_the_same_numbers_again(make_trainer, words):
    """By any number of workers, from any batch on; the validation keeps the model's own view."""
    chosen = [*words, "data.transform=own.py:drawn"]
    loader = make_trainer(*chosen).data.train
    first = [batch.images for batch in loader]
    second = [batch.images for batch in loader]
    assert not torch.equal(first[0], second[0])
    for more in ([], ["data.workers=1"]):
        again = make_trainer(*chosen, *more).data.train
        again.begin(2, 1)
        for given, expected in zip(again, second[1:], strict=True):
            assert torch.equal(given.images, expected)
    plain, own = (next(iter(make_trainer(*each).data.val)).images for each in (words, chosen))
    assert torch.equal(plain, own)


def test_predictions_are_made_by_the_held_out_transform(make_trainer, words):
    data = make_trainer(*words, "data.val_transform=own.py:upside_down")
    transform = held_out_transform(data.config.data, data.data.norm)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    turned = transform(image.transpose(Image.Transpose.FLIP_TOP_BOTTOM))
    plain = transform(image)
    torch.testing.assert_close(turned.flip(1), plain)


def test_an_image_to_predict_is_what_the_loader_gives(make_trainer, words):
    trainer = make_trainer(*words)
    batch = next(iter(trainer.data.val))
    read = reader(trainer.config.data, 16, trainer.data.norm)
    for seen, position in zip(batch.images, batch.index.tolist(), strict=True):
        image = read(trainer.data.val.epochs.loader.dataset.samples.image(position))
        assert image.is_contiguous()
        assert torch.equal(image[0], seen)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("large", r"returns an image \(3, 20, 20\); \(3, 16, 16\) is expected, as data.image_size says"),
        ("text", r"returns a str; a PIL image, an array \(H, W, C\) or a tensor \(C, H, W\) is expected"),
        ("fails", "fails: AttributeError"),
        ("normalised", "0 to 1 is expected, because the app normalises them"),
        ("flat", r"returns an array \(16,\) of float64; a PIL image, an array \(H, W, C\) or a tensor"),
        ("tensor_of_rows", r"returns an image \(16, 16\); \(3, 16, 16\) is expected"),
        ("differs", r"returns an image \(3, 17, 16\); \(3, 16, 16\) is expected"),
    ],
)
@pytest.mark.parametrize("setting", ["transform", "val_transform"])
def test_one_that_does_not_fit_is_refused_before_there_is_a_run(words, tmp_path, capsys, setting, name, said):
    import train

    first = sorted(path for path in (tmp_path / "pictures").rglob("*.png"))[0]
    Image.new("RGB", (16, 16), (1, 2, 3)).save(first)
    assert train.main([*words, f"data.{setting}=own.py:{name}", "model=tiny_resnet", "trainer.device=cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: data.{setting}=own.py:{name}: ")
    assert re.search(said, error)
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "mlflow.db").exists()


def test_it_must_exist_and_be_callable(make_trainer, words):
    with pytest.raises(UserError, match=r"data.transform=own.py:nothing"):
        make_trainer(*words, "data.transform=own.py:nothing")
    with pytest.raises(UserError, match=r"data.val_transform=own.py:value: is a int; a function of an image"):
        make_trainer(*words, "data.val_transform=own.py:value")


def test_both_name_code():
    tree = load(["data=folder", "data.transform=a.py:b", "data.val_transform=a.py:c"]).tree()
    assert {"data.transform", "data.val_transform"} <= set(dict(naming_code(tree)))


@pytest.mark.parametrize("word", ["data.augment=false", "data.auto_augment=nonsense", "data.random_erase=0.5", "data.horizontal_flip=0"])
def test_settings_that_it_replaces_are_refused(make_trainer, words, word):
    with pytest.raises(
        UserError, match=rf"data\.{word.partition('=')[0][5:]}=.*: has no effect beside data.transform=own.py:made; leave it out"
    ):
        make_trainer(*words, "data.transform=own.py:made", word)

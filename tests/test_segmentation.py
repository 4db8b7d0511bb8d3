"""The segmentation task: its losses, its metrics, its data."""

import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lab.base.errors import UserError
from lab.data.batch import Batch
from lab.run.predict import Asked, draw
from lab.tasks.segmentation import ELEMENT_LOSSES, OUTSIDE, SPEC
from lab.tasks.segmentation.task import SegmentationCounts, export, predict
from lossforge import losses

SMALL = [
    "task=segmentation",
    "model=segmenter_tiny",
    "data.train_scenes=12",
    "data.val_scenes=4",
    "data.batch_size=4",
    "data.image_size=32",
]


@pytest.fixture
def make(make_trainer):
    return lambda *words: make_trainer(*SMALL, *words)


def example(classes: int = 11) -> tuple[torch.Tensor, Batch]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, classes, (3, 8, 8), generator=generator)
    target[0, :2] = OUTSIDE
    return torch.randn(3, classes, 8, 8, generator=generator), Batch(torch.zeros(3, 1, 8, 8), target, torch.arange(3))


def dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over images and classes of 1 - (2 I + ε) / (P + Y + ε), pixels without a class left out."""
    there = (target != OUTSIDE)[:, None]
    p = logits.softmax(1) * there
    y = F.one_hot(target.where(target != OUTSIDE, 0), logits.shape[1]).movedim(-1, 1) * there
    inside, size = (p * y).sum((2, 3)), p.sum((2, 3)) + y.sum((2, 3))
    return (1 - (2 * inside + 1e-5) / (size + 1e-5)).mean()


def unknown(target: torch.Tensor) -> torch.Tensor:
    """Return the mask with the index that losses of distances leave out."""
    return target.masked_fill(target == OUTSIDE, -100)


def ohem(logits: torch.Tensor, target: torch.Tensor, threshold: float) -> torch.Tensor:
    """Mean of the pixels whose probability is below the threshold, at least the 20 hardest."""
    losses = F.cross_entropy(logits, target, ignore_index=OUTSIDE, reduction="none").flatten().sort(descending=True).values
    return losses[: max(20, int((losses > -np.log(max(threshold, 1e-300))).sum()))].mean()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["loss=ce"], lambda z, t: F.cross_entropy(z, t, ignore_index=OUTSIDE)),
        (["loss=ce", "loss.implementation=torch"], lambda z, t: F.cross_entropy(z, t, ignore_index=OUTSIDE)),
        (
            ["loss=ce", "loss.label_smoothing=0.1", "loss.class_weight=[0.2,1,1,1,1,1,1,1,1,1,2]"],
            lambda z, t: F.cross_entropy(
                z, t, torch.tensor([0.2, *[1.0] * 9, 2.0], dtype=z.dtype), ignore_index=OUTSIDE, label_smoothing=0.1
            ),
        ),
        (["loss=dice"], dice),
        (["loss=ohem_ce", "loss.threshold=0.05", "loss.min_kept=20"], partial(ohem, threshold=0.05)),
        (["loss=ohem_ce", "loss.threshold=0", "loss.min_kept=20"], partial(ohem, threshold=0.0)),
        (
            ["loss=generalized_dice", "loss.weighting=simple"],
            partial(losses.generalized_dice_loss, weighting="simple", ignore_index=OUTSIDE),
        ),
        (["loss=mcc"], partial(losses.mcc_loss, ignore_index=OUTSIDE)),
        (["loss=boundary", "loss.lambda_dice=0.5"], lambda z, t: 0.5 * dice(z, t) + 0.01 * losses.boundary_loss(z, unknown(t))),
        (["loss=hausdorff", "loss.alpha=1"], lambda z, t: dice(z, t) + 0.01 * losses.hausdorff_loss(z, unknown(t), 1.0)),
        (["loss=dice_ce"], lambda z, t: dice(z, t) + F.cross_entropy(z, t, ignore_index=OUTSIDE)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_losses_and_gradients_against_float64(make, words, wanted):
    task = make(*words).task
    logits, batch = example()
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = task.loss(leaf, batch, task.normalizer(batch))
    (1.5 * loss).backward()
    truth = wanted(exact, batch.target)
    (1.5 * truth).backward()
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(task.loss(logits, batch, 4 * task.normalizer(batch)), loss.detach() / 4)  # of an accumulated batch


BESIDE = ["generalized_dice", "mcc", "boundary", "hausdorff"]


@pytest.mark.each("function")
@pytest.mark.parametrize("name", sorted(set(SPEC.losses) - {"custom", *BESIDE, *ELEMENT_LOSSES}))
def test_every_loss_trains(make, name):
    trainer = make(f"loss={name}", "optim.schedule.warmup_epochs=0")
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    for group in trainer.groups():
        trainer.update(group)
    assert all(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    result = trainer.evaluate(trainer.model, trainer.data.val)
    assert 0 <= result.values["miou"] <= 1
    assert np.isfinite(result.values["loss"])


@pytest.mark.parametrize("name", BESIDE)
def test_a_few_updates_lower_a_loss_of_regions(make, name):
    trainer = make(f"loss={name}", "optim.schedule.warmup_epochs=0", "optim.lr=1e-2", "data.noise=0", "data.augment=false")
    with losses.plain_torch():  # the interpreter transforms each row of each class's mask by itself, which takes minutes
        before = trainer.evaluate(trainer.model, trainer.data.plain()).values["loss"]
        for _ in range(4):
            for group in trainer.groups():
                trainer.update(group)
        assert trainer.evaluate(trainer.model, trainer.data.plain()).values["loss"] < before - 0.02


def test_metrics_by_hand():
    """Of class 2, which is nowhere, there is no IoU; the last pixel has no class."""
    counts = SegmentationCounts(["a", "b", "c"], 0, torch.device("cpu"))
    target = torch.tensor([[[0, 0, 1, 1, OUTSIDE]]])
    found = torch.tensor([[[0, 1, 1, 1, 0]]])
    counts.add(found, Batch(torch.zeros(1, 1, 1, 5), target, torch.arange(1)), torch.tensor(3.0), torch.tensor(4.0))
    result = counts.result()
    assert result.confusion == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
    assert result.iou.tolist() == pytest.approx([1 / 2, 2 / 3, np.nan], nan_ok=True)
    assert not [name for name in result.values if "/" in name]
    assert result.values["miou"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert result.values["pixel_accuracy"] == 0.75
    assert result.values["loss"] == 0.75


def test_scenes_are_their_settings_and_masks_fit_them(make):
    batches = [next(iter(make("data.noise=0", "data.scene_seed=3").data.val)) for _ in range(2)]
    assert torch.equal(batches[0].images, batches[1].images)
    ink = batches[0].images > batches[0].images.min()
    assert torch.equal(ink[:, 0], batches[0].target > 0)  # without noise all ink has a class, and nothing else
    assert batches[0].target.max() <= 10
    assert not torch.equal(next(iter(make("data.noise=0").data.val)).target, batches[0].target)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images whose left half is red; masks say so, but for a line that has no class."""
    for part, count in (("train", 6), ("val", 2), ("test", 2)):
        for name in ("images", "masks"):
            (tmp_path / part / name).mkdir(parents=True)
        for number in range(count):
            pixels, mask = np.full((40, 40, 3), 30, np.uint8), np.zeros((40, 40), np.uint8)
            pixels[:, : 10 + 2 * number], mask[:, : 10 + 2 * number] = (220, 20, 20), 1
            mask[0] = OUTSIDE
            Image.fromarray(pixels).save(tmp_path / part / "images" / f"{number}.png")
            Image.fromarray(mask).save(tmp_path / part / "masks" / f"{number}.png")
    return tmp_path


def words(folder: Path) -> list[str]:
    return ["data=mask_folder", f"data.root={folder}", "data.classes=[back,red]", "data.image_size=40", "data.workers=0"]


PLAIN = ["data.scale=[1,1]", "data.photometric=0"]  # flips alone keep every pixel


def test_a_folder_of_masks_trains_and_is_mirrored_with_its_masks(make_trainer, folder):
    trainer = make_trainer(*SMALL[:2], "loss=dice_ce", "data.batch_size=3", "optim.lr=0.01", "trainer.epochs=12", *PLAIN, *words(folder))
    for batch in trainer.data.train:
        norm, there = trainer.data.norm, batch.target != OUTSIDE
        red = batch.images[:, 0] * norm.std[0] + norm.mean[0] > 0.5
        assert torch.equal((batch.target == 1)[there], red[there])
    while trainer.begin_epoch():
        trainer.batch = len(trainer.data.train)
        for group in trainer.groups():
            trainer.update(group)
        trainer.epoch_ended = True
    assert trainer.evaluate(trainer.model, trainer.data.val).values["miou"] > 0.8
    assert trainer.data.test.samples == 2


def test_small_images_are_seen_in_their_own_size(make_trainer, folder):
    trainer = make_trainer(*SMALL[:2], "loss=dice_ce", *words(folder), "data.image_size=auto")
    assert "data.image_size=auto: 64 pixels; the median training image is 40×40, which 256 would enlarge 6.4 times" in trainer.notes
    assert next(iter(trainer.data.val)).images.shape[-2:] == (64, 64)
    assert trainer.tree["data"]["image_size"] == 64


@pytest.mark.parametrize("value", [2, 254, 65535])
def test_pixels_without_a_class_have_the_value_that_the_setting_says(make_trainer, folder, value):
    """A binary mask whose other value is any, in 8 or 16 bits, gives the targets of one with 255."""
    still = [*SMALL[:2], "loss=dice_ce", "data.augment=false", *words(folder)]
    usual = [batch.target for batch in make_trainer(*still).data.val]
    for path in folder.glob("*/masks/*.png"):
        mask = np.array(Image.open(path)).astype(np.uint16 if value > 255 else np.uint8)
        mask[mask == OUTSIDE] = value
        Image.fromarray(mask).save(path)
    named = make_trainer(*still, f"data.ignore_value={value}")
    for target, batch in zip(usual, named.data.val, strict=True):
        assert (target == OUTSIDE).any()
        assert torch.equal(batch.target, target)
    for setting in ("255", "null"):
        with pytest.raises(UserError, match=f"has the value {value}; data.classes has 0 to 1"):
            make_trainer(*still, f"data.ignore_value={setting}")


UNKNOWN = 77
"""The value of pixels that do not count, of which each class has its own."""


@pytest.fixture
def channels(tmp_path: Path) -> Path:
    """Images whose left half is red and whose upper half is green, with a page of a TIFF for each; some pixels of each say nothing."""
    for part, count in (("train", 6), ("val", 2)):
        for name in ("images", "masks"):
            (tmp_path / part / name).mkdir(parents=True)
        for number in range(count):
            red, green = np.zeros((2, 40, 40), bool)
            red[:, : 10 + 2 * number], green[: 24 - 2 * number] = True, True
            pixels = np.stack([30 + 190 * red, 30 + 190 * green, np.full((40, 40), 30)], -1).astype(np.uint8)
            masks = [np.where(each, 200, 0).astype(np.uint8) for each in (red, green)]
            masks[0][:, :4], masks[1][-3:] = UNKNOWN, UNKNOWN
            Image.fromarray(pixels).save(tmp_path / part / "images" / f"{number}.png")
            first, second = map(Image.fromarray, masks)
            first.save(tmp_path / part / "masks" / f"{number}.tif", save_all=True, append_images=[second])
    return tmp_path


def of_channels(folder: Path, *more: str) -> list[str]:
    given = words(folder)
    given[2] = "data.classes=[red,green]"
    return [*SMALL[:2], *given, "data.overlapping=true", f"data.ignore_value={UNKNOWN}", *PLAIN, *more]


def binary(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    there = target != OUTSIDE
    return F.binary_cross_entropy_with_logits(logits[there], (target[there] == 1).to(logits.dtype))


def binary_dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    there = target != OUTSIDE
    p, y = logits.sigmoid() * there, ((target == 1) & there).to(logits.dtype)
    return (1 - (2 * (p * y).sum((2, 3)) + 1e-5) / (p.sum((2, 3)) + y.sum((2, 3)) + 1e-5)).mean()


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ("bce", binary),
        ("dice", binary_dice),
        ("dice_ce", lambda z, t: binary_dice(z, t) + binary(z, t)),
        ("mcc", lambda z, t: losses.mcc_loss(z, (t == 1).to(z.dtype), activation="sigmoid", mask=t != OUTSIDE)),
        pytest.param(
            "hausdorff",
            lambda z, t: binary_dice(z, t) + 0.01 * losses.hausdorff_loss(z, t == 1, activation="sigmoid", mask=t != OUTSIDE),
            marks=pytest.mark.slow,  # the interpreter transforms each row of each class's mask by itself
        ),
    ],
)
def test_losses_of_overlapping_classes(make_trainer, channels, loss, wanted):
    """Each class leaves out its own pixels, whose logits may be nan."""
    trainer = make_trainer(*of_channels(channels, f"loss={loss}", "data.batch_size=3"))
    task, (batch, _) = trainer.task, tuple(trainer.data.train)
    assert batch.target.shape == (3, 2, 40, 40)
    norm = trainer.data.norm
    for c in (0, 1):
        there = batch.target[:, c] != OUTSIDE
        of_image = batch.images[:, c] * norm.std[c] + norm.mean[c] > 0.5
        assert 0 < (~there).sum() < there.sum()
        assert torch.equal((batch.target[:, c] == 1)[there], of_image[there])
    logits = torch.randn(batch.target.shape, generator=torch.Generator().manual_seed(0))
    nothing = batch.target == OUTSIDE
    leaf, exact = logits.masked_fill(nothing, torch.nan).requires_grad_(), logits.double().requires_grad_()
    value, truth = task.loss(leaf, batch, task.normalizer(batch)), wanted(exact, batch.target)
    value.backward()
    truth.backward()
    torch.testing.assert_close(value.double(), truth.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)
    assert not leaf.grad[nothing].any()


def test_a_binary_mask(make_trainer, folder):
    """One class, of which a line of each mask does not count: the same as of two classes under a softmax."""
    given = words(folder)
    given[2] = "data.classes=[red]"
    task = make_trainer(*SMALL[:2], *given, "loss=dice_ce", "data.overlapping=true", "data.augment=false").task
    (batch,) = task.data.val
    two = make_trainer(*SMALL[:2], *words(folder), "loss=dice_ce", "data.augment=false").data.val
    assert torch.equal(batch.target[:, 0], next(iter(two)).target)
    assert (batch.target[:, :, 0] == OUTSIDE).all()
    logits = torch.randn(batch.target.shape).masked_fill(batch.target == OUTSIDE, torch.nan)
    exact = logits.double().nan_to_num()
    wanted = binary_dice(exact, batch.target) + binary(exact, batch.target)
    torch.testing.assert_close(task.loss(logits, batch, task.normalizer(batch)).double(), wanted, rtol=1e-5, atol=1e-6)
    counts = task.counts(task.data.val)
    task.count(counts, logits.nan_to_num(), batch)
    assert sum(map(sum, counts.result().confusion)) == 2 * 39 * 40


def test_overlapping_classes_are_learned(make_trainer, channels):
    given = ["loss=bce", "data.batch_size=3", "optim.lr=0.01", "trainer.epochs=12", "optim.schedule.warmup_epochs=0"]
    trainer = make_trainer(*of_channels(channels, *given))
    while trainer.begin_epoch():
        trainer.batch = len(trainer.data.train)
        for group in trainer.groups():
            trainer.update(group)
        trainer.epoch_ended = True
    result = trainer.evaluate(trainer.model, trainer.data.val)
    assert result.values["miou"] > 0.8
    assert result.shown[0].mask.shape == (40, 40)
    assert sum(map(sum, result.confusion)) == 2 * (2 * 40 * 40 - 4 * 40 - 3 * 40)


def test_overlapping_classes_are_predicted_drawn_and_exported(make_trainer, channels):
    """A model that finds one class everywhere and the other nowhere."""
    trainer = make_trainer(*of_channels(channels, "loss=bce"))
    model, predicted = predict(trainer.config, ["red", "green"], Asked(trainer.data.norm, torch.device("cpu"), top=5, score=0.0))
    model.eval()
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([2.0, -1.0])
    with Image.open(channels / "val" / "images" / "0.png") as image, torch.no_grad():
        found = predicted(image)
        picture = np.array(draw(image, found))
    assert (found.labels, found.scores) == (["red"], [1.0])
    assert found.masks.flatten(1).sum(1).tolist() == [1600, 0]
    assert np.abs(picture[-8, -8] - (0.5 * 30 + 0.5 * np.array(found.colors[0]))).max() < 6  # where the image is dark
    exported = export(trainer.config, ["red", "green"], trainer.data.norm)
    exported.model.load_state_dict(model.state_dict())
    probability = exported.module.eval()(torch.zeros(1, 3, 40, 40, dtype=torch.uint8))
    torch.testing.assert_close(probability, torch.tensor([2.0, -1.0]).sigmoid().view(1, 2, 1, 1).expand(1, 2, 40, 40))


def test_metrics_of_overlapping_classes_by_hand():
    counts = SegmentationCounts(["a", "b"], 0, torch.device("cpu"), overlapping=True)
    target = torch.tensor([[[[1, 1, 0, OUTSIDE]], [[0, 1, 1, 1]]]])
    found = torch.tensor([[[[1, 0, 0, 1]], [[1, 1, 0, 1]]]])
    counts.add(found, Batch(torch.zeros(1, 1, 1, 4), target, torch.arange(1)), torch.tensor(3.0), torch.tensor(4.0))
    result = counts.result()
    assert result.confusion == [[1, 0, 1, 1], [0, 1, 1, 2]]
    assert result.iou.tolist() == pytest.approx([1 / 2, 2 / 4])
    assert result.pixels.tolist() == [2, 3]
    assert result.values["pixel_accuracy"] == pytest.approx(4 / 7)


def test_what_does_not_fit_overlapping_classes_is_named(make_trainer, channels):
    with pytest.raises(UserError, match=r"loss=ce: data\.overlapping=true takes losses of classes under a sigmoid, or of overlaps"):
        make_trainer(*of_channels(channels, "loss=ce"))
    for path in channels.glob("*/masks/*.tif"):
        Image.new("L", (40, 40), 200 * (path.stem == "0")).save(path, save_all=True, append_images=[Image.new("L", (40, 40))])
    with pytest.raises(UserError, match=r"train.* have no pixel but in no class and of data.ignore_value=200; with data.overlapping=true"):
        make_trainer(*of_channels(channels, "data.ignore_value=200"))
    Image.new("L", (40, 40)).save(channels / "val" / "masks" / "0.tif")
    with pytest.raises(UserError, match=r"val/masks/0.tif: has pages of 1 channels; data.classes names 2 classes"):
        make_trainer(*of_channels(channels))


def test_a_mask_of_more_classes_than_its_targets_hold(make_trainer, folder):
    with pytest.raises(UserError, match=r"data\.classes has 256 names; at most 255 are possible"):
        make_trainer(*SMALL[:2], *words(folder), f"data.classes=[{','.join(f'c{n}' for n in range(256))}]")


@pytest.mark.parametrize("name", ["valid", "validation"])
def test_other_names_of_held_out_masks_and_files_that_are_passed_over(make_trainer, folder, name):
    (folder / "val").rename(folder / name)
    (folder / name / "masks" / "notes.txt").write_text("")
    (folder / "train" / "images" / "Thumbs.db").write_text("")
    (folder / "train" / "images" / "@eaDir").mkdir()
    for kind, stem in (("images", "e\u0301"), ("masks", "\u00e9")):  # macOS writes é as two characters
        (folder / name / kind / "1.png").rename(folder / name / kind / f"{stem}.png")
    data = make_trainer(*SMALL[:2], *words(folder)).data
    assert (data.val.keys, data.held_out) == ([f"{name}/images/0.png", f"{name}/images/e\u0301.png"], f"the images of {name}/")
    assert data.notes == [f"{folder}: 1 file passed over: 1 .txt"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda root: (root / "val" / "masks" / "1.png").unlink(), r"val/images/1.png: has no masks/1\.\* beside it in val/"),
        (
            lambda root: [Image.new("L", (40, 40), 255 * (n % 2)).save(root / "train" / "masks" / f"{n}.png") for n in range(6)],
            "the masks of .*train have no pixel but of 0, 255; data.classes numbers .* from 0 to 1, and 255 means no class",
        ),
        (
            lambda root: [Image.new("L", (40, 40), 255).save(root / "val" / "masks" / f"{n}.png") for n in range(2)],
            "the masks of .*val have no pixel but of 255;",
        ),
        (
            lambda root: ((path := root / "train" / "masks" / "2.png").unlink(), os.mkfifo(path)),
            "train/masks/2.png: is not a regular file",
        ),
        (
            lambda root: Image.new("L", (40, 40), 7).save(root / "train" / "masks" / "2.png"),
            r"train/masks/2.png: has the value 7; .* 0 to 1, and 255",
        ),
        (
            lambda root: (root / "train" / "images" / "2.jpg").write_bytes(b""),
            "train/images/2.png: has the stem of 2.jpg; different stems are expected",
        ),
        (lambda root: (root / "val" / "masks").rename(root / "val" / "mask"), "masks: no such folder"),
    ],
    ids=["no mask", "255 is a class", "no class", "a pipe", "a class too many", "two of one stem", "no folder"],
)
def test_what_is_wrong_in_a_folder_is_named(make_trainer, folder, damage, said):
    damage(folder)
    with pytest.raises(UserError, match=said):
        make_trainer(*SMALL[:2], *words(folder))


@pytest.fixture
def broken(folder):
    """Spoil five pairs of two parts, and add a mask without an image."""
    (folder / "train" / "images" / "0.png").write_bytes(b"no")
    Image.new("L", (3, 3)).save(folder / "train" / "masks" / "1.png")
    Image.new("L", (40, 40), 7).save(folder / "train" / "masks" / "2.png")
    Image.new("RGB", (40, 40)).save(folder / "train" / "masks" / "3.png")
    (folder / "val" / "masks" / "0.png").write_bytes((folder / "val" / "masks" / "1.png").read_bytes()[:50])
    Image.new("L", (40, 40)).save(folder / "train" / "masks" / "9.png")
    return folder


def test_all_that_is_wrong_is_named_at_once(make_trainer, broken):
    with pytest.raises(UserError) as error:
        make_trainer(*SMALL[:2], *words(broken))
    said = str(error.value)
    assert "6 corrupt entries; data.skip_corrupt=true leaves them out" in said
    pairs = (
        "train/images/0.png",
        "train/masks/1.png: is 3×3, its image 40×40",
        "train/masks/2.png",
        "train/masks/3.png: has pixels of mode RGB",
        "val/masks/0.png",
    )
    assert [name for name in pairs if name not in said] == []
    assert "train/masks/9.png: has no images/9.* beside it in train/." in said


def test_a_training_goes_on_with_what_is_not_wrong(make_trainer, broken, capsys):
    data = make_trainer(*SMALL[:2], *words(broken), "data.skip_corrupt=true").data
    assert "6 corrupt entries are left out" in capsys.readouterr().out
    assert data.train.keys == ["train/images/4.png", "train/images/5.png"]
    assert data.val.keys == ["val/images/1.png"]
    assert len(list(data.train)) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_images_and_masks_are_scaled_and_mirrored_together(make_trainer, folder, workers):
    """What is red stays red's class; what a small factor leaves free has no class, and each epoch another place."""
    given = ["data.batch_size=6", "data.scale=[0.5,2]", "data.photometric=0", "data.horizontal_flip=1", f"data.workers={workers}"]
    trainer = make_trainer(*SMALL[:2], *words(folder), *given)
    norm, seen = trainer.data.norm, []
    for _ in range(3):
        (batch,) = trainer.data.train
        seen.append(batch.target)
        red, there = batch.images[:, 0] * norm.std[0] + norm.mean[0] > 0.5, batch.target != OUTSIDE
        assert ((batch.target == 1) == red)[there].float().mean() > 0.97  # an edge lies between pixels
        assert there.any(2).any(1).all()
    assert not torch.equal(seen[0], seen[1])
    border = torch.cat(seen)[:, -1, :]
    assert (border == OUTSIDE).any()
    same = make_trainer(*SMALL[:2], *words(folder), *given, "data.workers=0")
    assert torch.equal(next(iter(same.data.train)).target, seen[0])
    assert [batch.target.shape for batch in trainer.data.plain()] == [(6, 40, 40)]


def test_the_picture_keeps_the_files_proportions_and_names_the_classes(make_trainer, folder):
    """A file that is twice as wide as it is high is drawn so, whatever the model sees."""
    for part in ("train", "val", "test"):
        for path in (folder / part).glob("*/*.png"):
            with Image.open(path) as image:
                image.resize((80, 40), Image.Resampling.NEAREST).save(path)
    trainer = make_trainer(*SMALL[:2], *words(folder))
    result = trainer.evaluate(trainer.model, trainer.data.val)
    assert [each.size for each in result.shown] == [(40, 80), (40, 80)]
    (path,) = trainer.task.pictures(result, folder)
    pixels = np.array(Image.open(path).convert("RGB")).astype(int)
    strong = (pixels[..., 0] > 150) & (pixels[..., 1] < 60)  # the red half of the first column's images
    rows, columns = np.nonzero(strong[:, : pixels.shape[1] // 3])
    first = rows < np.median(rows)
    height, width = np.ptp(rows[first]) + 1, np.ptp(columns[first]) + 1
    assert height / width == pytest.approx(40 / 20, rel=0.1)  # 10 of 40 columns are red


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss=dice", "loss.implementation=torch"], "torch has no loss=dice"),
        (["loss=ce", "loss.class_weight=[1,2]"], "has 2 numbers; the data has 11 classes"),
        (["model.name=vit_tiny_patch16_224"], "cannot be a segmenter's backbone|its levels have the shapes"),
        (["model=resnet18"], "task=segmentation takes a segmenter"),
    ],
    ids=str,
)
def test_refusals(make, words, said):
    with pytest.raises(UserError) as error:
        make(*words)
    assert re.search(said, str(error.value))


def test_a_run_is_scored_and_asked(tmp_path, monkeypatch, capsys, folder):
    """From training to evaluate.py and predict.py, whose mask has the file's size."""
    import evaluate
    import predict
    import train

    monkeypatch.chdir(tmp_path)
    quick = ["trainer.epochs=1", "trainer.runs=runs", "tracking=none", "trainer.device=cpu", "data.batch_size=3"]
    assert train.main([*SMALL[:2], *words(folder), *quick]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert {"masks.png", "config.yaml"} <= {path.name for path in run.iterdir()}
    assert evaluate.main([f"checkpoint={run}", "split=test", "trainer.runs=scored", "tracking=none"]) == 0
    assert "held-out mIoU" in capsys.readouterr().out
    image = folder / "val" / "images" / "0.png"
    assert predict.main([f"checkpoint={run}", "out=said", str(image)]) == 0
    assert sum(each["score"] for each in json.loads((tmp_path / "said" / "predictions.jsonl").read_text())["found"]) == pytest.approx(1)
    exported = torch.export.load(run / "checkpoints" / "best.pt2").module()
    pixels = torch.from_numpy(np.array(Image.open(image))).permute(2, 0, 1)[None]
    probability = exported(pixels).detach()
    assert probability.shape == (1, 2, 40, 40)
    torch.testing.assert_close(probability.sum(1), torch.ones(1, 40, 40))
    found = {each["label"]: each["score"] for each in json.loads((tmp_path / "said" / "predictions.jsonl").read_text())["found"]}
    shares = torch.bincount(probability.argmax(1).flatten(), minlength=2) / 1600
    assert [found.get(name, 0.0) for name in ("back", "red")] == pytest.approx(shares.tolist(), abs=2e-3)

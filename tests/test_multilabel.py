"""Images with sets of labels: truth, metrics, losses, training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.base.errors import UserError
from lab.data.batch import Batch
from lab.detectors.label_sets import multi_hot
from lab.tasks.multilabel.task import MultilabelCounts

CPU = torch.device("cpu")
SMALL = ["data.scene_pixels=32", "data.digit_pixels=[10,16]", "data.digits=[1,4]", "data.workers=0"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return [f"data.root={tmp_path_factory.mktemp('scenes')}", "data.train_scenes=48", "data.val_scenes=16", *SMALL]


@pytest.fixture
def make(make_trainer, scenes):
    return lambda *words, **more: make_trainer("task=multilabel", *scenes, *words, **more)


@pytest.mark.parametrize("augment", ["true", "false"])
def test_truth_is_the_set_of_the_drawn_digits(make, augment):
    data = make(f"data.augment={augment}", "data.scale=[1,1]").data
    tree = json.loads(data.train.file.path.read_text())
    drawn = {image["id"]: {e["category_id"] - 1 for e in tree["annotations"] if e["image_id"] == image["id"]} for image in tree["images"]}
    seen = 0
    for batch in data.train:
        for index, target in zip(batch.index.tolist(), batch.target, strict=True):
            assert set(target.nonzero().flatten().tolist()) == drawn[data.train.file.image_ids[index]]
            seen += 1
    assert seen == 48


def test_what_a_crop_cuts_away_is_not_there(make):
    data = make("data.scale=[3,3]", "data.min_visible=0.5").data
    before = sum(len(data.train.file.labels[data.train.file.rows(i)].unique()) for i in range(48))
    assert 0 < sum(batch.target.sum().item() for batch in data.train) < before


def test_images_held_in_memory_are_those_of_the_files(make):
    read, held = (make("data.augment=false", f"task.in_memory={held}").data for held in ("false", "true"))
    for part in ("train", "val"):
        theirs = {
            int(i): (image, target) for b in getattr(read, part) for i, image, target in zip(b.index, b.images, b.target, strict=True)
        }
        seen = 0
        for batch in getattr(held, part):
            for index, image, target in zip(batch.index.tolist(), batch.images, batch.target, strict=True):
                torch.testing.assert_close(image, theirs[index][0])
                assert torch.equal(target, theirs[index][1])
                seen += 1
        assert seen == len(theirs) > 0


def test_images_held_in_memory_are_augmented_there(make, run_folder, quiet):
    plain, moved = (next(iter(make(f"data.augment={given}", "task.in_memory=true").data.train)) for given in ("false", "true"))
    assert torch.equal(plain.index, moved.index)
    assert not torch.equal(plain.images, moved.images)
    trainer = make("task.in_memory=true", "trainer.epochs=2")
    trainer.fit(run_folder, quiet)
    assert trainer.values["val/samples"] == 16
    with pytest.raises(UserError, match=r"data.horizontal_flip=0.5: 0 is expected with task.in_memory=true"):
        make("task.in_memory=true", "data.horizontal_flip=0.5")


def test_a_damaged_image_is_named_when_it_is_taken_into_memory(make, tmp_path):
    words = [f"data.root={tmp_path}", "data.check=off", "data.workers=1", "task.in_memory=true"]
    file = make(*words).data.train.file
    path = Path(file.files[5])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError) as caught:
        make(*words)
    assert f"image {file.image_ids[5]} (" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_map_is_the_mean_of_the_classes_average_precisions():
    """By sklearn, over batches of different sizes; a class that no image has is left out."""
    from sklearn.metrics import average_precision_score, f1_score

    generator = np.random.default_rng(0)
    target = (generator.random((50, 4)) < (0.5, 0.3, 0.0, 0.1)).astype(float)
    probability = generator.random((50, 4))
    counts = MultilabelCounts(["a", "b", "c", "d"], 0.5, CPU)
    for rows in (slice(0, 7), slice(7, 50)):
        counts.add(torch.tensor(probability[rows]), torch.tensor(target[rows]), torch.tensor(3.0), torch.tensor(2.0))
    result = counts.result()
    values = result.values
    wanted = {name: average_precision_score(target[:, i], probability[:, i]) for i, name in enumerate("abcd") if name != "c"}
    assert values["map"] == pytest.approx(np.mean(list(wanted.values())))
    assert result.per_class == pytest.approx(wanted | {"c": np.nan}, nan_ok=True)
    assert not [name for name in values if "/" in name]
    assert values["f1"] == pytest.approx(f1_score(target.ravel(), probability.ravel() > 0.5))
    assert values["loss"] == 1.5


@pytest.mark.parametrize("classes", [["a", "b", "c"], ["b"]])
def test_images_of_one_class_or_none_are_scored(classes):
    probability, target = torch.full((4, len(classes)), 0.3), torch.zeros(4, len(classes))
    probability[:, classes.index("b")] = torch.tensor([0.7, 0.8, 0.6, 0.2])
    target[1:3, classes.index("b")] = 1
    for held, expected in ((target, (1 + 2 / 3) / 2), (torch.zeros_like(target), float("nan"))):
        counts = MultilabelCounts(classes, 0.5, CPU)
        counts.add(probability, held, torch.tensor(1.0), torch.tensor(1.0))
        result = counts.result()
        assert result.values["map"] == pytest.approx(expected, nan_ok=True)
        assert result.values["f1"] == pytest.approx(0.8 if held is target else 0.0)


EVERY = ["bce", "focal", "asymmetric", "poly_bce", "quality_focal", "varifocal", "distribution_balanced", "multilabel_soft_margin"]


@pytest.mark.parametrize("name", [*EVERY, "zlpr", "two_way"])
def test_dense_targets_of_every_loss_agree_with_torch(make, name):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 10, generator=generator) * 2
    target = (torch.rand(6, 10, generator=generator) < 0.3).float()
    batch, found = Batch(torch.zeros(6, 3, 2, 2), target, torch.arange(6)), []
    for implementation in ("lossforge", "torch"):
        task = make(f"loss={name}", f"loss.implementation={implementation}").task
        leaf = logits.clone().requires_grad_()
        loss = task.loss(leaf, batch, task.normalizer(batch))
        (1.5 * loss).backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["zlpr", "two_way"])
def test_losses_of_whole_label_sets_are_timms_and_train(make, name):
    """A few updates lower them; with masked labels, whose elements they do not have, they are refused."""
    import timm.loss

    trainer = make(f"loss={name}", "task.in_memory=true", "data.augment=false", "optim.schedule.warmup_epochs=0", "optim.lr=5e-3")
    task, target = trainer.task, multi_hot(torch.tensor([[1, -1], [3, 2], [0, 9]]), 10)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.zeros(3, 3, 2, 2), target, torch.arange(3))
    theirs = {"zlpr": timm.loss.ZlprLoss, "two_way": timm.loss.TwoWayLoss}[name]()(logits, target)
    torch.testing.assert_close(task.loss(logits, batch, task.normalizer(batch)), theirs, rtol=1e-5, atol=1e-6)
    before = trainer.evaluate(trainer.model, trainer.data.plain()).values["loss"]
    for _ in range(6):
        for group in trainer.groups():
            trainer.update(group)
    assert trainer.evaluate(trainer.model, trainer.data.plain()).values["loss"] < 0.97 * before
    batch.known = torch.ones(3, 10, dtype=torch.bool)
    with pytest.raises(UserError, match=f"^loss={name}: returns .* a value for each element is expected"):
        task.loss(logits, batch, task.normalizer(batch))


def test_a_balanced_loss_knows_the_training_datas_classes(make):
    """As timm's class does, which is given how many images have each class."""
    from timm.loss import DistributionBalancedLoss

    task = make("loss=distribution_balanced").task
    present = sum(batch.target.sum(0) for batch in make("data.augment=false").data.train)
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    target = multi_hot(torch.tensor([[1, -1], [3, 2], [0, 9], [4, 5], [6, 7], [8, -1]]), 10)
    theirs = DistributionBalancedLoss(present, num_samples=48, reduction="sum")(logits, target)
    batch = Batch(torch.zeros(6, 3, 2, 2), target, torch.arange(6))
    torch.testing.assert_close(task.loss(logits, batch, task.normalizer(batch)), theirs / 6, rtol=1e-5, atol=1e-6)


def test_classes_start_at_their_mean_share(make):
    trainer = make("loss=bce")
    present = sum(batch.target.sum().item() for batch in make("data.augment=false").data.train)
    bias = trainer.model.get_classifier().bias
    torch.testing.assert_close(bias.sigmoid(), torch.full_like(bias, present / 480))


@pytest.mark.parametrize("held", ["true", "false"])
def test_batches_of_several_sizes_are_refused(make, held):
    with pytest.raises(UserError, match=r"data.rect=true: task=multilabel takes images of one size. Use data.rect=false."):
        make("data.rect=true", f"task.in_memory={held}")


ROWWISE = """
import triton
import triton.language as tl
from lossforge.losses import rowwise


@rowwise
@triton.jit
def plain(z):
    return tl.exp(z) - 1.0
"""


def test_a_rowwise_loss_of_ones_own_is_refused(make, tmp_path):
    (tmp_path / "own.py").write_text(ROWWISE)
    with pytest.raises(UserError, match="element-wise losses"):
        make("loss=custom", f"loss.target={tmp_path / 'own.py'}:plain")

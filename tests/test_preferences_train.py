"""Pairs of digits, their annotators, and reward models."""

import math

import numpy as np
import pytest
import torch

from lab.base.errors import UserError
from lab.config.settings import load
from lab.tasks.preference import DigitPairsConfig
from lab.tasks.preference.data import PairBatch, draw_pairs
from lab.tasks.preference.task import PreferenceCounts

CPU = torch.device("cpu")
SMALL = ["task=preference", "data.image_size=16", "data.train_pairs=64", "data.val_pairs=32"]
LABELS = torch.arange(10).repeat(30)


def test_pairs_are_of_different_digits_and_truth_is_the_larger():
    pairs = draw_pairs(LABELS, 500, DigitPairsConfig(), 0)
    first, second = LABELS[pairs.digits].unbind(1)
    assert (first != second).all()
    assert torch.equal(pairs.truth, (first > second).float())
    again, held_out = (draw_pairs(LABELS, 500, DigitPairsConfig(), part) for part in (0, 1))
    assert torch.equal(again.digits, pairs.digits)
    assert torch.equal(again.share, pairs.share)
    assert not torch.equal(held_out.digits, pairs.digits)


def test_annotators_follow_bradley_and_terry():
    """The share of right votes for each difference is σ(β d), within five standard deviations, in both groups."""
    config = DigitPairsConfig(rationality=[0.8, 0.1], votes=3)
    pairs = draw_pairs(LABELS, 30000, config, 0)
    first, second = LABELS[pairs.digits].unbind(1)
    for group, beta in enumerate(config.rationality):
        for difference in (1, 3, 7):
            rows = (pairs.group == group) & ((first - second) == difference)
            chance = 1 / (1 + math.exp(-beta * difference))
            votes = 3 * int(rows.sum())
            assert votes > 900
            assert abs(pairs.share[rows].mean().item() - chance) < 5 * math.sqrt(chance * (1 - chance) / votes)
    assert abs(pairs.group.float().mean() - 0.5) < 0.02


def test_the_majority_decides_and_its_lead_is_the_weight(make_trainer):
    data = make_trainer(*SMALL, "data.votes=5", "data.rationality=[1.0,0.2]").data
    config = DigitPairsConfig(votes=5, rationality=[1.0, 0.2])
    for part, (name, loader) in enumerate((name, getattr(data, name)) for name in ("train", "val")):
        from lab.data.sets import digits

        drawn = draw_pairs(getattr(digits(config), name).targets, loader.samples, config, part)
        assert torch.equal(loader.targets, (drawn.share > 0.5).float())
        torch.testing.assert_close(loader.weight, (2 * drawn.share - 1).abs())
        assert set((loader.weight * 5).round().int().tolist()) <= {1, 3, 5}
        assert torch.equal(loader.group, drawn.group)
        assert torch.equal(loader.share, drawn.share)


def test_a_batch_holds_both_images_of_each_pair(make_trainer):
    from lab.data.sets import digits, resize_all

    config = load([*SMALL]).config.data
    train = digits(config).train
    pairs = draw_pairs(train.targets, 64, config, 0)
    data = make_trainer(*SMALL, "data.augment=false").data
    batch = next(iter(data.train))
    assert isinstance(batch, PairBatch)
    assert len(batch) == 64
    assert batch.images.shape == (128, 1, 16, 16)
    images = (resize_all(train.images, 16) - data.norm.mean[0]) / data.norm.std[0]
    torch.testing.assert_close(batch.images, images[pairs.digits[batch.index].flatten()])


def value_and_gradient(make_trainer, *words):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(14, 1, generator=generator) * 2
    batch = PairBatch(
        torch.zeros(14, 1, 2, 2),
        (torch.rand(7, generator=generator) < 0.5).float(),
        torch.arange(7),
        torch.rand(7, generator=generator),
        torch.randint(0, 2, (7,), generator=generator),
    )
    task = make_trainer(*SMALL, "data.votes=3", "data.rationality=[1.0,0.1]", *words).task
    leaf = rewards.clone().requires_grad_()
    loss = task.loss(leaf, batch, task.normalizer(batch))
    (1.5 * loss).backward()
    return batch, rewards.double().view(-1, 2), loss.detach(), leaf.grad


@pytest.mark.parametrize(
    ("words", "margin", "smoothing", "centre"),
    [((), 0, 0, 0), (("loss.margin=0.5", "loss.label_smoothing=0.1", "loss.center_rewards_coefficient=0.01"), 0.5, 0.1, 0.01)],
)
def test_bradley_terrys_loss_is_its_formula(make_trainer, words, margin, smoothing, centre):
    batch, rewards, loss, gradient = value_and_gradient(make_trainer, *words)
    rewards.requires_grad_()
    sign = 2 * batch.target.double() - 1
    lead = sign * (rewards[:, 0] - rewards[:, 1]) - margin
    rows = (1 - smoothing) * torch.log1p((-lead).exp()) + smoothing * torch.log1p(lead.exp()) + centre * rewards.sum(1) ** 2
    (1.5 * rows.mean()).backward()
    torch.testing.assert_close(loss.double(), rows.mean().detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.double().view(-1, 2), rewards.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
@pytest.mark.parametrize("name", ["preference_bce", "preference_bce_probability"])
def test_preference_bce_weighs_votes_and_groups(make_trainer, name, implementation):
    words = f"loss={name}", f"loss.implementation={implementation}", "loss.group_weight=[1.0,0.25]"
    batch, rewards, loss, gradient = value_and_gradient(make_trainer, *words)
    rewards.requires_grad_()
    chance = (rewards[:, 0] - rewards[:, 1]).sigmoid()
    target = batch.target.double()
    weight = batch.weight.double() * torch.tensor([1.0, 0.25], dtype=torch.float64)[batch.group]
    rows = -weight * (target * chance.log() + (1 - target) * (1 - chance).log())
    (1.5 * rows.sum() / 7).backward()
    torch.testing.assert_close(loss.double(), rows.detach().sum() / 7, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient.double().view(-1, 2), rewards.grad, rtol=1e-4, atol=1e-6)


def test_metrics_by_hand():
    counts = PreferenceCounts(4, CPU)
    lead, truth, share = torch.tensor([2.0, -1.0, 0.5, -3.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    for rows in (slice(0, 1), slice(1, 4)):
        count = torch.tensor(float(len(lead[rows])))
        counts.add(lead[rows], truth[rows], share[rows], count * 0.5, count)
    values = counts.result().values
    chance = lead.double().sigmoid().numpy()  # 0.88 and 0.62 in the bins from 0.75 and 0.5, 0.27 and 0.05 in those from 0.25 and 0
    assert values["accuracy"] == 0.5
    assert values["agreement"] == 1.0
    assert values["margin"] == pytest.approx((2 - 1 - 0.5 + 3) / 4)
    assert values["ece"] == pytest.approx(np.abs(share.numpy() - chance).sum() / 4, rel=1e-6)
    assert values["loss"] == 0.5
    assert values["samples"] == 4


def test_a_reward_model_learns_which_digit_is_larger(make_trainer, run_folder, quiet):
    words = ["data.train_pairs=300", "data.val_pairs=200", "data.rationality=[3.0]", "trainer.epochs=5", "optim.lr=3e-3"]
    trainer = make_trainer(*SMALL, "optim.schedule.warmup_epochs=0", *words)
    trainer.fit(run_folder, quiet)
    assert trainer.values["val/accuracy"] > 0.65, trainer.values
    assert trainer.guard.total.item() == 0
    (picture,) = trainer.task.pictures(trainer.pictured, run_folder.path)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.votes=2"], "data.votes=2: an odd number"),
        (["data.rationality=[]"], "data.rationality: one number"),
        (["loss=preference_bce", "loss.group_weight=[1,2]"], "the data has no groups"),
        (["loss=preference_bce", "data.rationality=[1,1]", "loss.group_weight=[1,2,3]"], "has 3 numbers; the data has 2 groups"),
    ],
)
def test_mistakes_of_pairs_are_named(make_trainer, words, said):
    with pytest.raises(UserError, match=said):
        make_trainer(*SMALL, *words)

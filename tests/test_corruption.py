"""Long tails, wrong labels and class-balanced weights of training data."""

import pytest
import torch

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.load import load_data, tail_counts, with_wrong_labels
from lab.data.sets import Norm

CPU = torch.device("cpu")
NORM = Norm([0.5], [0.5])
PLAIN = ["data.image_size=8", "data.augment=false"]


def data_of(*words):
    return load_data(load([*PLAIN, *words]).config.data, NORM, CPU, 0)


@pytest.fixture(scope="module")
def plain():
    return data_of()


def test_the_tails_counts_are_the_papers(plain):
    """Cui et al. 2019: n μ^(-c / 9), here of the 139 training images of the smallest class."""
    data = data_of("data.imbalance=100")
    least = int(plain.counts.min())
    assert data.counts.tolist() == [round(least * 100 ** (-c / 9)) for c in range(10)]
    assert data.counts.tolist() == torch.bincount(data.train.targets).tolist()
    assert data.counts[0] == least
    assert data.counts[9] == round(least / 100)
    assert data.val.samples == plain.val.samples
    assert torch.equal(data.val.targets, plain.val.targets)


def test_the_tails_images_are_training_images_with_their_labels(plain):
    data = data_of("data.imbalance=50")
    known = {image.numpy().tobytes(): int(label) for image, label in zip(plain.train.images, plain.train.targets, strict=True)}
    assert all(known[image.numpy().tobytes()] == label for image, label in zip(data.train.images, data.train.targets, strict=True))
    assert data.norm.mean[0] == pytest.approx(data.train.images.mean().item())


def test_a_share_of_each_class_stays(plain):
    data = data_of("data.train_share=0.1")
    assert data.counts.tolist() == [round(int(n) * 0.1) for n in plain.counts]
    both = data_of("data.train_share=0.5", "data.imbalance=10")
    assert both.counts[0] == min(round(int(n) * 0.5) for n in plain.counts)
    assert both.counts[9] == round(int(both.counts[0]) / 10)


def test_no_class_is_lost():
    assert tail_counts(torch.tensor([5, 9, 7]), 1000).tolist() == [5, 1, 1]
    assert tail_counts(torch.tensor([5, 9, 7]), 1.0).tolist() == [5, 9, 7]


def test_the_share_of_wrong_labels_is_as_said(plain):
    data = data_of("data.label_noise=0.4")
    wrong = data.train.targets != plain.train.targets
    assert int(wrong.sum()) == round(0.4 * len(wrong))
    assert torch.equal(data.val.targets, plain.val.targets)
    assert torch.equal(data.train.images, plain.train.images)
    assert torch.equal(data_of("data.label_noise=0.4").train.targets, data.train.targets)
    assert not torch.equal(data_of("data.label_noise=0.4", "data.corruption_seed=1").train.targets, data.train.targets)


def test_noise_is_symmetric():
    """Each wrong class as often: 9000 wrong labels over nine classes, within five standard deviations; and as often from each class."""
    targets = torch.arange(10).repeat(2000)
    labels = with_wrong_labels(targets, 10, 0.45, torch.Generator().manual_seed(1))
    steps = torch.bincount((labels - targets) % 10, minlength=10)
    assert steps[0] == 11000
    assert (steps[1:] - 1000).abs().max() < 5 * (9000 * 1 / 9 * 8 / 9) ** 0.5
    moved = torch.bincount(targets[labels != targets], minlength=10)
    assert (moved - 900).abs().max() < 5 * (2000 * 0.45 * 0.55) ** 0.5


def test_class_balanced_weights_follow_the_effective_number():
    """Cui et al. 2019: w ∝ (1 - β) / (1 - βⁿ), their sum the number of classes; held-out images have none."""
    data = data_of("data.imbalance=10", "data.class_balance=0.99")
    number = [(1 - 0.99 ** int(n)) / 0.01 for n in data.counts]
    share = sum(1 / n for n in number)
    wanted = torch.tensor([10 / (n * share) for n in number])
    torch.testing.assert_close(data.train.weight, wanted[data.train.targets])
    assert data.val.weight is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.class_balance=0.9", "data.class_weight={8: 2}"], "data.class_balance"),
        (["data.label_noise=0.1", "data.csv=notes.csv"], "data.label_noise=0.1: cannot go with data.csv"),
        (["data.imbalance=0.5"], "data.imbalance takes numbers at least 1"),
        (["data.label_noise=1"], "below 1"),
    ],
)
def test_mistakes_are_named(words, said):
    with pytest.raises(UserError) as caught:
        data_of(*words)
    assert said in str(caught.value)

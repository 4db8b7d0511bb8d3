"""Which images an epoch has: chances by class, by weight, or of the user's own; the same again after a break."""

import pytest
import torch
from digit_folders import digit_files

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.loading import chances_of, order_of
from lab.run.trust import naming_code

FEW = ["data.image_size=16", "data.batch_size=4", "data.augment=false"]


def config(*words):
    return load(list(words)).config.data


def test_without_chances_an_epoch_is_the_permutation_of_its_seed():
    expected = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    assert torch.equal(order_of(50, None, torch.Generator().manual_seed(3)), expected)


def test_samples_are_drawn_in_proportion_to_their_chances():
    chances = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    drawn = torch.cat([order_of(6, chances, torch.Generator().manual_seed(seed)) for seed in range(5000)])
    share = torch.bincount(drawn, minlength=6) / len(drawn)
    expected = chances / chances.sum()
    assert share[expected == 0].tolist() == [0.0, 0.0, 0.0]
    deviation = (expected * (1 - expected) / len(drawn)).sqrt()
    assert ((share - expected).abs() <= 5 * deviation).all()


def test_balanced_gives_every_class_the_same_chance():
    targets = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    chances = chances_of(config("data.sampler=balanced"), targets, None)
    sums = torch.zeros(3, dtype=torch.float64).index_add_(0, targets, chances)
    torch.testing.assert_close(sums, sums[:1].expand(3))
    several = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    chances = chances_of(config("data.sampler=balanced"), several, None)
    assert chances.tolist() == pytest.approx([1 / 3, 1 / 3, 4 / 3, 1 / 3])


def test_weights_decide_how_often_and_do_not_weigh_again(make_trainer):
    words = ["data.class_weight={0: 3.0, 1: 0.0}", "data.augment=false"]
    weighed = make_trainer(*words).data.train
    drawn = make_trainer(*words, "data.sampler=weighted").data.train
    targets = torch.cat([batch.target for epoch in range(4) for batch in drawn])
    count = torch.bincount(targets, minlength=10) / len(targets)
    expected = torch.bincount(weighed.targets, minlength=10) * torch.tensor([3.0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    expected /= expected.sum()
    assert count[1] == 0
    assert ((count - expected).abs() <= 5 * (expected * (1 - expected) / len(targets)).sqrt()).all()
    assert next(iter(weighed)).weight is not None
    assert next(iter(drawn)).weight is None
    assert drawn.samples == weighed.samples


@pytest.mark.parametrize("where", ["memory", "files"])
def test_an_epoch_is_the_same_from_any_batch_on(make_trainer, tmp_path, where):
    files = ["data=folder", f"data.root={digit_files(tmp_path / 'pictures')}", "data.workers=0"] if where == "files" else []
    words = [*files, *FEW, "data.sampler=balanced"]
    loader = make_trainer(*words).data.train
    whole = [[batch.index.tolist() for batch in loader] for epoch in range(2)]
    assert whole[0] != whole[1]
    again = make_trainer(*words).data.train
    again.begin(2, 3)
    assert [batch.index.tolist() for batch in again] == whole[1][3:]
    assert sum(map(len, whole[0])) == loader.samples


def test_a_function_of_the_targets_gives_the_chances(make_trainer, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "def ones(targets):\n    return [1.0] * len(targets)\n\n\n"
        "def first(targets):\n    return (targets == 0).double()\n\n\n"
        "def short(targets):\n    return [1.0]\n\n\ndef below(targets):\n    return -targets\n\n\n"
        "def fails(targets):\n    return targets.nothing\n"
    )
    monkeypatch.chdir(tmp_path)
    train = make_trainer("data.sampler=own.py:first").data.train
    assert {label for batch in train for label in batch.target.tolist()} == {0}
    for name, said in (("short", r"numbers of shape \(1,\)"), ("below", r"the number -\d")):
        with pytest.raises(
            UserError, match=rf"data.sampler=own.py:{name}: gives {said}; finite numbers of at least 0, one for each of the"
        ):
            make_trainer(f"data.sampler=own.py:{name}")
    with pytest.raises(UserError, match=r"data.sampler=own.py:fails: fails: AttributeError"):
        make_trainer("data.sampler=own.py:fails")


def test_other_words_are_refused():
    targets = torch.tensor([0, 1])
    with pytest.raises(UserError, match=r"balanced, weighted, or a function"):
        chances_of(config("data.sampler=balancd"), targets, None)
    with pytest.raises(UserError, match=r"the images have no weights"):
        chances_of(config("data.sampler=weighted"), targets, None)
    with pytest.raises(UserError, match=r"the labels are numbers"):
        chances_of(config("data.sampler=balanced"), torch.tensor([[0.5], [2.0]]), None)


def test_only_a_function_counts_as_code_in_a_file():
    for value, is_code in (("balanced", False), ("weighted", False), ("own.py:first", True), ("os:system", True)):
        tree = load(["data.sampler=" + value]).tree()
        assert ("data.sampler" in dict(naming_code(tree))) == is_code, value

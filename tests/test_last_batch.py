"""Any number of samples and any batch size trains, and the loss of each update is the mean over its samples."""

import pytest
import torch
import torch.nn.functional as F
from digit_folders import digit_files

from lab.base.errors import UserError
from lab.training.failures import explained

FILES = ["data=folder", "data.image_size=32", "data.workers=0", "data.augment=false", "loss.implementation=torch"]
HELD = ["data.image_size=32", "data.augment=false", "loss.implementation=torch"]


COUNTS = (2, 3, 5, 9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders by the number of their training images, of two classes; an image of each is held out."""
    root = tmp_path_factory.mktemp("folders")
    made = {}
    for count in (1, *COUNTS):
        made[count] = digit_files(root / str(count), (count + 1) // 2, 1, ("a", "b"))
        if count % 2:
            (made[count] / "train" / "b" / f"{count // 2}.png").unlink()
    (made[1] / "train" / "b" / "empty.png").write_bytes(b"")
    return made


def mean_losses(trainer):
    """Of an epoch's updates: the loss that the trainer counted, the mean over the update's samples, and how many they are."""
    trainer.model.train()
    told = []
    for group in trainer.groups():
        with torch.no_grad():
            losses = [F.cross_entropy(trainer.model(batch.images), batch.target, reduction="sum") for batch in group]
        before, samples = trainer.window[0].clone(), sum(len(batch) for batch in group)
        trainer.update(group)
        told.append(((trainer.window[0] - before).item(), (sum(losses) / samples).item(), samples))
    return told


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("batch_size", [2, 3, 4, 8])
def test_a_folder_of_any_size_trains_under_batch_norm(make_trainer, folders, batch_size, accumulate):
    for count in COUNTS:
        words = [f"data.root={folders[count]}", f"data.batch_size={batch_size}", f"trainer.accumulate={accumulate}"]
        trainer = make_trainer(*FILES, *words)
        told = mean_losses(trainer)
        assert sum(samples for _, _, samples in told) == count
        assert trainer.guard.total.item() == 0
        for counted, mean, samples in told:
            assert samples >= 2
            assert counted == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("words", [["data.batch_size=718"], ["data.batch_size=4", "trainer.max_updates=2"]], ids=str)
def test_digits_with_a_rest_of_one_train_to_the_end(make_trainer, run_folder, quiet, words):
    """1437 = 2 · 718 + 1 = 359 · 4 + 1."""
    trainer = make_trainer(*HELD, *words, "trainer.epochs=1", "data.eval_batch_size=359")
    assert trainer.data.train.shares.sizes[-2:] == ([360, 359] if "718" in words[0] else [3, 2])
    trainer.fit(run_folder, quiet)
    assert trainer.values["val/samples"] == 360
    assert torch.tensor(trainer.values["train/loss"]).isfinite()


def test_the_last_batches_of_an_epoch_train(make_trainer):
    trainer = make_trainer(*HELD, "data.batch_size=4")
    trainer.data.train.begin(1, 357)
    told = mean_losses(trainer)
    assert [samples for _, _, samples in told] == [4, 3, 2]
    for counted, mean, _ in told:
        assert counted == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(("count", "batch_size"), [(1, 4), (3, 1)])
def test_one_sample_a_batch_is_refused_where_batch_norm_cannot_take_it(make_trainer, folders, count, batch_size):
    words = [f"data.root={folders[count]}", f"data.batch_size={batch_size}", "data.skip_corrupt=true"]
    trainer = make_trainer(*FILES, *words)
    with pytest.raises(UserError) as caught, explained(trainer.config):
        mean_losses(trainer)
    assert str(caught.value).startswith(f"data.batch_size={batch_size}: model.name=tiny_resnet normalises by a batch's mean")
    assert "model=tiny_vit" in str(caught.value)
    told = mean_losses(make_trainer("model=tiny_vit", *FILES, *words))
    assert [samples for _, _, samples in told] == [1] * count
    for counted, mean, _ in told:
        assert counted == pytest.approx(mean, abs=1e-5)

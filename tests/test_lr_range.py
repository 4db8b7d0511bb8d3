"""The learning-rate range test: rates that rise by one factor, a suggestion before the loss's lowest value, its picture."""

import math
from pathlib import Path

import pytest
from words import ALONE

import lab
from lab.base.errors import UserError
from lab.config.settings import load
from lab.optim.lr_range import LEAST, LrRange, suggestion

SHORT = ["experiment=lr_range", "data.image_size=16", "data.batch_size=64", "model=tiny_resnet", "trainer.device=cpu", *ALONE]


def test_the_suggestion_is_where_the_loss_falls_the_fastest():
    rates = [10**-exponent for exponent in (6, 5, 4, 3, 2, 1)]
    assert suggestion(rates, [2.3, 2.2, 1.5, 1.0, 1.4, 9.0]) == rates[1]  # not the steep rise and fall after the lowest loss
    assert suggestion(rates, [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]) == rates[0]
    assert suggestion([1e-3, 1e-3, 1e-2], [2.0, 1.0, 0.5]) == 1e-3  # equal rates, of an interrupted test


def test_the_rate_rises_by_one_factor_from_warmup_lr_to_lr(make_trainer):
    trainer = make_trainer(*SHORT, "trainer.max_updates=5", "optim.lr=1.0", "optim.schedule.warmup_lr=1e-4", "optim.layer_decay=0.5")
    updater, rates = trainer.updater, []
    for count in range(6):
        rates.append([group["lr"] for group in updater.optimizer.param_groups])
        updater.schedule.step_update(count + 1)
    highest = [max(each) for each in rates]
    assert highest == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1.0])
    shares = {round(each / max(rates[0]), 9) for each in rates[0]}
    assert shares == {round(each / max(rates[4]), 9) for each in rates[4]}
    with pytest.raises(UserError, match=r"optim.schedule.warmup_lr=2: above 0 and below optim.lr=1 is expected"):
        make_trainer(*SHORT, "optim.lr=1.0", "optim.schedule.warmup_lr=2")


def test_a_run_ends_with_a_picture_and_a_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = lab.train(*SHORT, "trainer.max_updates=25")
    assert result.status == "FINISHED"
    assert (result.folder / "lr_range.png").stat().st_size > 5000
    assert 1e-6 <= result.values["suggested_lr"] <= 10
    log = (result.folder / "log.txt").read_text()
    assert f"suggested: optim.lr={result.values['suggested_lr']:.2g}" in log
    assert Path(load(SHORT).config.trainer.callbacks[0]).name.endswith("LrRange")


def test_a_run_that_is_too_short_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = lab.train(*SHORT, f"trainer.max_updates={LEAST - 1}")
    assert "suggested_lr" not in result.values
    assert f"needs {LEAST} updates of a finite loss, and had {LEAST - 1}" in (result.folder / "log.txt").read_text()


def test_a_loss_that_diverges_ends_the_test():
    class Trainer:
        updates, done = 100, 0

    class Updater:
        lr = 1e-3

    test, trainer = LrRange(), Trainer()
    trainer.updater = Updater()
    for number in range(LEAST + 20):
        trainer.done = number + 1
        test.on_before_update(trainer)
        test.on_report(trainer, {"train/loss": 2.0 if number < LEAST else 2.0 * 3 ** (number - LEAST)})
        if trainer.updates == trainer.done:
            break
    smoothed = test.losses
    assert smoothed[:LEAST] == pytest.approx([2.0] * LEAST)
    assert smoothed[-1] > 4 * 2.0 > smoothed[-2]
    test.on_report(trainer, {"train/loss": math.nan})
    assert len(test.losses) == len(smoothed)

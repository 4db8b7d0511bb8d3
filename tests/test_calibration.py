"""The calibration error after temperature scaling, the seesaw loss of the app, and the linear probe of classes that were left out."""

import json
import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from words import ALONE

from lab.base.errors import UserError
from lab.tasks.classification.metrics import ClassificationCounts
from lab.tasks.classification.probe import probed
from lab.tasks.classification.temperature import TEMPERATURES


def counted(logits, target, parts, activation="softmax"):
    counts = ClassificationCounts(logits.shape[1], 15, 0, torch.device("cpu"), activation=activation)
    probability = logits.softmax(-1) if activation == "softmax" else logits.sigmoid()
    for rows in torch.arange(len(logits)).split(parts):
        counts.add(probability[rows].float(), target[rows], None, torch.tensor(0.0), torch.tensor(1.0), rows)
    return counts.result().values


def drawn(scale, seed=0, samples=3001):
    """Logits that are `scale` times as far apart as labels drawn from them say."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, 7, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return logits * scale, target


def plain_error(confidence, correct):
    place = (confidence * 15).long().clamp(0, 14)
    return sum(abs((correct - confidence)[place == each].sum().item()) for each in range(15)) / len(confidence)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_the_temperature_is_found_and_mends_calibration(scale):
    logits, target = drawn(scale)
    values = counted(logits, target, 256)
    assert values["temperature"] == pytest.approx(scale, rel=0.1)
    assert values["ece_temperature"] < 0.03
    assert scale == 1 or values["ece"] > 3 * values["ece_temperature"]


def test_each_half_is_scaled_by_the_others_temperature():
    """Against scipy's fit of either half, rounded to the temperatures that are tried."""
    logits, target = drawn(2.0, samples=401)
    logits[::2] *= 2  # even samples need another temperature than odd ones
    best = []
    for half in range(2):
        x, y = logits[half::2], target[half::2]
        fit = minimize_scalar(lambda t, x=x, y=y: torch.nn.functional.cross_entropy(x / t, y).item(), bounds=(0.1, 10), method="bounded")
        best.append(min(TEMPERATURES, key=lambda t, x=x, y=y: torch.nn.functional.cross_entropy(x / t, y).item()))
        assert best[half] == pytest.approx(fit.x, rel=0.08)
    temperature = torch.where(torch.arange(401) % 2 == 0, best[1], best[0])[:, None]
    confidence, guess = (logits / temperature).softmax(-1).max(-1)
    values = counted(logits, target, 64)
    assert values["ece_temperature"] == pytest.approx(plain_error(confidence, (guess == target).double()), abs=2e-3)
    assert values["temperature"] == pytest.approx(math.sqrt(best[0] * best[1]))


def test_sigmoids_are_scaled_as_sigmoids():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 1, generator=generator, dtype=torch.float64).expand(-1, 2) * torch.tensor([1.0, -1.0])
    target = (torch.rand(2000, generator=generator, dtype=torch.float64) > logits[:, 0].sigmoid()).long()
    values = counted(logits * 4, target, 500, "sigmoid")
    assert values["temperature"] == pytest.approx(4, rel=0.15)
    assert values["ece_temperature"] < 0.05 < values["ece"]


def test_one_hot_probabilities_and_one_sample_stay_finite():
    for samples in (1, 5):
        counts = ClassificationCounts(3, 15, 0, torch.device("cpu"))
        target = torch.arange(samples) % 3
        counts.add(torch.eye(3)[target], target, None, torch.tensor(0.0), torch.tensor(1.0))
        values = counts.result().values
        assert values["ece_temperature"] == pytest.approx(0, abs=1e-6)
        assert math.isfinite(values["temperature"])


def test_only_some_classes_are_kept(make_trainer):
    data = make_trainer("data=digits", "data.only_classes=[3,7,1]").data
    whole = make_trainer("data=digits").data
    assert data.classes == ["1", "3", "7"]
    assert data.counts.tolist() == whole.counts[[1, 3, 7]].tolist()
    assert set(data.val.keys) == {key for key, label in zip(whole.val.keys, whole.val.targets.tolist(), strict=True) if label in (1, 3, 7)}
    with pytest.raises(UserError, match="at least two"):
        make_trainer("data=digits", "data.only_classes=[3,3]")
    with pytest.raises(UserError, match=r"data\.only_classes: class"):
        make_trainer("data=digits", "data.only_classes=[3,12]")


def test_a_probe_tells_classes_that_features_divide():
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(200) % 4
    centres = 5 * torch.randn(4, 8, generator=generator)
    rows = centres[target] + torch.randn(200, 8, generator=generator)
    assert probed(rows[:100], target[:100], rows[100:], target[100:]) > 0.95
    noise = torch.randn(200, 8, generator=generator)
    assert probed(noise[:100], target[:100], noise[100:], target[100:]) < 0.5


def test_the_preset_probes_the_classes_left_out(tmp_path, capsys):
    import train

    words = ["experiment=label_smoothing", "trainer.epochs=2", "trainer.device=cpu", *ALONE, f"trainer.runs={tmp_path}"]
    assert train.main(words) == 0
    (folder,) = tmp_path.iterdir()
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [line["values"]["probe/top1"] for line in found if line["kind"] == "metrics" and "probe/top1" in line["values"]]
    assert len(scores) == 2
    assert all(0.2 < score <= 1 for score in scores)
    assert "linear probe on the classes 5, 6, 7, 8, 9" in capsys.readouterr().out


@pytest.mark.slow
def test_a_probe_is_fitted_where_mlflow_is_slow_to_import(clone, tmp_path):
    """sklearn reads pandas' classes, which a module that another thread is importing does not have yet. MLflow imports pandas."""
    slow = f"import sys, time\ntime.sleep(15)\nsys.path.remove({str(tmp_path)!r})\ndel sys.modules['pandas']\nimport pandas\n"
    (tmp_path / "pandas.py").write_text(slow, encoding="utf-8")
    words = ["experiment=label_smoothing", "trainer.epochs=2", "trainer.device=cpu", "tracking=none", "tracking.system_seconds=0.1"]
    done = clone.run(*words, fresh=True, OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))
    assert done.status == 0, done.output
    assert done.output.count("linear probe on the classes 5, 6, 7, 8, 9") == 2


def test_a_probe_needs_classes_that_were_left_out(tmp_path, capsys):
    import train

    words = ["experiment=label_smoothing", "data.only_classes=[]", "trainer.max_updates=1", "trainer.device=cpu", "tracking=none"]
    assert train.main([*words, f"trainer.runs={tmp_path}"]) == 1
    assert "needs data=digits, mnist or cifar and data.only_classes" in capsys.readouterr().err


def test_the_apps_seesaw_is_the_librarys(make_trainer):
    from lossforge.losses import seesaw_loss

    trainer = make_trainer("experiment=long_tail", "loss=seesaw", "loss.q=1", "data.imbalance=20")
    batch = next(iter(trainer.data.train))
    logits = torch.randn(len(batch), 10, generator=torch.Generator().manual_seed(0))
    wanted = seesaw_loss(logits, batch.target, trainer.data.counts, 0.8, 1.0)
    found = trainer.task.loss(logits, batch, trainer.task.normalizer(batch))
    torch.testing.assert_close(found, wanted)
    assert trainer.data.counts[0] > 15 * trainer.data.counts[9]
    trainer.update(next(trainer.groups()))
    assert trainer.guard.total.item() == 0

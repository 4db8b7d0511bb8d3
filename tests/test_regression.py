"""Numbers for each image: the loss in standard deviations, and figures and predictions in the targets' units."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.batch import Batch
from lab.data.sets import Norm
from lab.run.predict import predictor
from lab.tasks.regression import DigitTurnsConfig
from lab.tasks.regression.data import digit_turns, spread
from lab.tasks.regression.metrics import RegressionCounts, RegressionResult, residual_picture
from lab.tasks.regression.task import ValueLoss

CPU = torch.device("cpu")
SMALL = ["task=regression", "data.image_size=16", "data.batch_size=32", "trainer.max_updates=3", "trainer.log_every=1", "tracking=none"]
OWN = """
import torch


def of_elements(input, target):
    return (input - target).abs() ** 1.5


def of_samples(input, target):
    return ((input - target).abs() ** 1.5).mean(1)


def of_batch(input, target):
    return ((input - target).abs() ** 1.5).mean()


def largest(prediction, target):
    return (prediction - target).abs().max()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def numbers(count=7, targets=2):
    random = torch.Generator().manual_seed(0)
    return [3 * torch.randn(count, targets, generator=random) for _ in range(2)]


def batch_of(target, weight=None):
    return Batch(torch.zeros(len(target), 1, 8, 8), target, torch.arange(len(target)), weight)


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        (["loss=mse"], lambda x, y: F.mse_loss(x, y)),
        (["loss=mae"], lambda x, y: F.l1_loss(x, y)),
        (["loss=huber", "loss.delta=0.5"], lambda x, y: F.huber_loss(x, y, delta=0.5)),
        (["loss=log_cosh"], lambda x, y: (x - y).double().cosh().log().mean().float()),
        (["loss=huber", "loss.delta=0.5", "loss.implementation=torch"], lambda x, y: F.huber_loss(x, y, delta=0.5)),
        (["loss=custom", "loss.target=own.py:of_elements"], lambda x, y: ((x - y).abs() ** 1.5).mean()),
        (["loss=custom", "loss.target=own.py:of_samples"], lambda x, y: ((x - y).abs() ** 1.5).mean()),
        (["loss=custom", "loss.target=own.py:of_batch"], lambda x, y: ((x - y).abs() ** 1.5).mean()),
    ],
)
def test_the_loss_is_a_mean_of_differences_in_standard_deviations(own, words, plain):
    prediction, target = numbers()
    deviation = torch.tensor([2.0, 0.5])
    config = load(["task=regression", *words]).config
    x = prediction.clone().requires_grad_()
    value = ValueLoss(config, deviation)(x, batch_of(target), torch.tensor(float(target.numel())))
    (3 * value).backward()
    other = prediction.clone().requires_grad_()
    expected = plain(other / deviation, target / deviation)
    (3 * expected).backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(x.grad, other.grad)


def test_samples_are_weighted_and_a_mean_cannot_be(own):
    prediction, target = numbers()
    weight = torch.rand(7, generator=torch.Generator().manual_seed(1))
    expected = (F.mse_loss(prediction, target, reduction="none") * weight[:, None]).sum() / 14
    for words in (["loss=mse"], ["loss=mse", "loss.implementation=torch"]):
        loss = ValueLoss(load(["task=regression", *words]).config, torch.ones(2))
        torch.testing.assert_close(loss(prediction, batch_of(target, weight), torch.tensor(14.0)), expected)
    loss = ValueLoss(load(["task=regression", "loss=custom", "loss.target=own.py:of_batch"]).config, torch.ones(2))
    with pytest.raises(UserError, match=r"a value a sample is expected"):
        loss(prediction, batch_of(target, weight), torch.tensor(14.0))


def test_figures_are_those_of_scikit_learn():
    prediction, target = numbers(50)
    counts = RegressionCounts(CPU, {})
    for x, y in zip(prediction.split(20), target.split(20), strict=True):
        counts.add(x, y, F.mse_loss(x, y, reduction="sum"), torch.tensor(float(y.numel())))
    result = counts.result()
    assert result.values["loss"] == pytest.approx(F.mse_loss(prediction, target).item(), rel=1e-5)
    for name, of in (("r2", r2_score), ("mae", mean_absolute_error), ("rmse", root_mean_squared_error)):
        assert result.values[name] == pytest.approx(of(target, prediction), rel=1e-5), name
        expected = of(target, prediction, multioutput="raw_values").tolist()
        assert result.figures[name].tolist() == pytest.approx(expected, rel=1e-5), name
    assert result.figures["bias"].tolist() == pytest.approx((prediction - target).mean(0).tolist(), rel=1e-4)


def test_a_target_without_spread_has_no_r2_and_deviation_1():
    target = torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    mean, deviation = spread(target)
    assert (mean.tolist(), deviation.tolist()) == ([2.0, 4.0], [1.0, 1.0])
    counts = RegressionCounts(CPU, {})
    counts.add(target + 1, target, torch.tensor(4.0), torch.tensor(4.0))
    result = counts.result()
    assert result.figures["r2"].isnan().tolist() == [False, True]
    assert result.values["r2"] == pytest.approx(0.0)


def test_digits_are_turned_as_their_targets_say():
    """Turned back by its target, an image is again the upright digit: it differs from it less than from any other turn."""
    config = DigitTurnsConfig(image_size=32, sizes=[1.0, 1.0], turn=90.0)
    data = digit_turns(config, CPU, 0, Norm([0.0], [1.0]))
    upright = digit_turns(DigitTurnsConfig(image_size=32, sizes=[1.0, 1.0], turn=1e-6), CPU, 0, Norm([0.0], [1.0]))
    from torchvision.transforms.v2.functional import rotate

    turned, plain = data.val, upright.val
    for image, before, (degrees, size) in zip(turned.images[:8], plain.images[:8], turned.targets[:8].tolist(), strict=True):
        assert size == 1.0
        distance = {turn: (rotate(image, turn, interpolation=2) - before).abs().mean().item() for turn in (-degrees, degrees, 0.0)}
        assert abs(degrees) < 12 or min(distance, key=distance.get) == -degrees


def test_a_model_learns_predicts_and_is_exported_in_the_targets_units(make_trainer, run_folder, quiet, own):
    trainer = make_trainer(*SMALL, "task.metrics={largest: 'own.py:largest'}", "tracking.model=true")
    targets = trainer.data.train.targets
    torch.testing.assert_close(trainer.model.target_mean, targets.mean(0))
    torch.testing.assert_close(trainer.model.target_deviation, targets.std(0, correction=0))
    trainer.fit(run_folder, quiet)
    trainer.finish()
    assert {"val/r2", "val/mae", "val/rmse", "val/largest", "train/mae"} <= set(trainer.values)
    assert (run_folder.path / "residuals.png").stat().st_size > 5000
    assert trainer.monitor.goal == "max"
    rows = [row["target"] for row in trainer.task.per_class(trainer.pictured)]
    assert rows == ["turn", "size"]

    state = torch.load(run_folder.path / "checkpoints" / "best.pt", weights_only=True)
    assert state["classes"] == ["turn", "size"]
    from torchvision.transforms.v2.functional import to_pil_image

    batch = next(iter(trainer.data.val))
    norm = Norm(**state["norm"])
    pixels = (batch.images[0] * norm.std[0] + norm.mean[0]).clamp(0, 1)
    said = predictor(trainer.config, state, CPU, top=5, score=0.3)(to_pil_image(pixels).convert("RGB"))
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(batch.images[:1])[0].tolist()
    assert said.scores == pytest.approx(expected, rel=0.05, abs=0.5)
    assert said.line().startswith("turn ")
    assert "%" not in said.line()
    exported = torch.export.load(run_folder.path / "checkpoints" / "best.pt2").module()
    out = exported((pixels * 255).round().to(torch.uint8)[None])
    assert out[0].tolist() == pytest.approx(expected, rel=0.05, abs=0.5)
    records = [json.loads(line) for line in (run_folder.path / "metrics.jsonl").read_text().splitlines()]
    evaluation = next(record for record in records if record["kind"] == "evaluation")
    assert set(evaluation["targets"]) == {"mae", "rmse", "bias", "r2"}


def test_errors_are_better_when_lower():
    config = load(["task=regression", "trainer.monitor=mae"]).config
    from lab.training.monitor import Monitor

    assert Monitor(config.trainer, "r2").goal == "min"


def test_weights_without_measured_buffers_are_taken(make_trainer, tmp_path):
    trainer = make_trainer(*SMALL)
    names = {name: value for name, value in trainer.model.state_dict().items() if not name.startswith("target_")}
    torch.save(names, tmp_path / "weights.pt")
    again = make_trainer(*SMALL, "seed=3", f"model.weights={tmp_path / 'weights.pt'}")
    for name, value in names.items():
        torch.testing.assert_close(again.model.state_dict()[name], value)
    torch.testing.assert_close(again.model.target_mean, trainer.model.target_mean)


def test_the_numbers_below_a_histogram_do_not_overlap(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr("lab.tasks.regression.metrics.save_figure", lambda figure, *rest, **options: kept.append(figure))
    target = torch.linspace(0.5, 1, 100)[:, None]
    residual = torch.linspace(-0.1, 0.093, 100)[:, None]
    figures = {"r2": torch.tensor([0.9]), "mae": torch.tensor([0.03])}
    result = RegressionResult({}, figures, target + residual, target)
    residual_picture(result, ["size"], tmp_path / "a.png")
    (figure,) = kept
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.axes[1].get_xticklabels() if text.get_text()]
    assert len(boxes) > 3
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))

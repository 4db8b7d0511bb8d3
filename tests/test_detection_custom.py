"""Losses of one's own in a detector: their values, their training, and what is refused."""

import math
import pathlib

import pytest
import torch
import torch.nn.functional as F
from stock_detectors import CLASSES, batch, detector, pyramid

from lab.base.errors import UserError
from lab.config.settings import load
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.task import criterion
from lab.detectors.detection.types import DetectorOutput
from lossforge.losses.custom import find

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
CLASS_LOSS, BOX_LOSS = f"{EXAMPLES / 'my_loss.py'}:margin_bce", f"{EXAMPLES / 'my_box_loss.py'}:corner_iou"
OWN = [f"loss.target={CLASS_LOSS}", "loss.hyper.margin=0.5", "box_loss=custom", f"box_loss.target={BOX_LOSS}", "box_loss.weight=3"]
ROWS = """
import triton
import triton.language as tl
from lossforge.losses import rowwise


@rowwise
@triton.jit
def plain(z):
    return z
"""


def built(*words):
    config = load(["task=detection", *words]).config
    return criterion(config.loss, config.box_loss, config.model)


@pytest.fixture(scope="module", params=["fcos", "retinanet"])
def example(request):
    """A detector's coder, outputs at random and what its anchors shall predict."""
    model = detector(request.param, DetectionLoss(), pyramid())
    matched = model.match(batch((5, 0)))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*matched.labels.shape, CLASSES, generator=generator) - 2
    regression = torch.rand(*matched.labels.shape, 4, generator=generator) * (4 if request.param == "fcos" else 0.5)
    return model.coder, DetectorOutput(logits.requires_grad_(), regression.requires_grad_()), matched


def values_and_gradients(loss, coder, output, matched):
    losses = loss(output, matched, coder, matched.positives)
    gradients = torch.autograd.grad(1.5 * losses["classification"] + 0.7 * losses["boxes"], [output.logits, output.regression])
    return [losses["classification"].detach(), losses["boxes"].detach(), *gradients]


def by_hand(coder, output, matched):
    """In float64, from dense targets and the rows that count, with the weight 3 of the boxes and the margin 0.5 of the settings."""
    x, regression = output.logits.double(), output.regression.double()
    target = F.one_hot(matched.labels.clamp(min=0), CLASSES).double() * (matched.labels >= 0)[..., None]
    classes = F.softplus(0.5 - (2 * target - 1) * x)[matched.labels != -2].sum()
    one, two = coder.decode(regression, matched.anchors.double())[matched.positive], matched.boxes[matched.positive].double()
    shared = (torch.minimum(one[:, 2:], two[:, 2:]) - torch.maximum(one[:, :2], two[:, :2])).clamp(min=0).prod(1)
    union = (one[:, 2:] - one[:, :2]).prod(1) + (two[:, 2:] - two[:, :2]).prod(1) - shared
    hull = torch.maximum(one[:, 2:], two[:, 2:]) - torch.minimum(one[:, :2], two[:, :2])
    boxes = 1 - shared / union + 0.5 * (one - two).square().sum(1) / hull.square().sum(1)
    return {"classification": classes / matched.positives, "boxes": 3 * boxes.sum() / matched.positives}


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
def test_values_and_gradients_are_the_formulas(example, implementation):
    coder, output, matched = example
    found = values_and_gradients(built("loss=custom", *OWN, f"loss.implementation={implementation}"), *example)
    expected = values_and_gradients(lambda *_: by_hand(coder, output, matched), *example)
    assert matched.positives > 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)


def test_a_detector_trains_under_them(tmp_path, make_trainer):
    scenes = ["data.train_scenes=4", "data.val_scenes=1", "data.scene_pixels=64", "data.digit_pixels=[14,24]", "data.workers=0"]
    more = ["model=fcos_tiny", "data.augment=false", "optim.schedule.warmup_epochs=0", "trainer.epochs=12", "optim.lr=3e-3"]
    trainer = make_trainer("task=detection", "loss=custom", *OWN, *scenes, *more, f"data.root={tmp_path}")
    values = []
    for _ in range(12):
        for group in trainer.groups():
            trainer.update(group)
            values.append(trainer.window[0].item() - sum(values))
    assert all(map(math.isfinite, values))
    assert values[-1] < 0.6 * values[0], values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss=custom", "loss.target={rows}"], "is a loss of rows under a softmax; a detector asks of each class"),
        (["loss=custom", f"loss.target={BOX_LOSS}"], f"loss.target={BOX_LOSS}: is a loss of pairs of boxes"),
        (
            ["box_loss=custom", f"box_loss.target={CLASS_LOSS}"],
            f"box_loss.target={CLASS_LOSS}: is a loss of elements; only losses of pairs",
        ),
        (["loss=custom", f"loss.target={CLASS_LOSS}", "loss.hyper.magrin=1"], "Did you mean 'margin'?"),
        (["box_loss=custom", "box_loss.target=nowhere.py:loss"], "box_loss.target=nowhere.py:loss: no file nowhere.py"),
        (["loss=custom"], "loss.target: must be given"),
        (["loss=ce"], "task=detection takes asymmetric, bce, custom, focal"),
    ],
)
def test_other_kinds_are_refused(words, said, tmp_path):
    (tmp_path / "rows.py").write_text(ROWS)
    with pytest.raises(UserError) as caught:
        built(*(word.format(rows=f"{tmp_path / 'rows.py'}:plain") for word in words))
    assert said in str(caught.value)


def test_the_example_passes_its_check():
    """As `python -m lossforge.losses.check` would: here the formula alone, the rest is the same for all formulas."""
    from lossforge.losses.check.formula import check_formula
    from lossforge.losses.check.report import Report

    report = Report("corner_iou")
    check_formula(find(BOX_LOSS).loss, report, 0)
    assert report.passed, str(report)

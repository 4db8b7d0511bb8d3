"""The encoder of labelled images: its losses in float64, its figures beside plain ones, and what the app does with a run."""

import pytest
import torch
import torch.nn.functional as F

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.batch import Batch
from lab.tasks.contrastive import OF_IMAGES
from lab.tasks.contrastive.metrics import NeighbourCounts
from lab.tasks.contrastive.model import Embedded, batch_loss
from lossforge import losses

CPU = torch.device("cpu")
SMALL = ["task=contrastive", "data=digits", "task.width=8", "data.image_size=16", "data.train_share=0.06", "data.batch_size=28"]
SMALL += ["data.held_out=0.1", "optim.schedule.warmup_epochs=0", "optim.lr=5e-3", "trainer.log_every=1", "tracking=none"]


def in_float64(name, output, target):
    """The library's function in float64 of the paper's defaults."""
    features, others, proxies = output
    unit = F.normalize(features, dim=1)
    return {
        "arcface": lambda: losses.arcface_loss(unit @ F.normalize(proxies, dim=1).T, target),
        "cosface": lambda: losses.cosface_loss(unit @ F.normalize(proxies, dim=1).T, target),
        "proxy_anchor": lambda: losses.proxy_anchor_loss(features, proxies, target),
        "supcon": lambda: losses.supervised_contrastive_loss(features, target),
        "multi_similarity": lambda: losses.multi_similarity_loss(features, target),
        "circle": lambda: losses.circle_loss(features, target),
        "info_nce": lambda: losses.info_nce_loss(features, others),
        "nt_xent": lambda: losses.nt_xent_loss(features, others),
        "vicreg": lambda: losses.vicreg_loss(features, others),
        "barlow_twins": lambda: losses.barlow_twins_loss(features, others),
    }[name]()


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_the_losses_are_those_of_the_library(name, implementation):
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(count, 8, generator=random) for count in (12, 12, 3)]
    target = torch.arange(12) % 3
    batch = Batch(torch.zeros(12, 1, 2, 2), target, torch.arange(12))
    config = load(["task=contrastive", "data=digits", f"loss={name}", f"loss.implementation={implementation}"]).config.loss
    values, gradients = [], []
    for function, dtype in ((lambda output: batch_loss(config)(output, batch), torch.float32), (None, torch.float64)):
        leaves = [each.to(dtype).requires_grad_() for each in given]
        value = in_float64(name, Embedded(*leaves), target) if function is None else function(Embedded(*leaves))
        values.append(value.detach().double())
        gradients.append([each for each in torch.autograd.grad(1.5 * value, leaves, allow_unused=True) if each is not None])
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-6)
    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-5)


@pytest.mark.each("function")
@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_few_updates_lower_the_loss(make_trainer, name):
    trainer = make_trainer(*SMALL, f"loss={name}", "data.augment=false", "trainer.epochs=4")
    assert (trainer.model.proxies is not None) == (name in ("arcface", "cosface", "proxy_anchor"))
    values = []
    for _ in range(4):
        for group in trainer.groups():
            trainer.update(group)
            values.append(trainer.window[0].item())
            trainer._clear_window()
    third = len(values) // 3
    assert sum(values[-third:]) < 0.95 * sum(values[:third]), values
    result = trainer.evaluate(trainer.model, trainer.data.val).values
    assert 0 < result["recall1"] <= result["recall5"] <= 1


def test_recall_is_that_of_sorted_similarities(monkeypatch):
    monkeypatch.setattr("lab.tasks.contrastive.metrics.ROWS", 7)
    features = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
    target = torch.arange(20) % 4
    target[0], target[4] = 4, 5  # two classes of one image each
    counts = NeighbourCounts(7, CPU)
    for part in torch.arange(20).split(6):
        counts.add(3 * features[part], target[part], torch.tensor(2.0), torch.tensor(float(len(part))))
    result = counts.result()
    found = []
    for i in range(20):
        order = sorted((j for j in range(20) if j != i), key=lambda j, i=i: -float(F.cosine_similarity(features[i], features[j], dim=0)))
        found.append([target[j].item() for j in order])
        assert result.confusion[target[i]][found[i][0]] > 0
    counted = [i for i in range(20) if target[i] < 4]
    for most in (1, 5):
        wanted = sum(target[i].item() in found[i][:most] for i in counted) / len(counted)
        assert 0 < wanted < 1
        assert result.values[f"recall{most}"] == pytest.approx(wanted)
    of_two = [i for i in counted if target[i] == 2]
    assert result.recall[2] == pytest.approx(sum(found[i][0] == 2 for i in of_two) / len(of_two))
    assert result.recall[4:].isnan().all()
    assert sum(map(sum, result.confusion)) == 20
    assert result.values["loss"] == pytest.approx(4 * 2.0 / 20)


def test_equal_features_recall_nothing():
    counts = NeighbourCounts(2, CPU)
    counts.add(torch.ones(6, 3), torch.arange(6) % 2, torch.tensor(0.0), torch.tensor(6.0))
    assert counts.result().values["recall5"] == 1  # three of the other class come first
    assert counts.result().values["recall1"] == 0


def test_a_run_leaves_figures_a_picture_and_an_encoder(make_trainer, run_folder, quiet):
    trainer = make_trainer(*SMALL, "loss=proxy_anchor", "trainer.epochs=1", "tracking.model=true")
    before = trainer.model.proxies.detach().clone()
    trainer.fit(run_folder, quiet)
    trainer.finish()
    assert not torch.equal(trainer.model.proxies, before)
    assert {"val/recall1", "val/recall5", "train/cosine"} <= set(trainer.values)
    assert (run_folder.path / "neighbours.png").stat().st_size > 5000
    best = run_folder.path / "checkpoints" / "best.pt"
    state = torch.load(best, weights_only=True)
    assert state["model"]["proxies"].shape == (10, 8)
    trainer.model.load_state_dict(state["model"])
    batch = next(iter(trainer.data.val))
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (state["norm"]["mean"], state["norm"]["std"]))
    pixels = ((batch.images * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
    with torch.no_grad():
        wanted = F.normalize(trainer.model.eval()((pixels.float() / 255 - mean) / std).features, dim=1)
    exported = torch.export.load(best.with_suffix(".pt2")).module()
    torch.testing.assert_close(exported(pixels), wanted, atol=1e-5, rtol=1e-4)


def test_views_are_of_the_same_images_and_an_evaluations_are_the_same(make_trainer):
    task = make_trainer(*SMALL, "loss=nt_xent").task
    batch = next(iter(task.data.val))
    one, two = (task.prepare(batch, training=False).view for _ in range(2))
    assert torch.equal(one, two)
    first, second = (task.prepare(batch, training=True).view for _ in range(2))
    assert not torch.equal(first, second)
    near, far = ((batch.images - each).flatten(1).norm(dim=1).mean() for each in (one, one.roll(1, 0)))
    assert 0 < near < far


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss=clip"], "loss=clip: data=digits has images without captions, which task=contrastive compares by one of"),
        (["loss=circle", "data=digit_captions"], "loss=circle: data=digit_captions has images with captions"),
        (["loss=supcon", "data.batch_size=1"], "data.batch_size=1: task=contrastive compares the images of a batch"),
        (["loss=circle", "data.mixup=0.2"], "data.mixup=0.2: task=contrastive needs one class an image"),
    ],
)
def test_settings_that_do_not_fit_are_named(make_trainer, words, said):
    data = [] if "data=digit_captions" in words else ["data=digits"]
    with pytest.raises(UserError, match=said):
        make_trainer("task=contrastive", *data, *words)


def test_weights_of_images_are_refused(make_trainer):
    trainer = make_trainer(*SMALL, "loss=circle", "data.class_weight={8: 2}")
    with pytest.raises(UserError, match=r"task=contrastive takes no weights of images; data.sampler=weighted"):
        next(trainer.groups())


def test_predictions_of_an_encoder_without_captions_are_refused():
    from lab.run.predict import Asked
    from lab.tasks.contrastive.task import predict

    with pytest.raises(UserError, match="it encodes images, and knows no captions"):
        predict(load(["task=contrastive", "data=digits", "loss=circle"]).config, ["0"], Asked.__new__(Asked))

"""RF-DETR, patched, against itself: its own model with a small backbone of random weights, its losses and all gradients."""

import pytest
import torch

from lossforge.integrations import rfdetr as ours
from lossforge.patch.patching import _SAID

CLASSES = 4


@pytest.fixture
def small(monkeypatch):
    """Compute in float64, and return a maker of a small model and its criterion. Nothing else imports rfdetr, which takes seconds."""
    pytest.importorskip("rfdetr", reason="needs pip install rfdetr")
    from rfdetr.config import RFDETRNanoConfig, RFDETRSegNanoConfig, SegmentationTrainConfig, TrainConfig
    from rfdetr.models import lwdetr
    from rfdetr.models.backbone import dinov2

    own = dinov2.get_config
    monkeypatch.setattr(dinov2, "get_config", lambda *args: own(*args) | {"num_hidden_layers": 2})
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)

    def make(masks=False, **options):
        torch.manual_seed(0)
        sizes = {"hidden_dim": 32, "sa_nheads": 2, "ca_nheads": 2, "num_queries": 12, "num_select": 12, "dec_layers": 2, "group_detr": 2}
        sizes |= {"out_feature_indexes": [1, 2], "resolution": 64, "positional_encoding_size": 4, "patch_size": 16, "num_windows": 2}
        config = (RFDETRSegNanoConfig if masks else RFDETRNanoConfig)(num_classes=CLASSES, pretrain_weights=None, device="cpu", **sizes)
        training = (SegmentationTrainConfig if masks else TrainConfig)(dataset_dir=".", output_dir=".")
        model = lwdetr.build_model_from_config(config, training).double().train()
        criterion, _ = lwdetr.build_criterion_from_config(config, training)
        for name, value in options.items():
            assert hasattr(criterion, name)
            setattr(criterion, name, value)
        return model, criterion.train()

    yield make
    torch.set_default_dtype(torch.float32)


def inputs(masks=False, counts=(2, 3), valid=False):
    draw, targets = torch.Generator().manual_seed(1), []
    for count in counts:
        boxes = torch.cat([0.3 + 0.4 * torch.rand(count, 2, generator=draw), 0.2 + 0.3 * torch.rand(count, 2, generator=draw)], 1)
        targets.append({"labels": torch.randint(CLASSES, (count,), generator=draw), "boxes": boxes})
        if masks:
            targets[-1]["masks"] = torch.rand(count, 64, 64, generator=draw) > 0.5
        if valid:
            targets[-1]["valid"] = torch.arange(count) < count - 1
    return torch.randn(2, 3, 64, 64, generator=draw), targets


def trained(made, given, steps=20):
    """Return the losses and the gradients of each step."""
    from rfdetr.utilities.tensors import NestedTensor

    (model, criterion), (pixels, targets), found = made, given, []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for number in range(steps):
        torch.manual_seed(number)
        model.zero_grad()
        losses = criterion(model(NestedTensor(pixels, torch.zeros(2, 64, 64, dtype=torch.bool))), targets)
        loss = sum(losses[name] * weight for name, weight in criterion.weight_dict.items() if name in losses)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append(({name: each.detach() for name, each in losses.items()}, gradients))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return found


def replaced():
    from rfdetr.models import criterion, matcher

    names = {
        criterion: ("sigmoid_ce_loss_jit", "dice_loss_jit"),
        criterion.SetCriterion: ("_get_matched_targets", "loss_labels", "loss_boxes"),
        matcher.HungarianMatcher: ("forward", "_match_many"),
    }
    return [getattr(owner, name) for owner, each in names.items() for name in each]


def compare(made, given, steps=20):
    """Compare a training with the library's own, losses and gradients of every step, and whether undo puts back all that was replaced."""
    expected, own = trained(made(), given, steps), replaced()
    _SAID.clear()
    with ours.patch():
        found = trained(made(), given, steps)
        assert not any(each is before for each, before in zip(replaced(), own, strict=True))
    assert all(each is before for each, before in zip(replaced(), own, strict=True))
    assert _SAID or any(not torch.equal(gradient, found[0][1][name]) for name, gradient in expected[0][1].items())
    for (right, gradients), (losses, of_ours) in zip(expected, found, strict=True):
        assert losses.keys() == right.keys()
        torch.testing.assert_close(losses, right, rtol=1e-7, atol=1e-9, check_dtype=False)
        for name, gradient in gradients.items():
            torch.testing.assert_close(of_ours[name], gradient, rtol=1e-7, atol=1e-7 * gradient.abs().max().item() + 1e-12)
    return _SAID


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True], ids=["boxes", "masks"])
def test_a_training_of_20_steps(small, masks):
    assert not compare(lambda: small(masks), inputs(masks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"ia_bce_loss": False},
        {"ia_bce_loss": False, "use_varifocal_loss": True},
        {"ia_bce_loss": False, "use_position_supervised_loss": True},
        {"sum_group_losses": True, "focal_alpha": 0.4},
    ],
    ids=str,
)
def test_losses_of_classes(small, options):
    """The position-supervised one is left to rfdetr, with a line in the log."""
    said = compare(lambda: small(**options), inputs(), steps=2)
    assert bool(said) == ("use_position_supervised_loss" in options)


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "valid"), [((0, 3), False), ((0, 0), False), ((3, 3), True)], ids=["one empty", "no box", "padded"])
def test_images_without_boxes_and_boxes_that_pad(small, counts, valid):
    assert not compare(small, inputs(counts=counts, valid=valid), steps=2)

"""Detectors on timm's backbones: levels, matching and post-processing, as torchvision's."""

import pytest
import torch
from stock_detectors import ANCHOR_SIZES, CLASSES, HEIGHT, KINDS, WIDTH, batch, detector, pyramid, stock, stock_outputs, targets
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.ops import box_iou
from torchvision.ops.misc import FrozenBatchNorm2d

from lab.base.errors import UserError
from lab.config.settings import load, reload
from lab.data.sets import Norm
from lab.detectors.detection.boxes import DeltaCoder
from lab.detectors.detection.inference import export
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models import matching
from lab.detectors.detection.models.backbone import backbone
from lab.detectors.detection.models.matching import by_overlap

SMALL = ["test_vit", "test_resnet", "test_efficientnet", "test_convnext", "test_nfnet", "test_mambaout"]
NAMED = ["resnet50", "convnext_tiny", "swin_tiny_patch4_window7_224"]


@pytest.mark.parametrize("name", [*SMALL, *NAMED])
def test_levels_of_a_backbone(name):
    torch.manual_seed(0)
    model = backbone(name, (64, 96), channels=16).eval()
    levels = list(model(torch.randn(2, 3, 64, 96)).values())
    assert [tuple(level.shape) for level in levels] == [(2, 16, 8, 12), (2, 16, 4, 6), (2, 16, 2, 3), (2, 16, 1, 2), (2, 16, 1, 1)]
    other = list(model(torch.randn(1, 3, 32, 64)).values())
    assert [tuple(level.shape[2:]) for level in other] == [(4, 8), (2, 4), (1, 2), (1, 1), (1, 1)]
    torch.stack([level.square().mean() for level in levels]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "no layer may be left without a gradient"


def test_levels_last_in_memory_are_turned():
    """Swin's levels are (N, H, W, C): a pixel's change shows in its own corner of each level, not elsewhere."""
    model = backbone("swin_tiny_patch4_window7_224", (64, 128), channels=16).eval()
    images = torch.randn(1, 3, 64, 128)
    changed = images.clone()
    changed[..., :4, -4:] += 10
    with torch.no_grad():
        first, second = model.body(images)[0].permute(0, 3, 1, 2), model.body(changed)[0].permute(0, 3, 1, 2)
    assert model.channels_last
    assert (first - second).abs().amax(1)[0].argmax() == 15, "the top right cell of 8 × 16"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_small_patch32_224", "strides 32, 32, 32"),
        ("vit_small_patch14_dinov2", "strides 14, 14, 14"),
        ("levit_128", "strides 16, 32, 64"),
        ("inception_v3", "shapes"),
    ],
)
def test_backbones_without_the_levels_are_refused(name, reason):
    with pytest.raises(
        UserError, match=rf"model.name={name} cannot be a detector's backbone: .*{reason}[^\n]*\nModels that can: .*resnet50"
    ):
        backbone(name, (96, 128))


def test_a_backbone_of_one_size_says_so():
    model = backbone("test_coatnet", (64, 96), channels=16)
    with pytest.raises(UserError, match="takes only images of 64×96, got 96×128"):
        model(torch.zeros(1, 3, 96, 128))


def test_frozen_norms_and_stages():
    model = backbone("test_resnet", (64, 64), channels=16, frozen_stride=4, frozen_norm=True)
    plain = backbone("test_resnet", (64, 64), channels=16)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in plain.modules())
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    assert any(isinstance(module, FrozenBatchNorm2d) for module in model.modules())
    fixed = {name.split(".")[0] for name, parameter in model.body.named_parameters() if not parameter.requires_grad}
    trained = {name.split(".")[0] for name, parameter in model.body.named_parameters() if parameter.requires_grad}
    assert "layer1" in fixed
    assert trained == {"layer2", "layer3", "layer4"}
    before = {name: value.clone() for name, value in model.body.state_dict().items()}
    model.train()(torch.randn(2, 3, 64, 64))
    assert all(torch.equal(value, before[name]) for name, value in model.body.state_dict().items()), "statistics stay"


def test_frozen_stage_that_is_not_there():
    with pytest.raises(UserError, match=r"frozen_stride=6: test_resnet has stages of the strides 4, 8, 16, 32"):
        backbone("test_resnet", (64, 64), frozen_stride=6)


def test_delta_coder_is_torchvisions():
    generator = torch.Generator().manual_seed(0)
    anchors, boxes = (torch.rand(2, 50, 2, 2, generator=generator) + 0.1).cumsum(2).flatten(2) * 100
    deltas = torch.randn(50, 4, generator=generator) * 3
    theirs, ours = BoxCoder((1.0, 1.0, 1.0, 1.0)), DeltaCoder()
    torch.testing.assert_close(ours.encode(anchors, boxes), theirs.encode_single(boxes, anchors), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.decode(deltas, anchors), theirs.decode_single(deltas, anchors), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(ours.decode(ours.encode(anchors, boxes), anchors), boxes, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_weights_give_the_stock_head_and_anchors(kind):
    body = pyramid()
    theirs, ours = stock(kind, body), detector(kind, DetectionLoss(), body)
    before = ours.head.classification_head.cls_logits.bias.clone()
    torch.testing.assert_close(before.sigmoid(), torch.full_like(before, 0.01), msg="the prior probability")
    ours.load_state_dict(theirs.state_dict())
    data = batch()
    outputs, anchors, counts = stock_outputs(theirs, data)
    output = ours(data.images)
    assert torch.equal(output.logits, outputs["cls_logits"])
    assert torch.equal(output.regression, outputs["bbox_regression"])
    assert output.centerness is None or torch.equal(output.centerness, outputs["bbox_ctrness"].squeeze(2))
    levels = ours.anchors(HEIGHT, WIDTH, torch.device("cpu"))
    assert [len(level) for level in levels] == counts
    assert torch.equal(torch.cat(levels), anchors[0])


def stock_match(kind, model, data):
    """(N, A) indices as torchvision's compute_loss finds them: caught on their way into its head's loss."""
    caught = []
    outputs, anchors, counts = stock_outputs(model, data)
    model.head.compute_loss = lambda targets, outputs, anchors, matched: caught.extend(matched) or {}
    model.compute_loss(targets(data), outputs, anchors, *((counts,) if kind == "fcos" else ()))
    return torch.stack(caught)


@pytest.mark.parametrize("counts", [(4, 0, 7), (0, 0), (1, 12, 30)])
@pytest.mark.parametrize("kind", KINDS)
def test_matching_is_torchvisions(kind, counts):
    body = pyramid()
    ours = detector(kind, DetectionLoss(), body)
    for seed in range(3):
        data = batch(counts, seed=seed)
        matched = ours.match(data)
        index = stock_match(kind, stock(kind, body), data)
        positive = index >= 0
        labels = data.labels.gather(1, index.clamp(min=0)) if any(counts) else torch.zeros_like(index)
        assert torch.equal(matched.labels, torch.where(positive, labels, index)), "torchvision has -1 and -2 for the same"
        assert torch.equal(matched.positive, positive)
        assert matched.positives == positive.sum()
        for image, boxes in enumerate(data.boxes):
            own = positive[image]
            assert torch.equal(matched.boxes[image][own], boxes[index[image][own]])
            assert torch.equal(matched.boxes[image][~own], matched.anchors[~own])
    assert not any(counts) or positive.any()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_change_nothing(kind):
    ours = detector(kind, DetectionLoss(), pyramid())
    for one, other in zip(ours.match(batch()), ours.match(batch(rows=20)), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_large_batches_are_matched_in_parts(kind, monkeypatch):
    ours = detector(kind, DetectionLoss(), pyramid())
    whole = ours.match(batch((4, 0, 7, 2, 3)))
    monkeypatch.setattr(matching, "PAIRS", 2 * 7 * len(whole.anchors))
    for one, other in zip(ours.match(batch((4, 0, 7, 2, 3))), whole, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_ties_are_torchvisions():
    """Two equal boxes, a box with the overlap of both thresholds, and two anchors that are equally good for a box."""
    anchors = torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10], [20, 0, 30, 10], [50, 0, 60, 10], [80, 0, 90, 10]])
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10], [20, 0, 30, 3], [50, 0, 60, 5], [80, 0, 90, 4], [80, 0, 90, 9], [0, 0, 0, 0]])
    there = torch.tensor([True] * 6 + [False])
    match = by_overlap(boxes[None], there[None], anchors, 0.5, 0.4)
    expected = Matcher(0.5, 0.4, allow_low_quality_matches=True)(box_iou(boxes[:6], anchors))
    assert expected.tolist() == [0, 2, 2, 3, 5]
    assert torch.where(match.positive, match.box, -1).tolist() == [expected.tolist()]


def test_between_the_thresholds_is_ignored():
    """Overlaps of 0.45, 0.3 and 0.4 beside an anchor that is better for each box."""
    anchors = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 4.5], [0, 0, 10, 3], [0, 0, 10, 4]])
    match = by_overlap(torch.tensor([[[0.0, 0, 10, 10]]]), torch.tensor([[True]]), anchors, 0.5, 0.4)
    assert match.positive.tolist() == [[True, False, False, False]]
    assert match.ignored.tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_that_nothing_can_predict_have_no_anchors(kind):
    """Without area, or outside of all anchors: torchvision's matcher makes every anchor positive then."""
    data = batch((2,))
    data.boxes[0] = torch.tensor([[30.0, 30, 30, 60], [5000, 5000, 5100, 5100]])
    matched = detector(kind, DetectionLoss(), pyramid()).match(data)
    assert matched.positives == 0
    assert (matched.labels == -1).all()


@pytest.mark.parametrize("threshold", [0.05, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_detections_are_torchvisions(kind, threshold):
    body = pyramid().eval()
    options = {"score_thresh": threshold, "nms_thresh": 0.5, "detections_per_img": 20, "topk_candidates": 100}
    theirs, ours = stock(kind, body, **options).eval(), detector(kind, DetectionLoss(), body, **options).eval()
    theirs.head.classification_head.cls_logits.bias.data += 4
    ours.load_state_dict(theirs.state_dict())
    data = batch()
    with torch.no_grad():
        outputs, anchors, counts = stock_outputs(theirs, data)
        split = {name: list(value.split(counts, 1)) for name, value in outputs.items()}
        shapes = [tuple(size) for size in data.sizes.tolist()]
        expected = theirs.postprocess_detections(split, [list(a.split(counts)) for a in anchors], shapes)
        found = ours.detections(ours(data.images), data.sizes, (HEIGHT, WIDTH))
    assert sum(len(each["scores"]) for each in found)
    for one, other, size in zip(found, expected, data.sizes, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("boxes", "scores", "labels"))
        assert set(one["labels"].tolist()) <= set(range(CLASSES))
        assert (one["boxes"][:, [0, 2]] <= size[1]).all()
        assert (one["boxes"][:, [1, 3]] <= size[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_odd_sizes_are_refused(kind):
    with pytest.raises(UserError, match="100×128 pixels: detectors take images padded to multiples of 32"):
        detector(kind, DetectionLoss(), pyramid())(torch.zeros(1, 3, 100, 128))


def test_channels_that_group_norms_cannot_take():
    narrow = backbone("test_resnet", (64, 64), channels=16)
    with pytest.raises(UserError, match=r"model\.channels=32: 64, 96 and so on"):
        detector("fcos", DetectionLoss(), backbone("test_resnet", (64, 64), channels=32))
    with pytest.raises(UserError, match=r"model\.channels=16: 64, 96"):
        detector("retinanet", DetectionLoss(), narrow, head_norm=True)
    assert len(ANCHOR_SIZES) == len(detector("retinanet", DetectionLoss(), narrow).anchors(64, 64, torch.device("cpu")))


def test_a_detector_of_a_fixed_size_is_exported_for_any_with_rect():
    words = ["task=detection", "model=yolo_tiny", "model.fixed_size=[64,96]"]
    fixed, free = (export(load([*words, *more]).config, ["ant"], Norm([0.5] * 3, [0.2] * 3)) for more in ([], ["data.rect=true"]))
    fit = {"rule": "fit within, keep proportions", "height": 64, "width": 96}
    assert (fixed.multiple, fixed.prepare["resize"], fixed.prepare["pad"]["height"]) == (0, fit, 64)
    assert (free.multiple, free.prepare["resize"], free.prepare["pad"]["multiple"]) == (32, fit, 32)


@pytest.mark.parametrize("model", ["retinanet_tiny", "detr_tiny"])
def test_an_exported_detector_takes_any_batch_and_images_without_a_box(model):
    config = load(["task=detection", f"model={model}", "model.score_threshold=0.9"]).config
    made = export(config, ["ant", "bee"], Norm([0.5] * 3, [0.2] * 3))
    images = torch.randint(0, 256, (3, *made.shape), dtype=torch.uint8)
    module = made.module.eval()
    with torch.no_grad():
        exported = torch.export.export(module, (images[:2],), dynamic_shapes=({0: torch.export.Dim("images", min=1)},), strict=False)
        for given in (images, images[:1]):
            said = exported.module()(given)
            assert said.shape[::2] == (len(given), 6)
            assert (said == 0).all()


@pytest.mark.parametrize(
    ("words", "usual"),
    [
        ("task=detection", "focal"),
        ("experiment=detectors model=retinanet_tiny", "focal"),
        ("experiment=detectors model=yolo_tiny", "varifocal"),
        ("experiment=detectors model=detr_tiny", "mal"),
        ("task=instances model=detr_tiny loss=auto", "mal"),
        ("task=oriented loss.gamma=1.5", "varifocal"),
        ("task=detection model=detr_tiny loss=bce", "bce"),
    ],
)
def test_without_a_loss_a_detector_takes_its_usual_one(words, usual):
    config = load(words.split()).config
    assert config.loss.name == usual
    assert getattr(config.loss, "gamma", None) == ({"focal": 2.0, "mal": 1.5, "varifocal": 2.0}.get(usual) if "gamma" not in words else 1.5)


def test_a_preset_may_name_the_usual_loss(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /task: detection\n  - override /model: detr_tiny\nloss:\n  name: auto\n"
    )
    monkeypatch.setattr("lab.config.settings.config_folders", lambda: [tmp_path])
    assert load(["experiment=mine"]).config.loss.name == "mal"


def test_the_usual_loss_of_a_finished_run_is_its_detector_s():
    trained = load(["task=detection", "model=yolo_tiny", "loss=bce"])
    assert reload(trained.tree(), ["loss=auto"]).config.loss.name == "varifocal"
    assert reload(trained.tree(), ["loss=auto", "model=detr_tiny"]).config.loss.name == "mal"

"""transformers' detectors, patched, against themselves: small models of random weights, their loss_dict and all gradients."""

import importlib
import inspect
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import accelerate  # noqa: E402
from transformers.loss import loss_for_object_detection, loss_rt_detr  # noqa: E402
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher  # noqa: E402

from lossforge.integrations import transformers_detection as ours  # noqa: E402
from lossforge.patch.patching import _SAID, IntegrationError, once  # noqa: E402

BACKBONE = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "layer_type": "basic"}
SMALL = {"num_queries": 9, "num_labels": 4, "dropout": 0.0}
HEADS = ("encoder_attention_heads", "decoder_attention_heads", "decoder_layers")
TRANSFORMER = {**SMALL, "d_model": 32, "encoder_layers": 1, "auxiliary_loss": True, **dict.fromkeys(HEADS, 2)}
TRANSFORMER |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
REAL_TIME = {**SMALL, **dict.fromkeys(("encoder_hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16)}
REAL_TIME |= {**dict.fromkeys((*HEADS, "num_attention_heads"), 2), "num_denoising": 4, "anchor_image_size": None}
REAL_TIME |= {"encoder_in_channels": [8, 8, 8], "decoder_in_channels": [16, 16, 16]}
GROUPS = {**SMALL, "d_model": 16, "decoder_ffn_dim": 16, "group_detr": 2, "projector_scale_factors": [1.0], "auxiliary_loss": True}
GROUPS |= dict.fromkeys(("decoder_layers", "decoder_self_attention_heads", "decoder_cross_attention_heads"), 2)
STAGES = ("stage_in_channels", "stage_mid_channels", "stage_out_channels", "hidden_sizes")
HGNET = {"embedding_size": 8, "stem_channels": [3, 8, 8], "depths": [1] * 4, **dict.fromkeys(STAGES, [8] * 4)}
HGNET |= {"stage_num_blocks": [1] * 4, "stage_kernel_size": [3] * 4, "stage_numb_of_layers": [1] * 4}
HGNET |= {"stage_downsample": [False, True, True, True], "stage_light_block": [False] * 4}


@pytest.fixture
def float64(monkeypatch):
    """Compute in float64, also what transformers makes float32: the places of sides between D-FINE's bins."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def resnet(kind="ResNet", out=None):
    return getattr(transformers, f"{kind}Config")(**BACKBONE, out_features=out or ["stage2", "stage3", "stage4"])


def make(name):
    torch.manual_seed(0)
    if not hasattr(transformers, f"{name}ForObjectDetection"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    before_5_1 = "use_timm_backbone" in inspect.signature(transformers.DetrConfig.__init__).parameters
    own_backbone = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False} if before_5_1 else {}
    if name == "DabDetr":
        sizes = {"hidden_size" if key == "d_model" else key: value for key, value in TRANSFORMER.items()} | own_backbone
        config = transformers.DabDetrConfig(**sizes, backbone_config=resnet(out=["stage4"]), initializer_bias_prior_prob=0.1)
    elif name in ("Detr", "ConditionalDetr", "DeformableDetr"):
        backbone = {"backbone_config": resnet(out=["stage4"]) if name != "DeformableDetr" else resnet()}
        more = own_backbone | ({"num_feature_levels": 3} if name == "DeformableDetr" else {})
        if name == "Detr":  # weights that tell its queries apart, whose costs would else be equal to the last digits
            more["init_std"] = 0.3
        config = getattr(transformers, f"{name}Config")(**TRANSFORMER, **backbone, **more)
    elif name in ("RTDetr", "RTDetrV2"):
        config = getattr(transformers, f"{name}Config")(**REAL_TIME, backbone_config=resnet("RTDetrResNet"), decoder_n_points=2)
    elif name == "DFine":
        config = transformers.DFineConfig(**REAL_TIME, backbone_config=resnet("RTDetrResNet"), decoder_n_points=[2, 2, 2])
    elif name == "Deimv2":
        body = transformers.HGNetV2Config(**HGNET, out_features=["stage2", "stage3", "stage4"])
        config = transformers.Deimv2Config(**REAL_TIME, backbone_config=body, decoder_n_points=[2, 2, 2])
    elif name == "LwDetr":
        body = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "num_windows": 4}
        vit = transformers.LwDetrViTConfig(**body, window_block_indices=[0], out_indices=[1, 2])
        config = transformers.LwDetrConfig(**GROUPS, backbone_config=vit)
    elif name == "RfDetr":
        body = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16, "num_windows": 2}
        dino = transformers.RfDetrDinov2Config(**body, out_indices=[1, 2], window_block_indexes=[0])
        groups = {key: value for key, value in GROUPS.items() if key != "projector_scale_factors"}
        config = transformers.RfDetrConfig(**groups, backbone_config=dino)
    model = getattr(transformers, f"{name}ForObjectDetection")(config).train()
    if name == "Deimv2":  # over eight values a batch norm's gradients are rounding errors, times its large scale
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    return model


def inputs():
    draw = torch.Generator().manual_seed(1)
    labels = []
    for count in (2, 3):
        boxes = torch.cat([0.3 + 0.4 * torch.rand(count, 2, generator=draw), 0.2 + 0.3 * torch.rand(count, 2, generator=draw)], 1)
        labels.append({"class_labels": torch.randint(4, (count,), generator=draw), "boxes": boxes})
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=draw), "labels": labels}


def step(model, given):
    """Return the loss, its parts and the gradients of all parameters. Every step draws the same noise for denoising."""
    torch.manual_seed(2)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    found = model(**given)
    (found.loss * 1.7).backward()
    for name, buffer in model.named_buffers():
        buffer.data.copy_(state[name])
    parts = {name: torch.as_tensor(each).detach().reshape(()) for name, each in (getattr(found, "loss_dict", None) or {}).items()}
    return found.loss.detach().reshape(()), parts, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model, given):
    expected = step(model, given)
    _SAID.clear()
    with ours.patch():
        found = step(model, given)
    assert any(not torch.equal(found[2][name], gradient) for name, gradient in expected[2].items())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    return _SAID


@pytest.mark.parametrize("name", ["Detr", "ConditionalDetr", "DeformableDetr", "RTDetr", "DFine", "Deimv2", "LwDetr"])
def test_detectors(name):
    assert not compare(make(name), inputs())


TRAINED = ["Detr", "ConditionalDetr", "DeformableDetr", "DabDetr", "RTDetr", "RTDetrV2", "DFine", "Deimv2", "LwDetr", "RfDetr"]


def trained(name, steps):
    """Return the loss, its parts and the gradients of each step of a training in float64."""
    model, found = make(name).double(), []
    given = inputs()
    given["pixel_values"] = given["pixel_values"].double()
    given["labels"] = [{**each, "boxes": each["boxes"].double()} for each in given["labels"]]
    if name in ("DFine", "Deimv2"):  # distributions that differ between layers; queries of anchors that are not masked, which are ties
        for key, parameter in model.named_parameters():
            if "decoder.bbox_embed" in key or "enc_score_head.weight" in key:
                torch.nn.init.normal_(parameter, std=0.5)
            elif "enc_score_head.bias" in key or "enc_output.0.bias" in key:
                torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), 2e-5 if name in ("DFine", "Deimv2") else 1e-3)
    for _ in range(steps):
        found.append(step(model, given))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_of_20_steps(name, float64):
    """Every step's loss, parts and gradients of all parameters are the library's own; after undo, to the bit."""
    expected = trained(name, 20)
    _SAID.clear()
    with ours.patch():
        found = trained(name, 20)
    assert not _SAID
    assert name not in ("DFine", "Deimv2") or min(parts["loss_ddf_aux_0"] for _, parts, _ in expected) > 0.01
    assert abs(float(expected[-1][0] - expected[0][0])) > 1e-3
    assert any(not torch.equal(gradient, found[0][2][key]) for key, gradient in expected[0][2].items())
    for right, other in zip(expected, found, strict=True):
        assert other[1].keys() == right[1].keys()
        torch.testing.assert_close(other[:2], right[:2], rtol=1e-7, atol=1e-9)
        for key, gradient in right[2].items():
            torch.testing.assert_close(other[2][key], gradient, rtol=1e-7, atol=1e-7 * gradient.abs().max().item() + 1e-12)
    torch.testing.assert_close(trained(name, 1), expected[:1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Detr", "ConditionalDetr", "DeformableDetr", "RTDetr", "RTDetrV2", "LwDetr"])
def test_all_layers_at_once(name):
    """The model's loss, and the gradients of its parameters; an image without boxes."""
    model, given = make(name), inputs()
    if name.startswith("RTDetr") and not ours._leaves_noise_out():
        pytest.skip(f"transformers {transformers.__version__} has another loss of {name}")
    own = model.loss_function
    for labels in (given["labels"], [given["labels"][1], {"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)}]):
        given["labels"] = labels
        model.loss_function = own
        expected, _, of_theirs = step(model, given)
        auxiliary = len(model(**given).auxiliary_outputs)
        model.loss_function = ours.loss_function
        found, parts, of_ours = step(model, given)
        assert list(parts) == ["loss_class", "loss_bbox", "loss_giou"]
        torch.testing.assert_close((found, of_ours), (expected, of_theirs), rtol=1e-3, atol=1e-5)
        assert len(model(**given).auxiliary_outputs) == auxiliary
    with torch.no_grad():
        assert model.eval()(**given).loss.isfinite()


@pytest.mark.parametrize("name", ["Detr", "LwDetr"])
def test_the_number_of_boxes_of_all_processes(name, monkeypatch):
    """As the model's own loss counts them, by accelerate or torch.distributed: here the sum of two processes is said to be 17."""
    if name == "Detr":
        for module in (loss_for_object_detection, accelerate.utils):
            monkeypatch.setattr(module, "reduce", lambda t: torch.full_like(t, 17.0))
        monkeypatch.setattr(accelerate.PartialState, "_shared_state", {"num_processes": 2, "_cpu": True, "backend": None})
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(
            torch.distributed, "all_reduce", lambda t, op=None: t.fill_(17.0 * (1 if op is None else 2))
        )  # theirs: of 2 groups
    model = make(name)
    expected, *_ = step(model, inputs())
    model.loss_function = ours.loss_function
    torch.testing.assert_close(step(model, inputs())[0], expected, rtol=1e-4, atol=1e-5)


def test_other_names_are_refused_at_the_first_call(monkeypatch):
    model, given = make("Detr"), inputs()
    model.loss_function = ours.loss_function
    monkeypatch.setattr(ours, "_check", once("transformers", ours.TESTED, ours.REPLACED))
    monkeypatch.delattr(loss_rt_detr.RTDetrLoss, "loss_labels_vfl")
    with pytest.raises(IntegrationError, match=r"RTDetrLoss\.loss_labels_vfl is missing .* Install a version that was tested"):
        model(**given)
    monkeypatch.undo()
    assert model(**given).loss.isfinite()


def test_an_rt_detr_that_counts_noise_is_refused(monkeypatch):
    """As transformers before 5.23, whose last layer's loss has the denoising queries in it."""
    own = ours._leaves_noise_out
    model = make("RTDetr")
    model.loss_function = ours.loss_function
    monkeypatch.setattr(ours, "_leaves_noise_out", lambda: False)
    with pytest.raises(IntegrationError, match=r"counts denoising queries .* use patch\(\)"):
        model(**inputs())
    source = inspect.getsource(loss_rt_detr.RTDetrForObjectDetectionLoss).replace("torch.split(logits,", "torch.split(other,")
    monkeypatch.setattr(inspect, "getsource", lambda function: source)
    assert not own.__wrapped__()


def test_models_without_a_criterion(monkeypatch):
    monkeypatch.setattr(ours, "_leaves_noise_out", lambda: True)
    model = make("DFine")
    model.loss_function = ours.loss_function
    with pytest.raises(ValueError, match=r"config\.model_type must be one of 'detr', .*, got 'd_fine'"):
        model(**inputs())
    model = make("RTDetr")
    model.config.use_focal_loss = False
    model.loss_function = ours.loss_function
    with pytest.raises(ValueError, match=r"config\.use_focal_loss must be True, got False"):
        model(**inputs())


@pytest.mark.parametrize("name", ["Detr", "DeformableDetr", "RTDetr", "LwDetr"])
def test_an_image_without_boxes(name):
    given = inputs()
    given["labels"][0] = {"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)}
    assert not compare(make(name), given)


def test_a_matcher_by_softmax():
    model = make("RTDetr")
    model.config.use_focal_loss = False
    assert not compare(model, inputs())


def test_the_masks_of_mask2former():
    torch.manual_seed(0)
    backbone = transformers.SwinConfig(image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2)
    backbone._out_features, backbone._out_indices = ["stage1", "stage2", "stage3", "stage4"], [1, 2, 3, 4]
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16, "dim_feedforward": 16}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 6, "train_num_points": 64}
    config = transformers.Mask2FormerConfig(backbone_config=backbone, num_labels=4, dropout=0.0, **sizes, **layers)
    model = transformers.Mask2FormerForUniversalSegmentation(config).train()
    masks = [torch.zeros(2, 64, 64), torch.zeros(1, 64, 64)]
    masks[0][0, :30, :40], masks[0][1, 30:], masks[1][0, 10:50, 20:] = 1, 1, 1
    given = {"pixel_values": torch.randn(2, 3, 64, 64), "mask_labels": masks, "class_labels": [torch.tensor([0, 2]), torch.tensor([3])]}
    assert not compare(model, given)


@pytest.mark.parametrize("name", ["MaskFormer", "Mask2Former"])
@pytest.mark.parametrize("counts", [(4, 2), (0, 3)])
def test_masks_are_matched_as_by_transformers(name, counts):
    """At random points, which both draw as one does; and at the pixels of predictions, to which masks are resized."""
    torch.manual_seed(0)
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    sampled = {"num_points": 50} if name == "Mask2Former" else {}
    matcher = getattr(module, f"{name}HungarianMatcher")(2.0, 5.0, 4.0, **sampled)
    given = {"masks_queries_logits": 3 * torch.randn(2, 9, 16, 16), "class_queries_logits": torch.randn(2, 9, 5)}
    given["mask_labels"] = [(torch.rand(count, 32, 32) > 0.5).float() for count in counts]
    given["class_labels"] = [torch.randint(4, (count,)) for count in counts]
    torch.manual_seed(1)
    expected = matcher(**given)
    _SAID.clear()
    with ours.patch():
        torch.manual_seed(1)
        found = matcher(**given)
    assert not _SAID
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sigmoid_focal_loss", "dice_loss"])
def test_losses_of_masks(name):
    logits, masks = torch.randn(3, 20, requires_grad=True), torch.rand(3, 20).round()
    own = getattr(loss_rt_detr, name)
    expected = own(logits, masks, 2.5)
    with ours.patch():
        assert getattr(loss_rt_detr, name) is not own
        found = getattr(loss_rt_detr, name)(logits, masks, 2.5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(each, logits, torch.tensor(1.7))[0] for each in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_matches_are_the_same():
    torch.manual_seed(0)
    matcher = DeformableDetrHungarianMatcher(2.0, 5.0, 2.0)
    outputs = {"logits": torch.randn(2, 30, 4), "pred_boxes": torch.rand(2, 30, 4) * 0.5 + 0.1}
    targets = inputs()["labels"]
    expected = matcher(outputs, targets)
    with ours.patch():
        found = matcher(outputs, targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_matches_of_groups_are_the_same():
    loss_lw_detr = pytest.importorskip("transformers.loss.loss_lw_detr")
    torch.manual_seed(0)
    matcher = loss_lw_detr.LwDetrHungarianMatcher(2.0, 5.0, 2.0)
    outputs = {"logits": torch.randn(2, 30, 4), "pred_boxes": torch.rand(2, 30, 4) * 0.5 + 0.1}
    targets = inputs()["labels"]
    expected = matcher(outputs, targets, 3)
    with ours.patch():
        found = matcher(outputs, targets, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lacking", ["loss_deimv2", "loss_lw_detr"])
def test_a_version_without_a_detector_is_patched_for_the_others(lacking, monkeypatch):
    """As transformers 4.57, which has neither."""
    monkeypatch.setitem(sys.modules, f"transformers.loss.{lacking}", None)  # an import of it raises
    with ours.patch() as handle:
        assert all(each.startswith(ours.SINCE_5) for each in [name.removeprefix("transformers.") for name in handle.left])
        assert any(lacking in each for each in handle.left)
        assert "transformers.loss.loss_rt_detr:RTDetrLoss.loss_boxes" in handle.replaced

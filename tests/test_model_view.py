"""Images of a folder are seen as the model's weights were trained to see them, unless a setting says otherwise."""

import json

import numpy as np
import pytest
import timm
import torch
import yaml
from digit_folders import digit_files
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from lab.base.errors import UserError
from lab.config.model_view import TIMM_NAMES, model_view
from lab.config.settings import CONF, load
from lab.tasks.models import check_model_name

OVERLAY = {"input_size": [3, 64, 64], "crop_pct": 0.5, "interpolation": "bilinear", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}


def view_of(*words):
    data = load(["data=folder", *words]).config.data
    return data.image_size, data.crop_pct, data.crop_mode, data.interpolation


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "resnet50", "convnext_tiny.fb_in22k", "vit_base_patch16_siglip_256"])
def test_what_no_setting_says_is_as_timm_resolves_it(name):
    known = resolve_model_data_config(timm.create_model(name, pretrained=False))
    wanted = known["input_size"][-1], known["crop_pct"], known["crop_mode"], known["interpolation"]
    assert view_of("model=timm", f"model.name={name}") == wanted
    norm = model_view(load(["model=timm", f"model.name={name}"]).config.model)
    assert (norm["mean"], norm["std"]) == (known["mean"], known["std"])


@pytest.mark.parametrize(("option", "known"), [("tiny_resnet", "test_resnet"), ("tiny_vit", "test_vit")])
def test_an_option_whose_model_timm_calls_otherwise(make_trainer, option, known):
    """One name from the command to the run; and timm's model, with the tags of its weights."""
    check_model_name(f"{option}.r160_in1k")
    with pytest.raises(UserError, match=f"model.name={option}.nope: {option} has the pretrained tags r160_in1k."):
        check_model_name(f"{option}.nope")
    trainer = make_trainer(f"model={option}", "data.image_size=32")
    assert trainer.config.model.name == trainer.config.model.title == option
    size = {} if option == "tiny_resnet" else {"img_size": 32}
    wanted = timm.create_model(known, in_chans=1, num_classes=10, **size).state_dict()
    assert {name: value.shape for name, value in trainer.model.state_dict().items()} == {name: each.shape for name, each in wanted.items()}


def test_no_option_has_timms_name_of_them():
    files = sorted((CONF / "model").glob("*.yaml"))
    assert "tiny_resnet.yaml" in [file.name for file in files]
    assert [file.name for file in files if yaml.safe_load(file.read_text()).get("name") in TIMM_NAMES.values()] == []


def test_a_setting_by_name_wins():
    own = view_of("model=resnet50")
    assert own == (224, 0.95, "center", "bicubic")
    assert view_of("model=resnet50", "data.image_size=96") == (96, *own[1:])
    assert view_of("model=resnet50", "data.crop_pct=1", "data.crop_mode=squash") == (224, 1.0, "squash", "bicubic")
    assert view_of("model=resnet50", "data.interpolation=nearest", "data.image_size=null") == (*own[:3], "nearest")


def test_other_data_keeps_its_own_size():
    assert load(["model=resnet50"]).config.data.image_size == 32


@pytest.fixture
def pretrained(tmp_path):
    """Words for a model whose weights and how they see images are a file's and this test's own."""
    torch.manual_seed(7)
    weights = timm.create_model("test_resnet", num_classes=3).state_dict()
    torch.save(weights, tmp_path / "weights.pth")
    overlay = json.dumps(OVERLAY | {"file": str(tmp_path / "weights.pth"), "num_classes": 3}).replace('"', "")
    return weights, ["model=tiny_resnet", "model.pretrained=true", f"+model.args.pretrained_cfg_overlay={overlay}"]


def test_pretrained_weights_bring_their_view(make_trainer, pretrained, tmp_path):
    weights, words = pretrained
    root = digit_files(tmp_path / "pictures")
    trainer = make_trainer("data=folder", f"data.root={root}", "data.workers=0", *words)
    loaded = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    known = resolve_model_data_config(trainer.model)
    assert known["crop_pct"] == 0.5
    transform = create_transform(**known)
    (batch,) = trainer.data.val
    for key, image in zip(trainer.data.val.keys, batch.images, strict=True):
        assert torch.equal(image, transform(Image.open(root / key).convert("RGB")))
    (batch,) = make_trainer("data=folder", f"data.root={root}", "data.workers=0", *words, "data.crop_pct=1").data.val
    pixels = np.asarray(Image.open(root / trainer.data.val.keys[0]).convert("RGB").resize((64, 64), Image.Resampling.BILINEAR))
    wanted = (torch.from_numpy(pixels / 255).permute(2, 0, 1) - torch.tensor(OVERLAY["mean"]).view(3, 1, 1)) / 0.5
    assert torch.allclose(batch.images[0, 1], wanted[1].float(), atol=1e-5)


def test_a_saved_model_sees_as_it_did(make_trainer, pretrained, run_folder, quiet, tmp_path, capsys):
    import evaluate
    import predict

    root = digit_files(tmp_path / "pictures")
    words = ["data=folder", f"data.root={root}", "data.workers=0", "data.batch_size=8", "trainer.epochs=1", *pretrained[1]]
    trainer = make_trainer(*words)
    trainer.fit(run_folder, quiet)
    (tmp_path / "weights.pth").unlink()  # they are in the checkpoint
    best = f"checkpoint={run_folder.path / 'checkpoints' / 'best.safetensors'}"
    runs = tmp_path / "evaluations"
    assert evaluate.main([best, "data=folder", f"data.root={root}", "tracking=none", f"trainer.runs={runs}"]) == 0
    assert "changed:" not in capsys.readouterr().out
    (folder,) = runs.iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (values,) = [record["values"] for record in records if record["kind"] == "metrics"]
    assert {name: values[f"val/{name}"] for name in trainer.best.values} == trainer.best.values
    assert predict.main([best, f"out={tmp_path / 'out'}", "top=3", "trainer.device=cpu", str(root / "val")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    right = sum(line["found"][0]["label"] == line["image"].split("/")[-2] for line in lines)
    assert right / len(lines) == pytest.approx(trainer.best.values["top1"])
    assert evaluate.main([best, "data.crop_pct=0.9", "tracking=none", f"trainer.runs={runs}", "--cfg"]) == 0
    assert "crop_pct: 0.9" in capsys.readouterr().out

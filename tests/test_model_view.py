"""Images of a folder are seen as the model's weights were trained to see them, unless a setting says otherwise."""

import json

import numpy as np
import pytest
import timm
import torch
from folder_parts import digit_files
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from lab.config.model_view import model_view
from lab.config.settings import load

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

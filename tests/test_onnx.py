"""Export to ONNX: ONNX Runtime gives the model's predictions, for any number of images, and the metadata says what they mean."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits
from torch.nn.attention import SDPBackend, sdpa_kernel

import lab
from lab.base.errors import UserError
from lab.config.objects import find_object
from lab.config.settings import load
from lab.data.sets import Norm
from lab.detectors.instances.loss import inside
from lab.registry import TASKS, spec_of
from lab.run.export import check_export, export
from lab.run.exported import difference

onnxruntime = pytest.importorskip("onnxruntime", reason="needs uv sync --extra onnx")

SHORT = ["trainer.device=cpu", "trainer.epochs=1", "trainer.max_updates=2", "tracking=none", "export.format=onnx"]
FEW = ["data.train_scenes=16", "data.val_scenes=8", "data.batch_size=8"]


def opened(content):
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def said(session, pixels):
    return torch.from_numpy(session.run(["output"], {"images": pixels.numpy()})[0])


def told(session):
    return json.loads(session.get_modelmeta().custom_metadata_map["model.json"])


@pytest.mark.parametrize(
    ("words", "output", "classes"),
    [
        (["model=tiny_resnet", "loss=focal", "data.image_size=16"], (10,), [str(digit) for digit in range(10)]),
        (["task=regression", "model=tiny_resnet", "data.image_size=16"], (2,), ["turn", "size"]),
        (["task=segmentation", *FEW], (11, 64, 64), ["background", *(str(digit) for digit in range(10))]),
        pytest.param(
            ["task=detection", "model=yolo_tiny", "trainer.max_updates=1", *FEW],
            (100, 6),
            [str(digit) for digit in range(10)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_predicts_what_the_exported_program_does(tmp_path, monkeypatch, capsys, words, output, classes):
    monkeypatch.chdir(tmp_path)
    result = lab.train(*SHORT, "tracking.model=true", *words)
    assert "best.onnx: ONNX Runtime gives the model's output on 8 real images" in capsys.readouterr().out
    path = result.folder / "checkpoints" / "best.onnx"
    session, program = opened(str(path)), torch.export.load(path.with_suffix(".pt2")).module()
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[0]) == ("images", "tensor(uint8)", "batch")
    for count, height in ((1, 64), (3, 96)):
        sides = {"height": height, "width": 128}  # of a detector, which takes any; the others have numbers
        pixels = torch.randint(0, 256, (count, *(sides.get(side, side) for side in given.shape[1:])), dtype=torch.uint8)
        found = said(session, pixels)
        assert found.shape == (count, *output)
        torch.testing.assert_close(found, program(pixels), rtol=1e-3, atol=1e-3)
    described, state = told(session), torch.load(path.with_suffix(".pt"), weights_only=True)
    assert described["classes"] == result.classes == classes
    assert {name: described["input"][name] for name in ("mean", "std")} == state["norm"]
    assert described["task"] == load(words).config.task.name
    about = {"model.json": ""}
    torch.export.load(path.with_suffix(".pt2"), extra_files=about)
    assert json.loads(about["model.json"]) == described
    assert described["input"]["interpolation"] == "bilinear"
    assert (described["output"]["shape"], described["output"]["dtype"]) == ([*output], "float32")
    with safe_open(path.with_suffix(".safetensors"), "pt") as file:
        weights = json.loads(file.metadata()["model.json"])
    assert {name: weights[name] for name in ("classes", "task", "step")} == {name: described[name] for name in ("classes", "task", "step")}
    assert weights["input"]["mean"] == state["norm"]["mean"]
    assert described["input"]["resize"]["rule"] == ("none" if "task=detection" in words else "exactly")


def exported_detector(model, *words, task="detection"):
    """Export a detector of three classes whose scores are spread, which begin equal."""
    torch.manual_seed(0)
    config = load([f"task={task}", f"model={model}", "model.score_threshold=0.001", *words]).config
    classes, norm = ["bee", "ant", "cow"], Norm([0.4, 0.5, 0.6], [0.2, 0.2, 0.3])
    made = find_object(spec_of(config.task).export)(config, classes, norm)
    for layer in made.model.modules():
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)) and layer.weight.std() < 0.05:
            torch.nn.init.normal_(layer.weight, std=0.05)
    state = {"model": made.model.state_dict(), "norm": vars(norm), "classes": classes, "updates": 0}
    return export(config, state, lambda: torch.randn(2, *made.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("model", "task"),
    [
        pytest.param("retinanet_tiny", "detection", marks=pytest.mark.slow),
        pytest.param("fcos_tiny", "detection", marks=pytest.mark.slow),
        pytest.param("detr_tiny model.denoising=20", "detection", marks=pytest.mark.slow),
        ("yolo_tiny model.one_to_one=true", "detection"),
        pytest.param("yolo_tiny", "instances", marks=pytest.mark.slow),
        pytest.param("detr_tiny", "instances", marks=pytest.mark.slow),
        pytest.param("yolo_tiny model.candidates=300", "oriented", marks=pytest.mark.slow),
        pytest.param("yolo_tiny model.one_to_one=true", "oriented", marks=pytest.mark.slow),
    ],
)
def test_detections_of_several_images_and_classes_are_those_of_the_model(tmp_path, model, task):
    from lab.run.onnx import write_onnx

    exported = exported_detector(*model.split(), task=task)
    assert exported.record["multiple"] == 32
    assert not exported.notes
    write_onnx(exported, torch.randn(8, *exported.record["shape"]), tmp_path / "model.onnx")
    pixels = torch.randint(0, 256, (3, *exported.record["shape"]), dtype=torch.uint8)
    with torch.no_grad():
        expected = exported.module(pixels)
    found = said(opened(str(tmp_path / "model.onnx")), pixels)
    score, label = (5, 6) if task == "oriented" else (4, 5)
    assert (expected[..., score] > 0).sum() > 100
    assert len(expected[..., label].unique()) >= 2
    same = torch.cdist(expected, found, p=float("inf")).amin(-1) < 0.01
    assert same.double().mean() > 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision"), [("yolo_tiny", "bf16"), ("detr_tiny", "fp16")])
def test_a_detector_in_half_precision_takes_images_of_any_size(model, precision):
    half, whole = exported_detector(model, f"export.precision={precision}"), exported_detector(model)
    assert half.record["multiple"] == 32
    (note,) = half.notes  # and none of a size that is not free
    assert note.startswith(f"{precision}: the output differs from float32's by at most ")
    assert {value.dtype for value in half.program.state_dict.values() if value.dtype in (torch.float16, torch.bfloat16)}
    for height, width in ((128, 128), (96, 160)):
        pixels = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8)
        with torch.no_grad():
            expected, found, close = half.module(pixels), half.program.module()(pixels), whole.module(pixels)
        assert (expected[..., 4] > 0).sum() > 100
        assert difference(expected, found) < 0.01
        assert abs(float(close[..., 4].mean() - found[..., 4].mean())) < 0.02


def test_a_program_holds_where_attention_gives_another_layout():
    """Plain matrix products give CUDA's layout, of which a view cannot be taken as of the CPU's."""
    program = exported_detector("detr_tiny", "model.layers=1").program.module()
    pixels = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8)
    with torch.no_grad():
        expected = program(pixels)
        with sdpa_kernel(SDPBackend.MATH):
            found = program(pixels)
    assert (expected[..., 4] > 0).sum() > 20
    assert difference(expected, found) < 1e-3


def test_detections_are_compared_by_corners_scores_and_classes_alike():
    expected = torch.tensor([[[10.0, 10.0, 640.0, 480.0, 0.9, 1.0], [10.0, 10.0, 20.0, 20.0, 0.8, 9.0]]])
    assert difference(expected, expected.flip(1)) == 0
    for column, change, share in ((2, 6.4, 0.01), (4, 0.3, 0.3), (5, 1.0, 1.0)):
        found = expected[:, :1].clone()
        found[0, 0, column] += change
        assert difference(expected[:, :1], found) == pytest.approx(share, rel=1e-4)


def test_a_detection_of_nan_is_different():
    expected = 50 * torch.rand(1, 1, 6, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[0, 0, 4] = torch.nan
    assert difference(expected, expected) == 0
    assert difference(expected, found) > 0.02


def test_masks_are_compared_where_they_are_in_both_boxes():
    """Half precision moves corners of this image by up to an eighth of a pixel, and with them rows of cells out of their boxes."""
    generator = torch.Generator().manual_seed(0)
    low = torch.rand(1, 100, 2, generator=generator) * torch.tensor([400.0, 200.0])
    boxes = torch.cat([low, low + 20 + 80 * torch.rand(1, 100, 2, generator=generator)], -1)
    rest = torch.cat([torch.rand(1, 100, 1, generator=generator), torch.randint(3, (1, 100, 1), generator=generator)], -1)
    masks = 0.2 + 0.6 * torch.rand(1, 100, 64, 128, generator=generator)

    def rows(boxes, masks):
        return torch.cat([boxes, rest, (masks * inside(boxes / 4, masks)).flatten(2)], -1)

    expected, rounded = rows(boxes, masks), rows(boxes.half().float(), masks)
    assert ((expected[..., 6:] > 0) != (rounded[..., 6:] > 0)).any(-1).double().mean() > 0.03
    assert difference(expected, rounded) < 1e-3
    assert difference(expected, rows(boxes, masks).flip(1)) == 0
    assert difference(expected, rows(boxes, 1 - masks)) > 0.3
    assert difference(expected, rows(boxes, torch.zeros_like(masks))) == 1
    assert not difference(expected, rows(boxes, torch.full_like(masks, torch.nan))) < 1


def test_a_file_that_differs_from_the_model_is_not_written(tmp_path):
    from lab.run.onnx import write_onnx

    config, norm = load(["model=tiny_resnet", "data.image_size=16"]).config, Norm([0.3], [0.4])
    made = find_object(spec_of(config.task).export)(config, ["a", "b"], norm)
    exported = export(config, {"model": made.model.state_dict(), "norm": vars(norm), "classes": ["a", "b"], "updates": 0}, None)
    other = replace(exported, module=lambda pixels: exported.module(pixels).flip(1))
    with pytest.raises(ValueError, match=r"ONNX Runtime's output differs from the model's by 0\.\d"):
        write_onnx(other, torch.randn(2, *exported.record["shape"]), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1", "else it writes an id into the home folder"


@pytest.mark.slow
def test_a_detector_of_images_that_are_not_square(tmp_path, monkeypatch, capsys):
    """128 × 96 pixels, of which the usual batch of 128 × 128 says nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    boxes = {"images": [], "categories": [{"id": 1, "name": "bee"}], "annotations": []}
    for number in range(4):
        pixels = torch.randint(0, 256, (96, 128, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "images" / f"{number}.png")
        boxes["images"].append({"id": number, "file_name": f"{number}.png", "width": 128, "height": 96})
        of = {"id": number, "image_id": number, "category_id": 1, "bbox": [10, 20, 40, 30], "area": 1200, "iscrowd": 0}
        boxes["annotations"].append(of)
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    parts = [f"data.{part}_images=images" for part in ("train", "val")] + [
        f"data.{part}_annotations=boxes.json" for part in ("train", "val")
    ]
    size = ["data.shortest=96", "data.longest=null", "data.workers=0", "data.batch_size=2"]
    words = ["task=detection", "model=yolo_tiny", "data=coco", f"data.root={tmp_path}", *parts, *size]
    result = lab.train(*SHORT, "tracking.model=true", *words)
    assert result.exit_status == 0
    assert "best.onnx: ONNX Runtime gives the model's output on 4 real images in 3 sizes" in capsys.readouterr().out
    path = result.folder / "checkpoints" / "best.onnx"
    session, program = opened(str(path)), torch.export.load(path.with_suffix(".pt2")).module()
    for height, width in ((96, 128), (128, 96), (32, 32), (160, 64)):
        pixels = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8)
        torch.testing.assert_close(said(session, pixels), program(pixels), rtol=1e-3, atol=1e-3)
    given = told(session)["input"]
    assert given["resize"] == {"rule": "shorter side, at most longest, keep proportions", "shortest": 96, "longest": None}
    assert given["pad"]["multiple"] == 32


def test_an_evaluation_whose_export_fails_keeps_its_figures_and_says_so(tmp_path, monkeypatch, capsys):
    """A timm model whose forward depends on its pixels cannot be traced."""
    import timm

    monkeypatch.chdir(tmp_path)
    result = lab.train(*SHORT[:-1], "tracking.model=false", "model=tiny_resnet", "data.image_size=16")

    def forward(self, x):
        return self.forward_head(self.forward_features(x)) * (1 if x.sum() > 0 else 2)

    monkeypatch.setattr(type(timm.create_model("test_resnet")), "forward", forward)
    scored = lab.evaluate(result.folder, "export.format=onnx", "trainer.device=cpu")
    assert (scored.status, scored.exit_status, scored.failure) == ("FINISHED", 4, None)
    assert 0 <= scored.values["top1"] <= 1
    assert "failed: " in capsys.readouterr().out.partition("onnx export")[2]


def lack_onnxscript(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "onnxscript" else find(name, *more))


def test_a_finished_run_is_exported_by_an_evaluation_and_scored_without_the_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = lab.train(*SHORT, "tracking.model=true", "model=tiny_resnet", "data.image_size=16")
    scored = lab.evaluate(result.folder, "export.format=onnx", "trainer.device=cpu")
    pixels = torch.randint(0, 256, (5, 1, 16, 16), dtype=torch.uint8)
    first, second = (opened(str(path)) for path in (result.folder / "checkpoints" / "best.onnx", scored.folder / "model.onnx"))
    torch.testing.assert_close(said(first, pixels), said(second, pixels), rtol=0, atol=0)
    lack_onnxscript(monkeypatch)
    assert not list(lab.evaluate(result.folder, "trainer.device=cpu").folder.glob("*.onnx"))
    for ask in (lambda: lab.evaluate(result.folder, "export.format=onnx"), lambda: lab.train(*SHORT)):
        with pytest.raises(UserError, match=r"export\.format=onnx: onnxscript: not installed; install by: uv sync --extra onnx"):
            ask()


def test_what_has_no_export_is_refused(monkeypatch):
    monkeypatch.setitem(TASKS, "classification", replace(TASKS["classification"], export=None))
    with pytest.raises(UserError, match=r"export\.format=onnx: task=classification has no export"):
        check_export(load(["export.format=onnx"]).config)
    with pytest.raises(UserError, match=r"export\.format=onxn"):
        load(["export.format=onxn"])
    with pytest.raises(UserError, match=r"export\.precision=bf16: ONNX Runtime does not compute in bfloat16"):
        check_export(load(["export.format=onnx", "export.precision=bf16"]).config)


ALONE = "import runpy, sys; sys.modules.update(lossforge=None, lab=None); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"


@pytest.mark.slow
def test_each_file_says_what_a_picture_shows_without_our_packages(tmp_path, monkeypatch):
    """The page's script, in a process that cannot import what wrote the files; then in half precision and at another size."""
    monkeypatch.chdir(tmp_path)
    result = lab.train(*SHORT[:2], *SHORT[3:], "tracking.model=true", "model=tiny_resnet", "data.image_size=32", "loss=softmax_focal")
    digits = load_digits()
    for place in range(8):
        Image.fromarray((digits.images[place] * 15).astype("uint8")).save(f"{place}.png")
    half = lab.evaluate(result.folder, "export.precision=fp16", "export.any_size=true", "trainer.device=cpu", "trainer.amp=bf16")
    assert half.exit_status == 0
    assert abs(half.values["loss"] - lab.evaluate(result.folder, "trainer.device=cpu").values["loss"]) < 0.01
    checkpoints, folder = result.folder / "checkpoints", half.folder
    expected = {}
    module = torch.export.load(checkpoints / "best.pt2").module()
    for place in range(8):
        pixels = torch.tensor(np.array(Image.open(f"{place}.png").resize((32, 32), Image.Resampling.BILINEAR)))[None, None]
        expected[place] = module(pixels)[0]
    script = Path(__file__).parents[1] / "examples" / "use_exported_model.py"
    (sure,) = [max(expected, key=lambda place: float(expected[place].topk(2).values.diff().abs()))]
    for path in (*(checkpoints / f"best.{ending}" for ending in ("pt2", "onnx", "safetensors")), folder / "model.onnx"):
        done = subprocess.run([sys.executable, "-c", ALONE, script, path, f"{sure}.png"], capture_output=True, text=True, timeout=240)
        assert done.stdout.split() == [result.classes[int(expected[sure].argmax())]], done.stderr
    small, large = (path.stat().st_size for path in (folder / "model.onnx", checkpoints / "best.onnx"))
    assert small < 0.7 * large
    session = opened(str(folder / "model.onnx"))
    about = told(session)
    assert (about["precision"], about["input"]["multiple"], about["output"]["shape"]) == ("fp16", 32, [10])
    found = said(session, pixels)[0]
    torch.testing.assert_close(found, expected[7], rtol=0, atol=0.01)
    assert not torch.equal(found, expected[7])
    assert said(session, torch.zeros(2, 1, 64, 96, dtype=torch.uint8)).shape == (2, 10)


def test_a_segmentation_model_in_half_precision_and_of_any_size():
    words = ["task=segmentation", "model=segmenter_tiny", "export.any_size=true"]
    config = load([*words, "export.precision=bf16"]).config
    norm, classes = Norm([0.4, 0.5, 0.6], [0.2, 0.2, 0.3]), ["a", "b", "c", "d"]
    torch.manual_seed(0)
    made = find_object(spec_of(config.task).export)(config, classes, norm)
    state = {"model": made.model.state_dict(), "norm": vars(norm), "classes": classes, "updates": 0}
    images = torch.randn(2, *made.shape)
    exported, whole = (export(each, state, lambda: images) for each in (config, load(words).config))
    assert exported.record["output"] == [4, -1, -1]
    assert "differs from float32's by at most" in exported.notes[0]
    pixels = torch.randint(0, 256, (2, made.shape[0], 64, 96), dtype=torch.uint8)
    with torch.no_grad():
        found, expected = (each.program.module()(pixels) for each in (exported, whole))
    assert found.dtype == torch.float32
    assert found.shape == (2, 4, 64, 96)
    assert difference(expected, found) > 0
    with torch.no_grad():
        assert difference(exported.module(pixels), found) < 0.01
    assert any(value.dtype == torch.bfloat16 for value in exported.program.state_dict.values())


def test_half_precision_that_leaves_its_range_is_refused():
    config, norm = load(["model=tiny_resnet", "data.image_size=32", "export.precision=fp16"]).config, Norm([0.3], [0.4])
    made = find_object(spec_of(config.task).export)(config, ["a", "b"], norm)
    weights = {name: value * (1e6 if name.endswith("fc.weight") else 1) for name, value in made.model.state_dict().items()}
    state = {"model": weights, "norm": vars(norm), "classes": ["a", "b"], "updates": 0}
    with pytest.raises(ValueError, match=r"in torch\.float16 the output is not finite"):
        export(config, state, lambda: torch.randn(2, 1, 32, 32))

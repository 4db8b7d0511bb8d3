"""The measurement of detectors runs, and the documentation's tables follow from what it writes."""

import json

import measure
import measure_detection
import pytest
import reported
import tables
import torch
from loss_text import MissingError

LARGE_RUN = {
    "command": "experiment=digit_scenes_large",
    "map": 0.9,
    "map50": 0.9126,
    "map75": 0.8,
    "backend": "triton",
    "loss_ms": 3.061,
    "step_ms": 48.6,
    "peak_mib": 1424.0,
    "seconds": 167.2,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Steps of each detector, and of RetinaNet under each loss, beside a part of an earlier run."""
    path = tmp_path_factory.mktemp("results") / "detection.json"
    path.write_text(json.dumps({"large": {"runs": []}}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of work this small, more cost more
    try:
        assert measure.main(["detection", "--out", str(path), "--commit", "abc1234", "--parts", "retinanet", "steps", "--small"]) == 0
    finally:
        torch.set_num_threads(threads)
    return path


@pytest.mark.slow
def test_every_part_leaves_its_figures(measured):
    found = json.loads(measured.read_text())
    assert set(found) == {"large", "retinanet", "steps"}
    assert {found[part]["commit"] for part in ("retinanet", "steps")} == {"abc1234"}
    assert [each["loss"] for each in found["retinanet"]["runs"]] == ["lossforge", "torchvision", "loss.implementation=torch"]


@pytest.mark.slow
def test_the_losses_are_the_same(measured):
    """In float32: ours and torchvision's own, both against torchvision's in float64."""
    for each in json.loads(measured.read_text())["retinanet"]["runs"]:
        assert each["positives"] > 10
        assert each["difference"] < 1e-6
        assert max(each["gradient_difference"].values()) < 1e-5
        assert each["step_ms"] > each["loss_ms"] > 0


@pytest.mark.slow
def test_tables_hold_the_figures(measured):
    found = json.loads(measured.read_text())
    found["large"] = found["retinanet"] | {"runs": [LARGE_RUN]}
    found["retinanet"]["runs"][0] |= {"step_ms": 151.04, "loss_ms": 0.987, "peak_mib": 20480.4}
    measured.write_text(json.dumps(found))
    text = f"{reported.detection(measured)}\n{reported.retinanet(measured)}"
    assert "| lossforge | 151.0 | 0.99 | 20,480 |" in text
    assert "| `experiment=digit_scenes_large` | 0.900 | 0.913 | 0.800 | 3.06 | 48.6 | 1,424 | 167 | triton |" in text
    assert "commit abc1234" in text


def steps_of(path):
    return json.loads(path.read_text())["steps"]["runs"]


@pytest.mark.slow
def test_steps_are_of_each_detector_under_each_loss(measured):
    runs = steps_of(measured)
    names = [f"{name}_resnet50" for name in ("retinanet", "fcos", "yolo", "detr")]
    assert [(each["model"], each["loss"]) for each in runs] == [
        (name, loss) for name in names for loss in ("lossforge", "loss.implementation=torch")
    ]


@pytest.mark.slow
def test_steps_take_longer_than_their_losses_and_assignments(measured):
    runs = steps_of(measured)
    assert [each["match_ms"] > 0 for each in runs] == [True] * 4 + [False] * 4  # by anchors before the forward, or by what is predicted
    assert all(each["step_ms"] > each["loss_ms"] > 0 for each in runs)


@pytest.mark.slow
def test_steps_in_float32_are_those_of_plain_torch_in_float64(measured):
    runs = steps_of(measured)
    for each in runs:
        assert each["positives"] > 10
        assert each["other_targets"] == 0
        assert each["difference"] < 1e-5
        assert max(each["gradient_difference"].values()) < 1e-5
    compared = {name for each in runs for name in each["gradient_difference"]}
    assert compared == {"logits", "regression", "centerness", "sides", "earlier_logits", "earlier_regression"}


@pytest.mark.slow
def test_the_table_of_steps_adds_loss_and_assignment(measured):
    found = json.loads(measured.read_text())
    found["steps"]["runs"][0] |= {
        "difference": 2e-5,
        "images_per_second": 123.4,
        "peak_mib": 4567.8,
        "step_ms": 200.0,
        "loss_ms": 15.0,
        "match_ms": 5.0,
    }
    other = measured.with_name("steps.json")
    other.write_text(json.dumps(found))
    assert "| retinanet_resnet50 | lossforge | 123 | 4,568 | 200.0 | 20.00 | 10.0% | 2.0e-05 |" in reported.detector_steps(other)


def test_the_table_of_detectors_pairs_seeds(tmp_path):
    reached = {"fcos": [0.40, 0.42, 0.41], "yolo": [0.45, 0.48, 0.46]}
    runs = [
        {"command": f"model={name}_tiny", "seed": seed, "map": value, "map50": 0.6, "map75": 0.5}
        for name, values in reached.items()
        for seed, value in enumerate(values)
    ]
    place = {"gpu": "2 CPU cores", "torch": "2", "triton": "3", "torchvision": "0", "commit": "abc", "date": "2026-11-25"}
    path = tmp_path / "detection.json"
    path.write_text(json.dumps({"detectors": {**place, "runs": runs}}))
    text = reported.detectors(path)
    assert "| `model=fcos_tiny` | 3 | 0.410 ± 0.025 | 0.600 | 0.500 | baseline |  |" in text
    assert "| `model=yolo_tiny` | 3 | 0.463 ± 0.038 | 0.600 | 0.500 | +0.053 (+0.039 to +0.068) | 0.004 |" in text


def test_variants_are_paired_with_the_first_of_their_model(tmp_path):
    place = {"gpu": "2 CPU cores", "torch": "2", "triton": "3", "torchvision": "0", "commit": "abc", "date": "2026-11-25"}
    names = ("fcos_tiny", "yolo_tiny loss=focal", "yolo_tiny loss=bce", "detr_tiny loss=focal", "detr_tiny loss=mal")
    runs = [
        {"command": f"experiment=detectors model={name}", "seed": seed, "map": 0.1 * number + 0.01 * seed, "map50": 0.6, "map75": 0.5}
        for number, name in enumerate(names)
        for seed in range(3)
    ]
    path = tmp_path / "detection.json"
    path.write_text(json.dumps({"detectors": {**place, "runs": runs[:3]}, "variants": {**place, "runs": runs[3:]}}))
    lines = reported.detectors(path).splitlines()
    for name, said in (("yolo_tiny loss=bce", "+0.100"), ("detr_tiny loss=mal", "+0.100"), ("detr_tiny loss=focal", "baseline")):
        assert said in next(line for line in lines if name in line)


@pytest.mark.slow
def test_variants_train_in_a_few_processes(monkeypatch):
    commands = ("model=yolo_tiny loss=mal", "model=detr_tiny loss=mal model.denoising=60")
    monkeypatch.setattr(measure_detection, "VARIANTS", commands)
    found = list(measure_detection.variants(small=True))
    assert [each["command"] for each in found] == [f"experiment=detectors {command}" for command in commands]
    assert all(each["map"] is not None for each in found)


def test_parts_that_do_not_exist(tmp_path, capsys):
    with pytest.raises(SystemExit):
        measure.main(["detection", "--out", str(tmp_path / "none.json"), "--parts", "table"])
    assert "--parts table: unknown; parts are retinanet, large, detectors, variants, steps, export" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_page_says_that_its_table_is_not_measured_yet(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "SECTIONS", {"detection": (lambda file: f"the tables of {file.name}", tmp_path / "detection.json")})
    begin, end = "<!-- detection: uv run tools/generate.py -->", "<!-- end of detection -->"
    assert tables.renewed("text") == "text"
    assert "Not measured yet." in tables.renewed(f"{begin}{end}")
    (tmp_path / "detection.json").touch()
    assert "the tables of detection.json" in tables.renewed(f"{begin}{end}")
    monkeypatch.setattr(tables, "PAGES", [tmp_path / "page.md"])
    tables.PAGES[0].write_text(begin)
    with pytest.raises(MissingError, match=r"no page has <!-- detection: .* and, below it, <!-- end of detection -->"):
        tables.files()

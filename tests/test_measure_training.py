"""The measurement of classifiers and presets runs, and the documentation's tables follow from what it writes."""

import json
import pathlib

import measure
import measure_training
import pytest
import reported
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "training.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of work this small, more cost more
    try:
        assert measure.main(["training", "--out", str(path), "--commit", "abc1234", "--small"]) == 0
    finally:
        torch.set_num_threads(threads)
    return path


@pytest.mark.slow
def test_every_run_has_the_commit(measured):
    found = json.loads(measured.read_text())
    assert {each["commit"] for part in ("runs", "presets", "parity") for each in found[part]} == {"abc1234"}


@pytest.mark.slow
def test_the_same_losses_are_learned_as_in_plain_torch(measured):
    found = json.loads(measured.read_text())
    assert [each["loss"] for each in found["parity"]] == ["ce", "focal"]
    assert all(each["steps"] == 4 and each["largest_difference"] < 1e-5 for each in found["parity"])


@pytest.mark.slow
def test_every_run_leaves_its_times(measured):
    found = json.loads(measured.read_text())
    assert len(found["runs"]) == 1
    assert len(found["presets"]) == 2
    for each in found["runs"] + found["presets"]:
        assert each["loss_ms"] > 0
        assert each["step_ms"] > 0
        assert 0 <= each["data_wait_share"] < 1


@pytest.mark.slow
def test_what_the_file_holds_is_not_run_again(measured):
    before = measured.read_text()
    assert measure.main(["training", "--out", str(measured), "--commit", "def5678", "--small"]) == 0
    assert measured.read_text() == before
    found = json.loads(before)
    measured.with_name("other.json").write_text(json.dumps(found | {"gpu": "a GPU that is not here"}))
    assert measure.main(["training", "--out", str(measured.with_name("other.json")), "--small"]) == 1


def test_no_preset_is_left_out():
    measured = set(measure_training.PRESETS)
    known = {f"experiment={path.stem}" for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
    # of a user's folder; trained by measure_detection.py and measure_effects.py; a search for the learning rate
    elsewhere = ("finetune_folder", "digit_scenes_large", "detectors", "few_digits", "image_text", "label_smoothing", "lr_range")
    assert known - measured == {f"experiment={name}" for name in elsewhere}


@pytest.mark.slow
def test_tables_hold_the_figures(measured):
    found = json.loads(measured.read_text())
    found["runs"][0] |= {"top1": 98.765, "peak_mib": 2763.4, "loss_ms": 1.234}
    found["presets"][0] |= {"step_ms": 4.56, "images_per_second": 12345.6, "data_wait_share": 0.0321}
    measured.write_text(json.dumps(found))
    text = f"{reported.training(measured)}\n{reported.presets(measured)}"
    assert f"| `{found['runs'][0]['command']}` | 98.77 % | 1.23 | 2,763 |" in text
    assert "| `experiment=distillation` | 4.6 | 12,346 | 3.2% |" in text
    assert "commit abc1234" in text

"""The measurement of several GPUs runs on two processes of the CPU, and the documentation's table follows from what it writes."""

import json

import measure
import measure_several_gpus
import pytest
import reported


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the file that the measurement has written, and what it holds."""
    path = tmp_path_factory.mktemp("results") / "several.json"
    assert measure.main(["several_gpus", "--out", str(path), "--commit", "abc1234", "--small"]) == 0
    return path, json.loads(path.read_text())


@pytest.mark.slow
def test_several_processes_learn_as_one(measured):
    _, found = measured
    assert all(each["largest_difference"] < 1e-5 for each in found["losses"])


@pytest.mark.slow
def test_speed_is_of_each_model_way_and_optimiser(measured):
    _, found = measured
    ways = {(each["model"], each["parallel"], each["optimizer"], each["gpus"]) for each in found["speed"]}
    assert ways == {
        *((model, "none", optimizer, 1) for model in ("test_resnet", "test_vit") for optimizer in ("sgd", "adamw")),
        *((model, "ddp", optimizer, 2) for model in ("test_resnet", "test_vit") for optimizer in ("sgd", "adamw")),
        *(("test_vit", "fsdp", optimizer, 2) for optimizer in ("sgd", "adamw")),
    }


@pytest.mark.slow
def test_gradients_of_fused_losses_on_several_processes_are_those_of_one(measured):
    _, found = measured
    assert [(each["parallel"], each["gpus"]) for each in found["fused"]] == [("none", 1), ("ddp", 2), ("fsdp", 2)]
    assert all(0 < each["gradient_difference"] < measure_several_gpus.GRADIENT for each in found["fused"][1:])


@pytest.mark.slow
def test_a_large_model_learns_in_less_memory_than_it_needs_on_one(measured):
    large = measured[1]["large"]
    assert large["gpu_mib"] < large["needed_mib"] == 16 * large["parameters"] / 2**20
    assert large["losses"][-1] < large["losses"][0]


@pytest.mark.slow
def test_the_tables_are_of_what_was_measured(measured):
    path, found = measured
    text = "\n".join(make(path) for make in (reported.several_gpus, reported.speed, reported.fused_on_several, reported.large_model))
    assert "| test_vit | FSDP2 | adamw | 2×CPU | 4 |" in text
    assert "| FSDP2 | 2×CPU | 16 × 8 × 50 |" in text
    assert f"| test_vit | {found['large']['depth']} | 0.00 |" in text


def test_the_large_model_is_the_smallest_that_one_gpu_cannot_hold():
    given = measure_several_gpus.SMALL
    case = measure_several_gpus.large_case(given)
    needed = [measure_several_gpus.BYTES * measure_several_gpus.parameters(case.model, depth) for depth in (case.depth - 1, case.depth)]
    assert needed[0] <= given.memory < needed[1]


def test_the_table_says_how_long_losses_agree(tmp_path):
    place = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "nccl": "2.27.5", "commit": "abc1234", "date": "2026-11-22"}
    speed = {"model": "resnet50", "optimizer": "sgd", "batch": 256, "step_ms": 101.25, "peak_mib": 20480.4}
    found = {
        **place,
        "gpus": 2,
        "tolerance": 1e-4,
        "disturbance": 2.0**-23,
        "losses": [{"case": "FSDP", "one": [2.0, 2.0, 2.0, 2.0], "several": [2.0, 2.0001, 2.1, 2.0], "disturbed": [2.0, 2.0, 2.0, 1.9999]}],
        "speed": [
            speed | {"parallel": "none", "gpus": 1, "images_per_second": 2500.4, "scaling": 1.0},
            speed | {"parallel": "ddp", "gpus": 2, "images_per_second": 4875.8, "scaling": 0.975},
        ],
    }
    path = tmp_path / "several.json"
    path.write_text(json.dumps(found))
    text = f"{reported.several_gpus(path)}\n{reported.speed(path)}"
    assert text.startswith("Two NVIDIA H200, torch 2.11.0, triton 3.6.0, commit abc1234, 2026-11-22, NCCL 2.27.5")
    assert "; tolerance 0.0001, disturbance 1e-07." in text
    assert "| FSDP | 2 of 4 | 5.0e-05 | 4 of 4 | 5.0e-05 |" in text  # what agrees again after a difference does not count
    assert "| resnet50 | one process | sgd | 1×H200 | 256 | 2,500 |  | 101.2 | 20,480 |" in text
    assert "| resnet50 | DistributedDataParallel | sgd | 2×H200 | 256 | 4,876 | 0.97 | 101.2 | 20,480 |" in text

"""The measurements run small on the CPU, what they compare is equal, and the documentation's tables follow from what they write."""

import json
import os
import subprocess
import sys

import beside_fsdp
import measure
import measure_detection
import measure_several_gpus
import measure_training
import pytest
import reported
import tables
from loss_text import MissingError
from pages import ROOT

PLACE = {"gpu": "2 CPU cores", "torch": "2", "triton": "3", "torchvision": "0", "commit": "abc", "date": "2026-11-25"}


@pytest.fixture
def measured(tmp_path):
    """Run a measurement in a process of its own, into a file with these contents; return the file, what it holds and what was printed."""

    def run(name, *more, before=None, **env):
        path = tmp_path / f"{name}.json"
        if before is not None:
            path.write_text(json.dumps(before))
        command = [sys.executable, measure.__file__, name, "--out", path, "--commit", "abc1234", "--small", *more]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"} | env
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return path, json.loads(path.read_text()), done.stdout

    return run


def table_of(path, found, make):
    """Return the tables of figures that were changed."""
    path.write_text(json.dumps(found))
    return "\n".join(each(path) for each in make)


@pytest.mark.slow
def test_detectors(measured):
    """Ours and torchvision's own are equal in float32, both against torchvision's in float64; so are steps and those of plain torch."""
    path, found, _ = measured("detection", "--parts", "retinanet", "steps", before={"large": {"runs": []}}, TRITON_INTERPRET="1")
    assert set(found) == {"large", "retinanet", "steps"}
    assert {found[part]["commit"] for part in ("retinanet", "steps")} == {"abc1234"}
    heads, steps = (found[part]["runs"] for part in ("retinanet", "steps"))
    assert [each["loss"] for each in heads] == ["lossforge", "torchvision", "loss.implementation=torch"]
    names = [f"{name}_resnet50" for name in ("retinanet", "fcos", "yolo", "detr")]
    assert [(each["model"], each["loss"]) for each in steps] == [(a, b) for a in names for b in ("lossforge", "loss.implementation=torch")]
    for each in [*heads, *steps]:
        assert each["positives"] > 10
        assert each["difference"] < (1e-6 if each in heads else 1e-5)
        assert max(each["gradient_difference"].values()) < 1e-5
        assert each["step_ms"] > each["loss_ms"] > 0
    assert [each["match_ms"] > 0 for each in steps] == [True] * 4 + [False] * 4  # by anchors before the forward, or by what is predicted
    assert not any(each["other_targets"] for each in steps)
    compared = {name for each in steps for name in each["gradient_difference"]}
    assert compared == {"logits", "regression", "centerness", "sides", "earlier_logits", "earlier_regression"}
    figures = {"command": "experiment=digit_scenes_large", "map": 0.9, "map50": 0.9126, "map75": 0.8, "backend": "triton", "loss_ms": 3.061}
    found["large"] = found["retinanet"] | {"runs": [figures | {"step_ms": 48.6, "peak_mib": 1424.0, "seconds": 167.2}]}
    heads[0] |= {"step_ms": 151.04, "loss_ms": 0.987, "peak_mib": 20480.4}
    steps[0] |= {"difference": 2e-5, "images_per_second": 123.4, "peak_mib": 4567.8, "step_ms": 200.0, "loss_ms": 15.0, "match_ms": 5.0}
    text = table_of(path, found, (reported.detection, reported.retinanet, reported.detector_steps))
    assert "| lossforge | 151.0 | 0.99 | 20,480 |" in text
    assert "| `experiment=digit_scenes_large` | 0.900 | 0.913 | 0.800 | 3.06 | 48.6 | 1,424 | 167 | triton |" in text
    assert "| retinanet_resnet50 | lossforge | 123 | 4,568 | 200.0 | 20.00 | 10.0% | 2.0e-05 |" in text
    assert "commit abc1234" in text


@pytest.mark.slow
def test_variants_of_detectors_train_in_a_few_processes(monkeypatch):
    commands = ("model=yolo_tiny loss=mal", "model=detr_tiny loss=mal model.denoising=60")
    monkeypatch.setattr(measure_detection, "VARIANTS", commands)
    found = list(measure_detection.variants(small=True))
    assert [each["command"] for each in found] == [f"experiment=detectors {command}" for command in commands]
    assert all(each["map"] is not None for each in found)


@pytest.mark.slow
def test_classifiers_and_presets(measured):
    path, found, _ = measured("training", TRITON_INTERPRET="1")
    assert {each["commit"] for part in ("runs", "presets", "parity") for each in found[part]} == {"abc1234"}
    assert [each["loss"] for each in found["parity"]] == ["ce", "focal"]
    assert all(each["steps"] == 4 and each["largest_difference"] < 1e-5 for each in found["parity"])
    assert (len(found["runs"]), len(found["presets"])) == (1, 2)
    assert all(min(each["loss_ms"], each["step_ms"]) > 0 and 0 <= each["data_wait_share"] < 1 for each in found["runs"] + found["presets"])
    assert measured("training", before=found)[1] == found, "what the file holds is not run again"
    path.write_text(json.dumps(found | {"gpu": "a GPU that is not here"}))
    assert measure.main(["training", "--out", str(path), "--small"]) == 1
    found["runs"][0] |= {"top1": 98.765, "peak_mib": 2763.4, "loss_ms": 1.234}
    found["presets"][0] |= {"step_ms": 4.56, "images_per_second": 12345.6, "data_wait_share": 0.0321}
    text = table_of(path, found, (reported.training, reported.presets))
    assert f"| `{found['runs'][0]['command']}` | 98.77 % | 1.23 | 2,763 |" in text
    assert "| `experiment=distillation` | 4.6 | 12,346 | 3.2% |" in text
    assert "commit abc1234" in text


@pytest.mark.slow
def test_throughput_beside_timms_parts(measured):
    """On the disk's photos, and on batches that are read once."""
    _, found, _ = measured("throughput", "--parts", "vit_small", before={"resnet50": {"kept": True}})
    assert (found["resnet50"], found["vit_small"]["commit"]) == ({"kept": True}, "abc1234")
    rows = found["vit_small"]["rows"]
    assert [(row["by"], row["data"]) for row in rows] == [(by, data) for by in ("lossforge", "timm") for data in ("disk", "loop")]
    assert all(row["images_per_second"] > 0 for row in rows)


@pytest.mark.slow
def test_a_language_model(measured):
    """300 steps in float32, the fused loss in chunks of 24 of 64 tokens: curves are the same to rounding."""
    path, found, _ = measured("language_model")
    fused = ("", ", gradient=backward", ", logits=float32")
    unfused = ("cross_entropy", "torch.nn.functional.cross_entropy")
    assert [row["loss"] for row in found["rows"]] == [*(f"linear_cross_entropy{each}" for each in fused), *unfused]
    for row in found["rows"]:
        assert len(row["losses"]) == 300
        assert row["losses"][-1] < 0.6 * row["losses"][0]
        assert row["largest_difference"] < 1e-5
    found["rows"][0] |= {"ms": 12.34, "peak_mib": 4567.8, "largest_difference": 1.5e-4, "losses": [10.5, 3.25]}
    text = table_of(path, found, (reported.language_model,))
    assert "commit abc1234" in text
    assert "| 64 × 32 → 320, float32 | `linear_cross_entropy` | 12.3 | 4,568 | 10.5000 → 3.2500 | 1.5e-04 |" in text


@pytest.mark.slow
def test_a_vocabulary_over_four_processes(measured):
    path, found, said = measured("spread_vocabulary")
    failed = {row["contender"] for row in found["rows"] if "failed" in row}  # Liger needs a GPU, Megatron-Core is not installed here
    assert all("liger" in name or "megatron" in name for name in failed)
    assert all(max(row["norm_errors"][1]) < 7e-3 and row["same"] for row in found["rows"] if "failed" not in row)
    ours = {row["form"] for row in found["rows"] if row["contender"] == "lossforge"}
    assert {"from logits", "draft loss lk", "KL from a teacher's top 64", "multi-token prediction, 2 depths"} < ours
    rows = {row["form"]: row for row in found["beside_fsdp"]}
    assert list(rows) == ["one process", "FSDP2 over all", beside_fsdp.GROUPED]
    assert all(row["error"] < 1e-6 and row["step_ms"] > 0 for row in rows.values())
    (line,) = [line for line in reported.spread_vocabulary(path).splitlines() if beside_fsdp.GROUPED in line]
    assert line.startswith(f"| 2 × 32 × 16 × 40 | {beside_fsdp.GROUPED} | 4 | {rows[beside_fsdp.GROUPED]['step_ms']:.1f} |")
    assert line in said


@pytest.mark.slow
def test_contrastive_losses_over_two_processes(measured):
    _, found, _ = measured("spread_contrastive")
    assert all(max(each["errors"]) < 2e-2 and each["ms"] > 0 for forms in found["losses"].values() for each in forms.values())
    assert all(found["losses"][name]["ring"]["same"] for name in ("InfoNCE", "CLIP", "SigLIP"))
    assert [row["form"] for row in found["rows"]] == ["Barlow Twins", "VICReg", "KoLeo", "mean_center", "sinkhorn_center"]
    assert all(max(row["norm_errors"][1]) < 1e-6 and row["same"] for row in found["rows"])


@pytest.mark.slow
def test_trainings_over_two_processes(measured):
    """The losses of all steps are those of the library; under TRL's GRPO they are of the same samples."""
    path, found, said = measured("spread_trainings", "--parts", "Trainer DDP", "Trainer FSDP2", "GRPO DDP", "GRPO FSDP2")
    assert [(row["parallel"], row["contender"]) for row in found["rows"][:4]] == [
        *(("DDP", "transformers"), ("DDP", "lossforge"), ("FSDP2", "transformers"), ("FSDP2", "lossforge"))
    ]
    for stock, ours in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert ours["losses"] == pytest.approx(stock["losses"], rel=2e-3, abs=2e-3)
        assert ours["gradient_norms"] == pytest.approx(stock["gradient_norms"], rel=2e-2)
    assert reported.spread_trainings(path) in said


@pytest.mark.slow
def test_several_processes_learn_as_one(measured):
    path, found, _ = measured("several_gpus", TRITON_INTERPRET="1")
    assert all(each["largest_difference"] < 1e-5 for each in found["losses"])
    models, optimizers = ("test_resnet", "test_vit"), ("sgd", "adamw")
    assert {(each["model"], each["parallel"], each["optimizer"], each["gpus"]) for each in found["speed"]} == {
        *((model, way, optimizer, 1 + (way == "ddp")) for model in models for way in ("none", "ddp") for optimizer in optimizers),
        *(("test_vit", "fsdp", optimizer, 2) for optimizer in optimizers),
    }
    assert [(each["parallel"], each["gpus"]) for each in found["fused"]] == [("none", 1), ("ddp", 2), ("fsdp", 2)]
    assert all(0 < each["gradient_difference"] < measure_several_gpus.GRADIENT for each in found["fused"][1:])
    large = found["large"]
    assert large["gpu_mib"] < large["needed_mib"] == 16 * large["parameters"] / 2**20
    assert large["losses"][-1] < large["losses"][0]
    text = table_of(path, found, (reported.several_gpus, reported.speed, reported.fused_on_several, reported.large_model))
    assert "| test_vit | FSDP2 | adamw | 2×CPU | 4 |" in text
    assert "| FSDP2 | 2×CPU | 16 × 8 × 50 |" in text
    assert f"| test_vit | {large['depth']} | 0.00 |" in text


@pytest.mark.slow
def test_recipe(measured):
    """The page's own script, with both losses; the table needs a peak, which a CPU does not tell."""
    path, found, _ = measured("recipe")
    theirs, ours = found["runs"]
    assert (theirs["contender"], ours["contender"]) == ("transformers", "lossforge")
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert all(each["step_ms_range"][0] <= each["step_ms"] <= each["step_ms_range"][1] for each in found["runs"])
    ours |= {"step_ms": 812.34, "step_ms_range": [810.0, 820.0], "peak_mib": 23456.7, "losses": [12.5, 12.4, 12.3, 12.2, 12.1]}
    assert "| ours | 812.3 | 810.0 to 820.0 | 23,457 | 12.50000 → 12.10000 |" in table_of(path, found, (reported.recipe,))


def test_the_large_model_is_the_smallest_that_one_gpu_cannot_hold():
    given = measure_several_gpus.SMALL
    case = measure_several_gpus.large_case(given)
    needed = [measure_several_gpus.BYTES * measure_several_gpus.parameters(case.model, depth) for depth in (case.depth - 1, case.depth)]
    assert needed[0] <= given.memory < needed[1]


def test_the_table_says_how_long_losses_agree(tmp_path):
    place = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "nccl": "2.27.5", "commit": "abc1234", "date": "2026-11-22"}
    speed = {"model": "resnet50", "optimizer": "sgd", "batch": 256, "step_ms": 101.25, "peak_mib": 20480.4}
    losses = {"case": "FSDP", "one": [2.0, 2.0, 2.0, 2.0], "several": [2.0, 2.0001, 2.1, 2.0], "disturbed": [2.0, 2.0, 2.0, 1.9999]}
    rows = [speed | {"parallel": "none", "gpus": 1, "images_per_second": 2500.4, "scaling": 1.0}]
    rows += [speed | {"parallel": "ddp", "gpus": 2, "images_per_second": 4875.8, "scaling": 0.975}]
    found = place | {"gpus": 2, "tolerance": 1e-4, "disturbance": 2.0**-23, "losses": [losses], "speed": rows}
    text = table_of(tmp_path / "several.json", found, (reported.several_gpus, reported.speed))
    assert text.startswith("Two NVIDIA H200, torch 2.11.0, triton 3.6.0, commit abc1234, 2026-11-22, NCCL 2.27.5")
    assert "; tolerance 0.0001, disturbance 1e-07." in text
    assert "| FSDP | 2 of 4 | 5.0e-05 | 4 of 4 | 5.0e-05 |" in text  # what agrees again after a difference does not count
    assert "| resnet50 | one process | sgd | 1×H200 | 256 | 2,500 |  | 101.2 | 20,480 |" in text
    assert "| resnet50 | DistributedDataParallel | sgd | 2×H200 | 256 | 4,876 | 0.97 | 101.2 | 20,480 |" in text


def test_no_preset_is_left_out():
    known = {f"experiment={path.stem}" for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
    # of a user's folder; trained by measure_detection.py and measure_effects.py; a search for the learning rate
    elsewhere = ("finetune_folder", "digit_scenes_large", "detectors", "few_digits", "image_text", "label_smoothing", "lr_range")
    assert known - set(measure_training.PRESETS) == {f"experiment={name}" for name in elsewhere}


def test_the_table_of_detectors_pairs_seeds(tmp_path):
    reached = {"fcos": [0.40, 0.42, 0.41], "yolo": [0.45, 0.48, 0.46]}
    runs = [
        {"command": f"model={name}_tiny", "seed": seed, "map": value, "map50": 0.6, "map75": 0.5}
        for name, values in reached.items()
        for seed, value in enumerate(values)
    ]
    text = table_of(tmp_path / "detection.json", {"detectors": PLACE | {"runs": runs}}, (reported.detectors,))
    assert "| `model=fcos_tiny` | 3 | 0.410 ± 0.025 | 0.600 | 0.500 | baseline |  |" in text
    assert "| `model=yolo_tiny` | 3 | 0.463 ± 0.038 | 0.600 | 0.500 | +0.053 (+0.039 to +0.068) | 0.004 |" in text


def test_variants_are_paired_with_the_first_of_their_model(tmp_path):
    names = ("fcos_tiny", "yolo_tiny loss=focal", "yolo_tiny loss=bce", "detr_tiny loss=focal", "detr_tiny loss=mal")
    runs = [
        {"command": f"experiment=detectors model={name}", "seed": seed, "map": 0.1 * number + 0.01 * seed, "map50": 0.6, "map75": 0.5}
        for number, name in enumerate(names)
        for seed in range(3)
    ]
    found = {"detectors": PLACE | {"runs": runs[:3]}, "variants": PLACE | {"runs": runs[3:]}}
    lines = table_of(tmp_path / "detection.json", found, (reported.detectors,)).splitlines()
    for name, said in (("yolo_tiny loss=bce", "+0.100"), ("detr_tiny loss=mal", "+0.100"), ("detr_tiny loss=focal", "baseline")):
        assert said in next(line for line in lines if name in line)


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

"""The measurement of integrations runs: each contender is right, a wrong one gets no time, and what is not installed is named."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from unittest import mock

import measure
import measure_integrations
import pytest
import reported
import torch
from measure_integrations import (
    SMALL,
    Detector,
    Spy,
    WrongError,
    curves,
    detr,
    exact_loss,
    expected_of,
    of_trainer,
    prepared_detector,
    prepared_step,
    waits,
)

from lossforge.integrations import transformers as fused

LIBRARIES = {
    "trl": ("trl", "datasets"),
    "trainer": ("liger_kernel",),
    "compiled": ("liger_kernel",),
    "detectors": ("ultralytics",),
    "open_clip": ("open_clip",),
}
CASES = {
    "trl": [f"{kind}, tiny Qwen3" for kind in ("SFT", "DPO", "GRPO")],
    "trainer": ["tiny Qwen3"],
    "compiled": ["tiny Qwen3"],
    "detectors": ["yolov8n", "yolo26n", "DeformableDetr", "RTDetr"],
    "open_clip": ["24 × 16, float32", "24 × 16, bfloat16"],
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of work this small, more cost more
    yield
    torch.set_num_threads(threads)


def measured(path, part, status=0):
    assert measure.main(["integrations", "--out", str(path), "--commit", "abc1234", "--parts", part, "--small"]) == status
    return json.loads(path.read_text())


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.slow] * (part != "trainer")) for part in CASES])
def test_every_part_leaves_its_figures(part, tmp_path):
    """In a process of its own: ultralytics replaces PIL's `Image.open`, and it and TRL change the environment for good."""
    for library in LIBRARIES[part]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    path = tmp_path / "integrations.json"
    path.write_text(json.dumps({"other": {"runs": []}}))
    words = ["integrations", "--out", str(path), "--commit", "abc1234", "--parts", part, "--small"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, measure.__file__, *words], capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert set(found) == {"other", part}
    assert found[part]["commit"] == "abc1234"
    runs = {(run["case"], run["contender"]): run for run in found[part]["runs"]}
    if part == "compiled":  # the interpreter of Liger's kernels is no part of a graph
        assert "failed" in runs.pop(("tiny Qwen3", "liger")) or torch.cuda.is_available()
    assert list(dict.fromkeys(case for case, _ in runs)) == CASES[part]
    for case in CASES[part]:
        contenders = [contender for of, contender in runs if of == case]
        own, ours = runs[case, contenders[0]], runs[case, contenders[-1]]
        assert contenders[-1] == "lossforge"
        assert own["gradient_error"] != ours["gradient_error"], f"{case} ran the library's own loss twice"
        for contender in contenders:
            assert runs[case, contender]["step_ms"] > 0
    if part == "trl":
        # TRL rounds logits, so that its log-probabilities are off by 0.03 and the losses of DPO by 1e-3 from ours, which are exact
        assert all(run["same_tokens"] and run["loss_difference"] < 2e-3 for run in runs.values())
        assert max(run["logps_error"] for (_, contender), run in runs.items() if contender == "lossforge") < 1e-5
    if part == "detectors":
        assert all(run["criterion_ms"] > 0 for run in runs.values())
        assert max(run["value_error"] for run in runs.values()) < 1e-4  # as in the tests of ultralytics.patch()
    assert reported.integrations(path) in done.stdout
    assert all(f"| {case} | {contender} | " in done.stdout for case, contender in runs)


def test_a_wrong_contender_has_no_time(tmp_path, monkeypatch):
    pytest.importorskip("open_clip")
    own = measure_integrations.ours

    def wrong(module):
        from open_clip.loss import ClipLoss

        with own(module):
            forward = ClipLoss.forward
        return mock.patch.object(ClipLoss, "forward", lambda *given: 1.02 * forward(*given))

    monkeypatch.setattr(measure_integrations, "ours", wrong)
    path = tmp_path / "integrations.json"
    theirs, ours = measured(path, "open_clip", status=1)["open_clip"]["runs"][:2]
    assert theirs["step_ms"] > 0
    assert ours["failed"] == "WrongError: value_error is 2.00e-02, above 1e-03"
    assert "step_ms" not in ours
    assert "Without figures: lossforge (24 × 16, float32): WrongError: value_error is 2.00e-02" in reported.integrations(path)


def test_a_wrong_loss_of_a_model_has_no_time():
    pytest.importorskip("transformers")
    exact = exact_loss(*of_trainer("tiny Qwen3", SMALL, CPU))
    with pytest.raises(WrongError, match="value_error is"):
        prepared_step("tiny Qwen3", partial(fused.fuse, z_loss=0.1), exact, contextlib.ExitStack(), SMALL, CPU)


def test_the_first_losses_are_those_of_the_stock_loss():
    pytest.importorskip("transformers")
    rows = {(row["case"], row["contender"]): row.get("losses") for row in curves(SMALL, CPU)}
    for seed in range(SMALL.seeds):
        case = f"tiny Qwen3, seed {seed}"
        assert len(rows[case, "transformers"]) == SMALL.updates
        assert rows[case, "lossforge"] == pytest.approx(rows[case, "transformers"], rel=1e-3)
    assert rows["tiny Qwen3, seed 0", "lossforge"] != pytest.approx(rows["tiny Qwen3, seed 1", "lossforge"], rel=1e-3)


def test_a_wrong_criterion_has_no_time():
    pytest.importorskip("transformers")
    detector = Detector("RTDetr", "transformers", "transformers_detection", partial(detr, "RTDetr"))
    expected = expected_of(detector, SMALL, CPU)
    own = mock.patch.dict({}), mock.patch("transformers.loss.loss_rt_detr.RTDetrLoss.loss_boxes", return_value={})
    assert prepared_detector(detector, lambda: own[0], expected, SMALL, CPU).errors["gradient_error"] == 0
    with pytest.raises(WrongError, match="value_error is"):
        prepared_detector(detector, lambda: own[1], expected, SMALL, CPU)


@pytest.mark.parametrize(("off", "scale", "message"), [(0.0, 1.0, ""), (0.5, 1.0, "logps_error"), (0.0, 1.1, "gradient_error")])
def test_wrong_log_probabilities_are_noticed(off, scale, message):
    """Or their gradients alone, at a temperature."""

    class Own:
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, *more):
            logps = (hidden @ weight.T / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
            return logps * scale + (1 - scale) * logps.detach() + off, None

    spy, draw = Spy(Own), torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw) for n in (20, 30))
    spy.apply(hidden.requires_grad_(), weight, None, torch.randint(30, (20,), generator=draw), 0.7)
    if message:
        with pytest.raises(WrongError, match=message):
            spy.errors()
    else:
        assert max(spy.errors()[0].values()) < 1e-5
        with pytest.raises(WrongError, match="did not call"):
            spy.errors()


@pytest.mark.parametrize(("part", "library"), [("trl", "trl"), ("trainer", "liger_kernel"), ("open_clip", "open_clip")])
def test_a_library_that_is_not_installed_is_named(part, library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / "integrations.json"
    pytest.importorskip("transformers")
    runs = measured(path, part)[part]["runs"]
    assert next(run["left_out"] for run in runs if "left_out" in run) == f"{library} is not installed"
    assert all("step_ms" in run or "left_out" in run for run in runs)
    assert f"{library} is not installed" in reported.integrations(path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_waits_are_counted():
    x = torch.ones(8, device="cuda")
    assert waits(lambda: x.sum()) == 0
    assert waits(lambda: (x.sum().item(), x.nonzero())) >= 2

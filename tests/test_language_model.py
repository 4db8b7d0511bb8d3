"""A language model under the fused loss follows the unfused one, and the documentation's table follows from what was measured."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import reported

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Trained without Triton's interpreter, which takes a second a step."""
    path = tmp_path_factory.mktemp("results") / "language-model.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "measurements" / "measure.py", "language_model", "--out", path, "--commit", "abc1234", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env | {"CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
def test_curves_are_the_same_to_rounding(measured):
    """300 steps in float32, the fused loss in chunks of 24 of 64 tokens."""
    found = json.loads(measured.read_text())
    fused = ("", ", gradient=backward", ", logits=float32")
    unfused = ("cross_entropy", "torch.nn.functional.cross_entropy")
    assert [row["loss"] for row in found["rows"]] == [*(f"linear_cross_entropy{each}" for each in fused), *unfused]
    for row in found["rows"]:
        assert len(row["losses"]) == 300
        assert row["losses"][-1] < 0.6 * row["losses"][0]
        assert row["largest_difference"] < 1e-5


@pytest.mark.slow
def test_the_table_holds_the_figures(measured):
    found = json.loads(measured.read_text())
    found["rows"][0] |= {"ms": 12.34, "peak_mib": 4567.8, "largest_difference": 1.5e-4, "losses": [10.5, 3.25]}
    other = measured.with_name("other.json")
    other.write_text(json.dumps(found))
    assert "commit abc1234" in reported.language_model(other)
    row = "| 64 × 32 → 320, float32 | `linear_cross_entropy` | 12.3 | 4,568 | 10.5000 → 3.2500 | 1.5e-04 |"
    assert row in reported.language_model(other)

"""The measurements of losses spread over processes run on the CPU, where gradients are one process's."""

import json

import beside_fsdp
import measure
import pytest
import reported


def measured(what, path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert measure.main([what, "--small", "--out", str(path), "--commit", "abc1234"]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_vocabulary_over_four_processes(tmp_path, monkeypatch, capfd):
    path = tmp_path / "spread.json"
    found = measured("spread_vocabulary", path, monkeypatch)
    assert all(max(row["norm_errors"][1]) < 5e-3 and row["same"] for row in found["rows"])
    rows = {row["form"]: row for row in found["beside_fsdp"]}
    assert list(rows) == ["one process", "FSDP2 over all", beside_fsdp.GROUPED]
    for row in rows.values():
        assert row["error"] < 1e-6
        assert row["step_ms"] > 0
    (line,) = [line for line in reported.spread_vocabulary(path).splitlines() if beside_fsdp.GROUPED in line]
    assert line.startswith(f"| 2 × 32 × 16 × 40 | {beside_fsdp.GROUPED} | 4 | {rows[beside_fsdp.GROUPED]['step_ms']:.1f} |")
    assert line in capfd.readouterr().out


@pytest.mark.slow
def test_contrastive_losses_over_two_processes(tmp_path, monkeypatch):
    found = measured("spread_contrastive", tmp_path / "spread.json", monkeypatch)
    for forms in found["losses"].values():
        for each in forms.values():
            assert max(each["errors"]) < 2e-2
            assert each["ms"] > 0
    assert all(found["losses"][name]["ring"]["same"] for name in ("InfoNCE", "CLIP", "SigLIP"))

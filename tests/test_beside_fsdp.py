"""The measurement of a vocabulary beside FSDP2 runs on two by two processes of the CPU, where its gradients are one process's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import beside_fsdp
import pytest
import reported


@pytest.mark.slow
def test_gradients_of_two_by_two_processes_are_those_of_one(tmp_path):
    script = Path(beside_fsdp.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["form"]: row for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))}
    assert list(rows) == ["one process", "FSDP2 over all", beside_fsdp.GROUPED]
    for row in rows.values():
        assert row["error"] < 1e-6
        assert row["step_ms"] > 0
    path = tmp_path / "spread.json"
    source = {"gpu": "2 CPU cores", "torch": "2", "triton": "3", "commit": "abc1234", "date": "2026-01-01", "gpus": 4}
    path.write_text(json.dumps({**source, "rows": [], "beside_fsdp": list(rows.values())}))
    (line,) = [line for line in reported.spread_vocabulary(path).splitlines() if beside_fsdp.GROUPED in line]
    assert line.startswith(f"| 2 × 32 × 16 × 40 | {beside_fsdp.GROUPED} | 4 | {rows[beside_fsdp.GROUPED]['step_ms']:.1f} |")

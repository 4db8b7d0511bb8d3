"""Cross entropy over a tensor-parallel group: ours, Megatron's, and the whole vocabulary on one process."""

import pytest
from processes import run

pytest.importorskip("megatron.core", reason="needs pip install --no-deps megatron-core")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(processes, tmp_path):
    printed = run("megatron_runs.py", processes=processes, folder=tmp_path)
    assert printed.count("equal to the whole vocabulary") == processes

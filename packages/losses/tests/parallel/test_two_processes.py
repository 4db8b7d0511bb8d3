"""A few cases of losses over processes, in the default tier. test_parallel and test_contrastive have all cases."""

import multiprocessing

import pytest
import torch
from parallel import few_cases

SECONDS = 120
BEFOREHAND = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.nn.functional",
    "lossforge.losses",
    "pytest",
)


@pytest.fixture(scope="module")
def context():
    """Processes are forks of one that has imported the libraries. pytest's own has used autograd, and then its forks must not."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*BEFOREHAND])
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_parallel and test_contrastive run all cases on GPUs")
@pytest.mark.parametrize("check", few_cases.CHECKS)
def test_several_processes_give_what_one_gives(check, context, tmp_path):
    world = 3 if check == "summed_gradient" else 2
    processes = [context.Process(target=few_cases.in_process, args=(check, rank, world, tmp_path), daemon=True) for rank in range(world)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(SECONDS)
    alive = [rank for rank, each in enumerate(processes) if each.is_alive()]
    for each in processes:
        each.kill()
    errors = [path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("error_*"))]
    assert not errors, "\n".join(errors)
    assert not alive
    assert [each.exitcode for each in processes] == [0] * world

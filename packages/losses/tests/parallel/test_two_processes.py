"""A few cases of losses over processes, in the default tier. test_parallel and test_contrastive have all cases."""

import multiprocessing
from multiprocessing import connection

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


class Processes:
    """Processes of one group, which run one check after another."""

    def __init__(self, world, folder):
        # forks of one that has imported the libraries: pytest's own has used autograd, and then its forks must not
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*BEFOREHAND])
        self.pipes = [context.Pipe() for _ in range(world)]
        self.processes = [
            context.Process(target=few_cases.in_process, args=(pipe, rank, world, folder), daemon=True)
            for rank, (_, pipe) in enumerate(self.pipes)
        ]
        for each in self.processes:
            each.start()

    def run(self, check):
        """Return what went wrong in each process. Beside one that has failed, another may wait for it."""
        for pipe, _ in self.pipes:
            pipe.send(check)
        errors, seconds = [], SECONDS
        while len(errors) < len(self.pipes):
            ready = connection.wait([pipe for pipe, _ in self.pipes], seconds)
            errors += [pipe.recv() for pipe in ready] if ready else ["no answer"]
            seconds = 2 if any(errors) else SECONDS
        return errors

    def kill(self):
        for each in self.processes:
            each.kill()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Return the processes of a group of some size. Those that failed are started anew."""
    started = {}

    def of_size(world):
        if world not in started:
            started[world] = Processes(world, tmp_path_factory.mktemp("group"))
        return started[world]

    yield of_size, started
    for each in started.values():
        each.kill()


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_parallel and test_contrastive run all cases on GPUs")
@pytest.mark.parametrize("check", few_cases.CHECKS)
def test_several_processes_give_what_one_gives(check, groups):
    world = 3 if check in ("summed_gradient", "batches") else 2
    of_size, started = groups
    errors = [error for error in of_size(world).run(check) if error]
    if errors:
        started.pop(world).kill()
    assert not errors, "\n".join(errors)

"""One process of test_two_processes, on the CPU through gloo, or on two GPUs through NCCL.

A model that ends in a loss, in a fused one, in parallel and sharded.
"""

import gc
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("TRITON_INTERPRET", str(int(torch.cuda.device_count() < 2)))

from lossforge.losses import FusedLinear, backend, cross_entropy, linear_cross_entropy

GPUS = torch.cuda.device_count() > 1


class Model(nn.Module):
    """Whose forward gives the loss, so that its weights are gathered when the loss takes them."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if not self.fused:
            return cross_entropy(self.head(self.body(x).relu()), target)
        return linear_cross_entropy(self.body(x).relu(), self.head.weight, target, self.head.bias, chunk=2)


def refused(call, *args) -> bool:
    try:
        call(*args)
    except TypeError as why:
        return "weight must be a whole tensor, got a DTensor (5, 8)" in str(why)
    return False


def main(of: str) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    x, target, model = torch.randn(8, 6), torch.randint(0, 5, (8,)), Model(of != "unfused")
    F.cross_entropy(model.head(model.body(x).relu()), target).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert backend(x) == ("triton" if GPUS else "triton-interpreted")
    mine = slice(rank * 4, rank * 4 + 4)
    if of == "fully_shard":
        mesh = init_device_mesh("cuda" if GPUS else "cpu", (2,))
        parallel = fully_shard(model, mesh=mesh)
        assert refused(linear_cross_entropy, torch.randn(4, 8), model.head.weight, target[mine])
        assert refused(FusedLinear(cross_entropy, model.head), torch.randn(4, 8), target[mine])
    else:
        parallel = DistributedDataParallel(model)
    parallel(x[mine], target[mine]).backward()
    for name, p in model.named_parameters():
        gradient = p.grad.full_tensor() if of == "fully_shard" else p.grad
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    print(f"gradients agree: {of}")


if GPUS:
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl" if GPUS else "gloo")
for of in sys.argv[1:]:
    main(of)
    torch.distributed.barrier()
gc.collect()  # the model's groups end before the process does: else gloo's threads abort it now and then
torch.distributed.destroy_process_group()

"""One process of test_distributed_data_parallel, on the CPU through gloo, or on two GPUs through NCCL."""

import os

import torch
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("TRITON_INTERPRET", str(int(torch.cuda.device_count() < 2)))

from lossforge.losses import backend, cross_entropy

GPUS = torch.cuda.device_count() > 1
rank = int(os.environ["LOCAL_RANK"])
if GPUS:
    torch.set_default_device(f"cuda:{rank}")
    torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl" if GPUS else "gloo")
torch.manual_seed(0)
x, target = torch.randn(8, 6), torch.randint(0, 5, (8,))
model = torch.nn.Linear(6, 5)
torch.nn.functional.cross_entropy(model(x), target).backward()
expected = model.weight.grad.clone()
model.zero_grad()
parallel = DistributedDataParallel(model)
mine = slice(rank * 4, rank * 4 + 4)
cross_entropy(parallel(x[mine]), target[mine]).backward()
assert backend(x) == ("triton" if GPUS else "triton-interpreted")
torch.testing.assert_close(model.weight.grad, expected, rtol=1e-5, atol=1e-6)
print("gradients agree")
torch.distributed.destroy_process_group()

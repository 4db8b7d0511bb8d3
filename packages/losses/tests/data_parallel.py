"""One process of test_distributed_data_parallel, on CPU through gloo."""

import os

import torch
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("TRITON_INTERPRET", "1")

from lossforge.losses import backend, cross_entropy

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
x, target = torch.randn(8, 6), torch.randint(0, 5, (8,))
model = torch.nn.Linear(6, 5)
torch.nn.functional.cross_entropy(model(x), target).backward()
expected = model.weight.grad.clone()
model.zero_grad()
parallel = DistributedDataParallel(model)
mine = slice(rank * 4, rank * 4 + 4)
cross_entropy(parallel(x[mine]), target[mine]).backward()
assert backend(x) == "triton-interpreted"
torch.testing.assert_close(model.weight.grad, expected, rtol=1e-5, atol=1e-6)
print("gradients agree")
torch.distributed.destroy_process_group()

"""Measure a model whose last layer's classes lie over one dimension of a mesh, and whose parameters FSDP2 spreads over the other.

    torchrun --standalone --nproc-per-node 4 measurements/beside_fsdp.py

Two by two processes: step time under AdamW, peak memory, and gradients. Beside it: one process with the whole batch, and FSDP2 over all
processes with the whole last layer. Errors are those of gradients, the largest of all parameters, relative by norm, against one process
in the next wider dtype. Without GPUs a small model of float32 is measured.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lossforge.losses import linear_cross_entropy

WARM, STEPS = 3, 10
GROUPED = "vocabulary over half of the processes, FSDP2 over the others"


@dataclass(frozen=True)
class Sizes:
    """tokens: of all processes. wide: the dtype of the gradients that are taken for right."""

    blocks: int
    tokens: int
    features: int
    classes: int
    dtype: torch.dtype
    wide: torch.dtype


GPU = Sizes(4, 8192, 4096, 128256, torch.bfloat16, torch.float32)
CPU = Sizes(2, 32, 16, 40, torch.float32, torch.float64)


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


class Model(nn.Module):
    """Its forward gives the loss, so that FSDP2 has gathered the head's weight when the loss takes it."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(sizes.features) for _ in range(sizes.blocks)], nn.LayerNorm(sizes.features))
        self.head, self.classes = nn.Linear(sizes.features, sizes.classes, bias=False), sizes.classes
        self.to(dtype)

    def forward(self, x: Tensor, target: Tensor, group: Any) -> Tensor:
        spread = {} if group is None else {"group": group, "classes": self.classes}
        found: Tensor = linear_cross_entropy(self.blocks(x), self.head.weight, target, **spread)
        return found


def data(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(sizes.tokens, sizes.features, device=device, generator=generator).to(sizes.dtype)
    return x, torch.randint(sizes.classes, (sizes.tokens,), device=device, generator=generator)


def model_of(sizes: Sizes, device: torch.device, dtype: torch.dtype | None = None) -> Model:
    """Return the same model on each process. dtype: None for that of the sizes."""
    torch.manual_seed(0)
    with device:
        model = Model(sizes, sizes.dtype)
    return model if dtype is None else model.to(dtype)


def spread(model: Model, data_mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    fully_shard(model, mesh=data_mesh, mp_policy=policy)


def gradients(model: Model) -> Iterator[Tensor]:
    """Yield the gradients of all parameters, whole."""
    for each in model.parameters():
        assert each.grad is not None
        yield each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad


def error(found: Iterator[Tensor], right: list[Tensor]) -> float:
    """Return the largest relative difference by norm of a parameter's gradient. right: on the host."""
    pairs = ((a.double(), b.to(a.device).double()) for a, b in zip(found, right, strict=True))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def steps(model: Model, optimizer: torch.optim.Optimizer, given: tuple[Any, ...], count: int) -> float:
    """Train for some steps, and return milliseconds a step of the slowest process."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
    loss.item()
    return largest((time.perf_counter() - began) / count * 1e3, given[0].device)


def largest(value: float, device: torch.device) -> float:
    found = torch.tensor(value, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def timed(model: Model, given: tuple[Any, ...]) -> tuple[float, float]:
    """Return milliseconds a step, and the largest peak memory in MiB, 0 on the CPU."""
    device = given[0].device
    body, head = list(model.blocks.parameters()), list(model.head.parameters())  # an update's tensors are of one mesh
    optimizer = torch.optim.AdamW([{"params": body}, {"params": head}], lr=1e-4, fused=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps(model, optimizer, given, WARM)
    ms = steps(model, optimizer, given, STEPS)
    return ms, largest(torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0, device)


def measure() -> list[dict[str, Any]]:
    """Return the figures of each form."""
    gpu = torch.cuda.is_available()
    sizes, device = (GPU, torch.device("cuda", torch.cuda.current_device())) if gpu else (CPU, torch.device("cpu"))
    x, target = data(sizes, device)
    exact = model_of(sizes, device, sizes.wide)
    exact(x.to(sizes.wide), target, None).backward()
    right = [each.cpu() for each in gradients(exact)]
    del exact
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("data", "vocabulary"))
    forms: dict[str, tuple[DeviceMesh | None, Any]] = {
        "one process": (None, None),
        "FSDP2 over all": (init_device_mesh(device.type, (world,)), None),
        GROUPED: (mesh["data"], mesh["vocabulary"]),
    }
    found = []
    for name, (data_mesh, group) in forms.items():
        model, given = model_of(sizes, device), (x, target, None)
        if data_mesh is not None:
            if group is not None:
                parallelize_module(model.head, group, ColwiseParallel())
            spread(model, data_mesh)
            place, places = data_mesh.get_local_rank(), data_mesh.size()
            given = (x.chunk(places)[place].clone(), target.chunk(places)[place].clone(), group)
        model(*given).backward()
        differences = error(gradients(model), right)
        ms, mib = timed(model, given)
        row = {"form": name, "processes": world if data_mesh else 1, "blocks": sizes.blocks, "tokens": sizes.tokens}
        row |= {"features": sizes.features, "classes": sizes.classes, "step_ms": ms, "peak_mib": mib, "error": largest(differences, device)}
        found.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row, ensure_ascii=False), flush=True)
        del model
    return found


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    measure()
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a mesh holds the process group, a thread of which may abort the process while Python ends

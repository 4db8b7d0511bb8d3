"""Measure a model whose last layer's classes lie over one dimension of a mesh, and whose parameters FSDP2 spreads over the other.

Two by two processes: step time under AdamW, peak memory, and gradients. Beside it: one process with the whole batch, and FSDP2 over all
processes with the whole last layer. Errors are those of gradients, the largest of all parameters, relative by norm, against one process
in the next wider dtype. On the CPU a small model of float32 is measured.
"""

import json
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measuring import free_memory, largest, peak_mib, relative
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lossforge.losses import linear_cross_entropy

WARM, STEPS = 3, 10
GROUPED = "vocabulary over half of the processes, FSDP2 over the others"


class Sizes(NamedTuple):
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
        return x + self.layers(x)


class EndsInLoss(nn.Module):
    """Its forward gives the loss, so that FSDP2 has gathered the head's weight when the loss takes it."""

    def __init__(self, blocks: int, features: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(features) for _ in range(blocks)], nn.LayerNorm(features))
        self.head, self.classes = nn.Linear(features, classes, bias=False), classes

    def forward(self, x: Tensor, target: Tensor, group: Any = None) -> Tensor:
        spread = {} if group is None else {"group": group, "classes": self.classes}
        return linear_cross_entropy(self.blocks(x), self.head.weight, target, **spread)


def gradients(model: nn.Module, *given: Any) -> list[Tensor]:
    """Return the gradients of all parameters, whole where FSDP has them in parts."""
    model(*given).backward()
    found: list[Any] = [each.grad for each in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, given: tuple[Any, ...], count: int) -> float:
    """Train for some steps, and return milliseconds a step."""
    began = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
    loss.item()
    return (time.perf_counter() - began) / count * 1e3


def model_of(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> EndsInLoss:
    """Return the same model on each process."""
    torch.manual_seed(0)
    with device:
        return EndsInLoss(sizes.blocks, sizes.features, sizes.classes).to(sizes.dtype).to(dtype)


def spread(model: EndsInLoss, data_mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh, mp_policy=policy)
    fully_shard(model, mesh=data_mesh, mp_policy=policy)


def timed(model: EndsInLoss, given: tuple[Any, ...]) -> dict[str, float]:
    """Return milliseconds a step of the slowest process, and the largest peak memory in MiB, 0 on the CPU."""
    body, head = list(model.blocks.parameters()), list(model.head.parameters())  # an update's tensors are of one mesh
    optimizer = torch.optim.AdamW([{"params": body}, {"params": head}], lr=1e-4, fused=True)
    free_memory()
    train_steps(model, optimizer, given, WARM)
    dist.barrier()
    return {"step_ms": largest(train_steps(model, optimizer, given, STEPS)), "peak_mib": largest(peak_mib() or 0.0)}


def measured(device: torch.device) -> list[dict[str, Any]]:
    """Return the figures of each form."""
    sizes, world = CPU if device.type == "cpu" else GPU, dist.get_world_size()
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(sizes.tokens, sizes.features, device=device, generator=generator).to(sizes.dtype)
    target = torch.randint(sizes.classes, (sizes.tokens,), device=device, generator=generator)
    right = [each.cpu() for each in gradients(model_of(sizes, device, sizes.wide), x.to(sizes.wide), target)]
    mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("data", "vocabulary"))
    forms: dict[str, tuple[DeviceMesh | None, Any]] = {
        "one process": (None, None),
        "FSDP2 over all": (init_device_mesh(device.type, (world,)), None),
        GROUPED: (mesh["data"], mesh["vocabulary"]),
    }
    found = []
    for name, (data_mesh, group) in forms.items():
        model, given = model_of(sizes, device, sizes.dtype), (x, target, None)
        if data_mesh is not None:
            if group is not None:
                parallelize_module(model.head, group, ColwiseParallel())
            spread(model, data_mesh)
            place, places = data_mesh.get_local_rank(), data_mesh.size()
            given = (x.chunk(places)[place].clone(), target.chunk(places)[place].clone(), group)
        off = max(relative(each, of.to(each.device)) for each, of in zip(gradients(model, *given), right, strict=True))
        row = {"form": name, "processes": world if data_mesh else 1, "blocks": sizes.blocks, "tokens": sizes.tokens}
        row |= {"features": sizes.features, "classes": sizes.classes, **timed(model, given), "error": largest(off)}
        found.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row, ensure_ascii=False), flush=True)
        del model
    return found

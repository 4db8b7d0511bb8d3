"""Which classes a process of a group has, and what processes exchange."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lossforge.losses.base import checks
from lossforge.losses.engine.parallel.exchange import Exchange, sum_into

NO_CLASS = -100
"""In place of a class that another process has. An ignore_index may be the index of one of this process's classes."""


class Shards(NamedTuple):
    """Classes spread over a group: process r has those from r · size on.

    Attributes:
        group: the process group.
        rank: of this process in the group.
        world: processes of the group.
        size: classes of each process but the last ones, padding included.
        classes: all classes, without padding.
        local: classes of this process, padding included.
        sums_input: whether the gradient of a layer's input is the sum over the processes.
    """

    group: Any
    rank: int
    world: int
    size: int
    classes: int
    local: int
    sums_input: bool = False

    @property
    def first(self) -> int:
        return self.rank * self.size

    @property
    def own(self) -> int:
        """The classes of this process, without padding."""
        return min(max(self.classes - self.first, 0), self.local)

    @property
    def all_own(self) -> bool:
        """Whether every process has a class that is not padding."""
        return (self.world - 1) * self.size < self.classes

    @property
    def summing(self) -> Callable[[Tensor, Tensor], Exchange] | None:
        """What starts to sum the gradient of a layer's input over the processes; None where each process keeps its own part."""
        return functools.partial(sum_into, group=self.group) if self.sums_input else None

    def trimmed(self, t: Tensor, dim: int) -> Tensor:
        """Return the part of t without padding, or one class of 0 where nothing else is left: kernels take at least one."""
        if t.shape[dim] != self.local:
            return t
        if not self.own:
            return F.pad(t.narrow(dim, 0, 0), (*(0, 0) * (t.ndim - 1 - dim % t.ndim), 0, 1))
        return t.narrow(dim, 0, self.own) if self.own < self.local else t

    def mine(self, index: Tensor, ignored: int) -> Tensor:
        """Return class indices as this process counts them, NO_CLASS where they are ignored or another process has the class."""
        if not self.own:
            return torch.full_like(index, NO_CLASS)
        own = index - self.first
        here = own == own.clamp(0, self.own - 1)
        if 0 <= ignored - self.first < self.own:
            here &= index != ignored
        return torch.where(here, own, NO_CLASS)

    def gathered(self, rows: list[Tensor], each: int = 0) -> Tensor:
        """Return what each process has of the same kind, (world, kinds, …), differentiable in this process's part.

        each: rows that are exchanged at a time; 0: all. Processes that exchange with each other give the same number.
        """
        found: Tensor = _Gathered.apply(torch.stack(rows), self.group, self.rank, self.world, each)
        return found


class _Gathered(torch.autograd.Function):
    """Gather a tensor of each process. Every process has the whole loss, so that the gradient of its own part is all that it needs."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, rank: int, world: int, each: int) -> Tensor:
        ctx.rank = rank
        parts = [all_gathered(part.contiguous(), group, world) for part in (own.split(each, 1) if each else (own,))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.rank], None, None, None, None


def all_gathered(own: Tensor, group: Any, world: int) -> Tensor:
    """Return a contiguous tensor of each process, (world, …)."""
    found = own.new_empty((world * own.shape[0], *own.shape[1:]))
    dist.all_gather_into_tensor(found, own, group=group)
    return found.view(world, *own.shape)


class SummedGradient(torch.autograd.Function):
    """Return a tensor that every process has; its gradient is the sum of theirs. No other computation runs beside the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total = grads[0].to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.to(grads[0].dtype), None


def shards_of(group: Any, classes: int | None, t: Tensor, dim: int, name: str) -> tuple[Shards, Tensor]:
    """Return how the classes of a tensor are spread, and this process's part.

    Args:
        group: a process group, a DeviceMesh of one dimension, or Shards, which are returned.
        t: with classes in dimension `dim`: this process's part, or a DTensor.
        name: of t, in messages.
    """
    if isinstance(group, Shards):
        return group, t
    group, rank, world = membership(group)
    whole = None
    if is_dtensor(t):
        whole, t = t.shape[dim], local_part(t, group, dim % t.ndim, name)
    local = t.shape[dim]
    if classes is not None:
        classes = checks.whole_number("classes", classes)
        if classes < 1 or (whole is not None and classes > whole):
            most = "" if whole is None else f" and at most those of {name}, {whole}"
            raise ValueError(f"classes must be at least 1{most}, got {classes}")
    if whole is not None:
        return Shards(group, rank, world, -(-whole // world), whole if classes is None else classes, local), t
    if classes is None:
        raise ValueError(
            f"group needs classes, the number of all classes, because {name} of {local} may be a part of them or all: "
            f"classes={world * local} if each of {world} processes has another {local}; where each has all, leave group out"
        )
    size = -(-classes // world)
    if local >= size:
        size = local
    elif rank * size + local != min(classes, (rank + 1) * size) and not (local == 0 and rank * size >= classes):
        needed = f"{size} of {classes} classes, or the rest in the last process, or equally many with padding in all"
        raise ValueError(f"{name} must have {needed}, got {local} in process {rank} of {world}")
    return Shards(group, rank, world, size, classes, local), t


def is_dtensor(t: object) -> bool:
    """Return whether a tensor is a DTensor, without an import of it, which takes long."""
    return type(t).__name__ == "DTensor" or (isinstance(t, torch.nn.Parameter) and type(t.data).__name__ == "DTensor")


def membership(group: Any) -> tuple[Any, int, int]:
    """Return the process group that an argument `group` means, this process's rank in it, and its number of processes."""
    group = _process_group(group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group must have this process as a member, got one without it")
    return group, rank, world


def _process_group(group: Any) -> Any:
    if isinstance(group, dist.ProcessGroup):
        return group
    if type(group).__name__ == "DeviceMesh":
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ValueError(f"group must be a DeviceMesh of one dimension, such as mesh[name], got {group.ndim} dimensions, {names}")
        return group.get_group()
    raise TypeError(f"group must be a torch.distributed.ProcessGroup or a DeviceMesh of one dimension, got {type(group).__name__}")


def local_part(t: Any, group: Any, dim: int, name: str) -> Tensor:
    """Return this process's part of a DTensor whose classes are spread over the group."""
    placements = tuple(t.placements)
    if len(placements) != 1 or not placements[0].is_shard(dim):
        raise ValueError(f"{name} must be placed as (Shard(dim={dim}),), its classes over one mesh dimension, got {placements}")
    if t.device_mesh.get_group() is not group:
        raise ValueError(f"{name} must be spread over the processes of group: give group={name}.device_mesh")
    part: Tensor = t.to_local()
    return part


def local_layer(
    layer: tuple[Tensor, Tensor, Tensor | None], options: Any
) -> tuple[tuple[Tensor, Tensor, Tensor | None], dict[str, Any], dict[str, Any]]:
    """Return a layer (input, weight, bias) as this process has it, how its classes are spread, and the other options.

    options: with group, classes and sum_input_gradient, which may be absent.
    """
    others = {name: v for name, v in options.items() if name not in ("group", "classes", "sum_input_gradient")}
    group, classes = options.get("group"), options.get("classes")
    sums_input = checks.flag("sum_input_gradient", options.get("sum_input_gradient", True))
    if group is None:
        without_group(classes)
        if not sums_input:
            raise ValueError("sum_input_gradient=False needs group, over whose processes the input's gradient would be summed")
        return layer, {}, others
    input, weight, bias = layer
    checks.floating("input", input)
    checks.floating("weight", weight)
    shards, weight = shards_of(group, classes, weight, 0, "weight")
    weight = shards.trimmed(weight, 0)
    if bias is not None:
        checks.floating("bias", bias)
        bias = shards.trimmed(local_part(bias, shards.group, 0, "bias") if is_dtensor(bias) else bias, 0)
    sums_input = sums_input or is_dtensor(input)
    if is_dtensor(input):
        input = _gathered_input(input, shards.group)
    return (input, weight, bias), {"group": Shards(*shards[:6], sums_input and shards.world > 1)}, others


def _gathered_input(input: Any, group: Any) -> Tensor:
    """Return all rows of a DTensor. Their gradient, which the loss sums over the processes, is spread as the input is."""
    from torch.distributed.tensor import Replicate

    if input.device_mesh.ndim != 1 or input.device_mesh.get_group() is not group:
        raise ValueError(f"input must lie on the processes of group, got a DTensor on {input.device_mesh}")
    found: Tensor = input.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
    return found


def without_group(classes: int | None) -> None:
    """Refuse a number of classes that says nothing."""
    if classes is not None:
        raise ValueError(f"classes needs group, over whose processes the classes are spread, got classes={classes!r} alone")

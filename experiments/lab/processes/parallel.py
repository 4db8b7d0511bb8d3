"""A model over several ranks: every rank holds all of it (DistributedDataParallel), or a part of each tensor (FSDP)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from lab.base.errors import UserError
from lab.config.schema import TrainerConfig
from lab.processes import distributed


class Parallel:
    """The model of a trainer over all ranks; with one rank it is the model itself.

    `model` is the model itself; `forward` is the module that training batches pass through. Gradients are averaged over the ranks during
    backward; `scaled` turns the mean into the sum over ranks.
    """

    def __init__(self, model: nn.Module, settings: TrainerConfig, device: torch.device) -> None:
        self.ranks = distributed.ranks()
        self.sharded = settings.parallel == "fsdp" and self.ranks > 1
        check(settings, device, self.ranks)
        if settings.sync_batchnorm and self.ranks > 1:
            from timm.layers import convert_sync_batchnorm

            model = convert_sync_batchnorm(model)
        self.model = model
        self.forward: Callable[..., Any] = model
        if self.sharded:
            shard(model, device)
        elif self.ranks > 1:
            # each rank keeps its batch norms' statistics until they are averaged
            self.forward = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def description(self, samples: int) -> str:
        """Describe the ranks and the samples of an update in a sentence."""
        way = "FSDP" if self.sharded else "DistributedDataParallel"
        return f"{self.ranks} processes ({way}), {samples} samples each: an update has {self.ranks * samples}"

    @contextmanager
    def gradients(self, *, shared: bool) -> Iterator[None]:
        """Keep gradients of the block on this rank until a block that is `shared`, which averages all of them over ranks."""
        if isinstance(self.forward, DistributedDataParallel) and not shared:
            with self.forward.no_sync():
                yield
            return
        if self.sharded:
            cast(Any, self.model).set_requires_gradient_sync(shared)
        yield

    def scaled(self, loss: Tensor) -> Tensor:
        """Multiply a rank's part of the loss, so that the average of its gradients over ranks is their sum."""
        return loss if self.ranks == 1 else loss * self.ranks

    def load_model_state(self, state: dict[str, Any] | None) -> None:
        """Load the complete weights of a checkpoint, which only the first rank needs to have."""
        if self.ranks == 1:
            self.model.load_state_dict(state or {})
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        if self.sharded:
            self.model.reshard()  # type: ignore[operator]  # fully_shard adds it; after an evaluation the outermost are still gathered
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, state if distributed.rank() == 0 and state else {}, options=options)


def check(settings: TrainerConfig, device: torch.device, ranks: int) -> None:
    """Raise UserError for settings that cannot be used together."""
    if ranks == 1:
        return
    if settings.sync_batchnorm and device.type != "cuda":
        raise UserError(f"trainer.sync_batchnorm=true: torch's synchronised batch norm needs GPUs; this run is on {device.type}.")
    if settings.parallel == "fsdp":
        for name, given in (("ema", settings.ema is not None), ("compile", settings.compile)):
            if given:
                raise UserError(f"trainer.{name} cannot be used with trainer.parallel=fsdp; omit it, or use trainer.parallel=ddp.")


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard each block's parameters over all ranks, then the remaining ones; they are gathered a block at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.ranks(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model, inner ones first: members of a list or a sequence with three or more layers of weights."""
    found = []
    for owner in model.modules():
        if isinstance(owner, (nn.Sequential, nn.ModuleList)):
            found += [part for part in owner.children() if _is_block(part)]
    return list(dict.fromkeys(reversed(found)))


def _is_block(part: nn.Module) -> bool:
    layers = sum(any(True for _ in layer.parameters(recurse=False)) for layer in part.modules())
    return layers >= 3 and not isinstance(part, (nn.ModuleList, nn.ModuleDict))


class Parts:
    """This rank's parts of parameters, as plain tensors that share their memory; an unsharded parameter is its own part.

    Optimisers step these parts without the cost of DTensor's dispatch, and as fused kernels.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.own = [nn.Parameter(own_part(parameter.detach())) if _is_part(parameter) else parameter for parameter in parameters]
        self.sharded = any(map(_is_part, parameters))

    def take_gradients(self) -> None:
        """Give the parts their gradients and their current memory, because FSDP may have moved it."""
        with torch.no_grad():
            for parameter, own in zip(self.parameters, self.own, strict=True) if self.sharded else ():
                own.data = own_part(parameter)
                own.grad = None if parameter.grad is None else own_part(parameter.grad)

    def drop_gradients(self) -> None:
        for parameter in (*self.parameters, *self.own):
            parameter.grad = None

    def norm(self) -> Tensor:
        """Return the gradients' norm over all ranks, 0-d."""
        norm = torch.nn.utils.get_total_norm([own.grad for own in self.own if own.grad is not None])
        return distributed.total(norm.double().square()).sqrt().to(norm.dtype) if self.sharded else norm

    def groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return an optimiser's groups with this rank's parts instead of its parameters."""
        own = dict(zip(self.parameters, self.own, strict=True))
        return [group | {"params": [own[parameter] for parameter in group["params"]]} for group in groups]

    def spread(self, state: dict[str, Any]) -> dict[str, Any]:
        """Shard the tensors of an optimiser's state as the parameters of their shape are."""
        return self._mapped(state, _like)

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of an optimiser of parts with its tensors as DTensors."""
        return self._mapped(state, _part_of)

    def _mapped(self, state: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
        if not self.sharded:
            return state
        entries = {
            number: {
                name: function(self.parameters[number], value) if isinstance(value, Tensor) and value.ndim else value
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return state | {"state": entries}


def own_part(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a plain tensor that shares its memory."""
    return cast(Any, value).to_local() if _is_part(value) else value


def _is_part(value: Any) -> bool:
    if distributed.ranks() == 1:
        return False  # the import below takes a second
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def whole_state(state: Any) -> Any:
    """Gather a state's sharded tensors, as one process would have them; only the first rank keeps the gathered ones, on the CPU.

    Every rank must call it.
    """
    first = distributed.rank() == 0

    def gathered(value: Any) -> Any:
        if not _is_part(value):
            return value
        together = value.full_tensor()
        return together.cpu() if first else None

    return tree_map(gathered, state)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    if not (_is_part(parameter) and value.shape == parameter.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    dtensor = cast(Any, parameter)
    return distribute_tensor(value.to(dtensor.device), dtensor.device_mesh, dtensor.placements)


def _part_of(parameter: Tensor, value: Tensor) -> Tensor:
    if not _is_part(parameter):
        return value
    from torch.distributed.tensor import DTensor

    dtensor = cast(Any, parameter)
    if value.shape != dtensor.to_local().shape:
        raise ValueError(f"a state of shape {tuple(value.shape)} is not a part of a parameter of shape {tuple(parameter.shape)}")
    return DTensor.from_local(value, dtensor.device_mesh, dtensor.placements, run_check=False, shape=dtensor.shape, stride=dtensor.stride())

"""A model, its gradients and an Updater, alone or spread over the processes of torchrun (which then runs this file).

They take a GPU each, through NCCL, where there are two; else the CPU, through gloo.
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import timm.optim
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

STEPS, SAMPLES = 6, 8
GPUS = torch.cuda.device_count() > 1
torch.backends.cudnn.allow_tf32 = False  # sums in another order are to be felt no more than on a CPU
SCALED = {"adam", "lion", "lamb"}  # those whose spread gradients are scaled; a fused one, one that is not, and one of whole tensors


class Model(nn.Module):
    """Tensors of all ranks, with sizes that two processes cannot share out evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 24))
        self.conv = nn.Conv2d(3, 17, 3)
        self.hidden = nn.Linear(17, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(self.conv(images).mean((2, 3))) + self.start[0]).tanh())


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 3, 6, 6, generator=generator), torch.randint(5, (SAMPLES,), generator=generator)


class Training:
    """Steps of one optimiser, over all ranks if it is spread."""

    here = "cuda:0" if GPUS else "cpu"

    def __init__(self, name: str, *, spread: bool = False, scaled: bool = False, device: str = "", **options: Any) -> None:
        from lab.config.schema import OptimConfig, ScheduleConfig
        from lab.optim.updater import Updater
        from lab.processes import distributed
        from lab.processes.parallel import shard

        torch.manual_seed(0)
        self.device = torch.device(device or self.here)
        self.model = Model().to(self.device)
        self.rank, self.ranks = (distributed.rank(), distributed.ranks()) if spread else (0, 1)
        if spread:
            shard(self.model, self.device)
        schedule = ScheduleConfig(name="constant", warmup_epochs=0)
        config = OptimConfig(name=name, lr=1e-2, schedule=schedule, **options)
        self.updater = Updater(self.model, config, updates=100, updates_per_epoch=1, scaled=scaled, device=self.device)

    def gradients(self, number: int, *, bad: bool = False) -> Tensor:
        """Those of a batch of its own; return the flag of a bad loss. A bad batch has gradients that are not finite, on the last rank."""
        torch.manual_seed(number)  # Kron draws
        images, classes = (part.chunk(self.ranks)[self.rank].to(self.device) for part in data(number))
        if bad and self.rank == self.ranks - 1:
            images[0] = torch.inf
        self.updater.scaler.scale(nn.functional.cross_entropy(self.model(images), classes)).backward()
        return torch.zeros((), dtype=torch.bool, device=self.device)

    def step(self, number: int, *, bad: bool = False) -> None:
        self.updater.step(self.gradients(number, bad=bad))

    def state(self) -> dict[str, Any]:
        """Whole tensors, on the CPU; the count of updates and the scale, which do move in a bad one, are left out."""
        from lab.processes.parallel import whole_state

        state = whole_state({"model": self.model.state_dict(), "optimizer": self.updater.state()["optimizer"]})
        return tree_map(lambda value: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value), state)


class Reads(TorchDispatchMode):
    """Keeps where the tensors of a device lie whose values the host reads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.places = device, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), words: Any = None) -> Any:
        reading = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
        if function in reading and arguments[0].device.type == self.device.type:
            self.places.add(arguments[0].untyped_storage().data_ptr())
        return function(*arguments, **(words or {}))


def reads(training: Training) -> int:
    """How many values the host reads in a step that are not there before it.

    Counters of an optimiser are on the CPU on every device. On a GPU only reads of its own tensors count, because only these wait for it.
    """
    training.step(0)
    optimizer = training.updater.optimizer
    places = [*optimizer.state.values(), *optimizer.param_groups]
    counters = [value for place in places for value in place.values() if isinstance(value, Tensor) and not value.ndim]
    allowed = {counter.untyped_storage().data_ptr() for counter in counters}
    bad_loss = training.gradients(1)
    with Reads(training.device) as found:
        training.updater.step(bad_loss)
    return len(found.places - allowed)


def spread_case(name: str) -> dict[str, Any]:
    """What two processes come to: from a first and a later bad step, by way of a checkpoint, and how often the host reads."""
    from lab.processes.parallel import whole_state

    scaled = name in SCALED
    training = Training(name, spread=True, clip=0.5, scaled=scaled)
    found: dict[str, Any] = {"undone": []}
    for number in range(STEPS):
        if number in (0, 3):
            before = training.state()
            training.step(number, bad=True)
            found["undone"].append((before, training.state()))
        training.step(number)
        if number == 2:
            saved = [whole_state({"model": training.model.state_dict(), **training.updater.state()})]
            torch.distributed.broadcast_object_list(saved, src=0)
            found["saved"] = copy.deepcopy(saved[0])
            training = resumed(name, saved[0], spread=True, scaled=scaled)
    return found | {"end": training.state(), "reads": reads(Training(name, spread=True, scaled=scaled)), "parts": training.updater.on_parts}


def resumed(name: str, saved: dict[str, Any], *, spread: bool, scaled: bool = False) -> Training:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    training = Training(name, spread=spread, clip=0.5, scaled=scaled)
    if spread:
        set_model_state_dict(training.model, saved["model"], options=StateDictOptions(full_state_dict=True))
    else:
        training.model.load_state_dict(saved["model"])
    training.updater.load_state(saved)
    return training


def alone(name: str, **options: Any) -> dict[str, Any]:
    """One process with whole batches and no bad step."""
    training = Training(name, clip=0.5, **options)
    for number in range(STEPS):
        training.step(number)
    return training.state()


def refusal(name: str, **options: Any) -> str:
    from lab.base.errors import UserError

    try:
        Training(name, spread=True, **options)
    except UserError as error:
        return str(error)
    return ""


def main(folder: Path, names: list[str], refused: list[str]) -> None:
    from lab.processes import distributed

    if GPUS:
        Training.here = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(Training.here)
    distributed.start(torch.device(Training.here))
    found: dict[str, Any] = {name: spread_case(name) for name in names}
    found["refused"] = {name: refusal(name) for name in refused} | {"agc": refusal("sgd", clip=1.0, clip_mode="agc")}
    training = resumed("sgd", torch.load(folder / "old.pt"), spread=True)
    for number in range(3, STEPS):
        training.step(number)
    found["continued"] = training.state()
    if distributed.rank() == 0:
        torch.save(found, folder / "found.pt")
    distributed.stop()


# Kron compiles parts of itself, which takes a minute; Muon rounds to bfloat16, so that another order of summation is felt
timm.optim.kron.has_dynamo = False
timm.optim.muon.zeropower_via_newtonschulz.__defaults__ = tuple(
    torch.float32 if default is torch.bfloat16 else default for default in timm.optim.muon.zeropower_via_newtonschulz.__defaults__
)

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(","))

"""Optimiser, schedule, clipping and loss scaling behind one call a step; steps can be skipped on the device."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lab.base.errors import UserError, unknown
from lab.config.objects import CUSTOM, find
from lab.config.schema import OptimConfig
from lab.processes.parallel import Parts, own_part

FUSED = {"adam", "adamw", "sgd", "nesterov", "momentum"}
# No optimiser says whether it may step a part of a tensor, so they are listed, and tests step each over two processes.
# Element-wise optimisers: a weight's update depends only on this weight's gradients.
BY_NUMBER = {
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD", "AdaBelief", "AdamWLegacy", "Adan", "Adopt"),
    *("LaProp", "Lion", "MADGRAD", "NAdamLegacy", "NAdamW", "RAdamLegacy", "RMSpropTF", "SGDW"),
}
# optimisers that use a tensor's norm, or its rows and columns, by operations that DTensor supports
BY_TENSOR = {"Lamb", "Lars", "Muon"}


OF_SETTINGS = (
    *("fused", "foreach", "capturable", "differentiable", "maximize", "decoupled_weight_decay"),
    *("initial_lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "amsgrad"),
)
"""Values of a parameter group that no step changes."""


def check_optimizer(config: OptimConfig) -> None:
    """Raise UserError unless the optimiser is timm's and needs only first derivatives, or is a class of the user's own."""
    from timm.optim import get_optimizer_info, list_optimizers

    if config.name == CUSTOM:
        custom_optimizer(config)
        return
    name = config.name
    second_order = {str(known): get_optimizer_info(str(known)).second_order for known in list_optimizers()}
    names = [known for known in second_order if not second_order[known]]
    base = name.lower().removeprefix("lookahead_")
    if second_order.get(base):
        raise UserError(f"optim.name={name}: takes second derivatives, which a training does not compute. Use for example adamw or lamb.")
    if base not in names:
        raise unknown(f"optim.name={name}", name, names, show=200)


def custom_optimizer(config: OptimConfig) -> Any:
    """Return a timm registry that holds only the user's class, so that timm groups its parameters as for any optimiser.

    Raises:
        UserError: the class is not found, or is not a torch.optim.Optimizer.
    """
    from timm.optim import OptimInfo, OptimizerRegistry

    if not config.target:
        raise UserError("optim.target: optim=custom needs a torch.optim.Optimizer class, as module:name or path/to/file.py:name.")
    found = find("optim.target", config.target)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UserError(f"optim.target={config.target}: is not a class of torch.optim.Optimizer.")
    momentum = "momentum" in inspect.signature(found).parameters
    registry = OptimizerRegistry()
    registry.register(
        OptimInfo(name=CUSTOM, opt_class=found, has_eps=True, has_betas=True, has_momentum=momentum)
    )  # timm drops no argument
    return registry


def make_optimizer(parameters: nn.Module | list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Return the optimiser of a model, whose parameters timm groups, or of groups.

    Raises:
        UserError: the optimiser cannot be made with these settings.
    """
    from timm.optim import create_optimizer_v2

    options: dict[str, Any] = dict(config.args)
    if config.name.lower() in FUSED and not options.get("dampening"):
        options.setdefault("fused", True)
    create = custom_optimizer(config).create_optimizer if config.name == CUSTOM else create_optimizer_v2
    try:
        made: Optimizer = create(
            parameters,
            opt=config.name,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            layer_decay=config.layer_decay,
            **options,
        )
        return made
    except Exception as error:  # optimisers raise many kinds of errors for bad arguments
        raise UserError(f"optim.name={config.name} cannot be made with these settings: {type(error).__name__}: {error}") from error


def steps_parts(optimizer: Optimizer, name: str) -> bool:
    """Return whether an optimiser may step each rank's part of a tensor as if it were a tensor; other optimisers step DTensors.

    Raises:
        UserError: the optimiser needs complete tensors and cannot step DTensors.
    """
    base = getattr(optimizer, "_base_optimizer", optimizer)  # timm's Lookahead has one
    kind = type(base).__name__
    if not type(base).__module__.startswith(("timm.", "torch.")):
        return False
    # both options compute a mean over a complete tensor, and write to it
    special = any(group.get("caution") or group.get("algo") == "adamuon" for group in base.param_groups)
    if special or kind not in BY_NUMBER | BY_TENSOR:
        raise UserError(
            f"optim.name={name} takes figures of whole tensors, which trainer.parallel=fsdp spreads over processes. "
            "Use trainer.parallel=ddp, or for example optim.name=adamw, sgd, lion, adan or lamb."
        )
    return kind in BY_NUMBER


class Updater:
    """Turn gradients into an update.

    A bad update (its loss or gradients are not finite) leaves parameters and optimiser state bitwise as they were. Fused optimisers read a
    flag on the device, so that the host does not wait; for other optimisers the host reads the flag, and leaves their step out.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, updates: int, updates_per_epoch: int, scaled: bool, device: torch.device
    ) -> None:
        self.config, self.device = config, device
        self.optimizer = make_optimizer(model, config)
        self.parts = Parts([p for group in self.optimizer.param_groups for p in group["params"]])
        self.on_parts = self.parts.sharded and steps_parts(self.optimizer, config.name)
        if self.parts.sharded and config.clip is not None and config.clip_mode == "agc":
            raise UserError(
                "optim.clip_mode=agc takes norms of whole tensors, which trainer.parallel=fsdp spreads over processes. Use norm or value."
            )
        if self.on_parts:
            self.optimizer = make_optimizer(self.parts.groups(self.optimizer.param_groups), config)
        self.on_device = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        self._make_buffers()
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        # the scaler sees only this gradient: nan if an update is bad
        self.overflow = torch.optim.SGD([nn.Parameter(torch.zeros((), device=device))])
        self.schedule = make_schedule(self.optimizer, config, updates, updates_per_epoch)
        self.count = 0
        self.used_lr = self.lr  # of the last update

    @property
    def lr(self) -> float:
        """Return the rate of the coming update; the largest of all groups."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def step(self, bad_loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip and apply the gradients if they and the loss are finite; advance the schedule in any case.

        Args:
            bad_loss: 0-d bool on the device.

        Returns:
            Whether the gradients were not finite (0-d bool), and their norm before clipping (0-d).
        """
        self.parts.take_gradients()
        if self.scaler.is_enabled():
            scale = self.scaler.scale(torch.ones((), device=self.device))
            torch._foreach_mul_([p.grad for p in self.parts.own if p.grad is not None], scale.double().reciprocal().float())
        norm = self.parts.norm()
        bad_gradient = ~norm.isfinite()
        self._clip(norm)
        self._apply(bad_loss | bad_gradient)
        self.parts.drop_gradients()
        self.count += 1
        self.used_lr = self.lr
        if self.schedule is not None:
            self.schedule.step_update(self.count)
        return bad_gradient, norm

    def _clip(self, norm: Tensor) -> None:
        if self.config.clip is None:
            return
        if self.config.clip_mode == "norm":
            torch.nn.utils.clip_grads_with_norm_(self.parts.own, self.config.clip, norm)
        else:
            from timm.utils.clip_grad import dispatch_clip_grad

            dispatch_clip_grad(self.parts.own, self.config.clip, mode=self.config.clip_mode)

    def _apply(self, bad: Tensor) -> None:
        if self.on_device:
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # fused optimisers read it; Optimizer does not declare it
            self.optimizer.step()
        elif not bad:  # waits for the device
            self.optimizer.step()
        if self.scaler.is_enabled():
            self.overflow.param_groups[0]["params"][0].grad = torch.where(bad, torch.nan, 0.0)
            self.scaler.unscale_(self.overflow)
            self.scaler.update()

    def _make_buffers(self) -> None:
        """Allocate fused SGD's buffers as zeros: its own are uninitialised, and would stay so if its first step were skipped."""
        for group in self.optimizer.param_groups if self.on_device and isinstance(self.optimizer, torch.optim.SGD) else ():
            for p in group["params"] if group["momentum"] else ():
                self.optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        return {
            "optimizer": self.parts.joined(state) if self.on_parts else state,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "count": self.count,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `lab.run.checkpoint_checks` found sound; the schedule follows from the count and this run's length."""
        optimizer = self.parts.spread(state["optimizer"])
        if self.on_parts:
            optimizer = optimizer | {"state": tree_map(own_part, optimizer["state"])}
        # how to step is decided by this run's settings, not by the file
        ways = [{way: group[way] for way in OF_SETTINGS if way in group} for group in self.optimizer.param_groups]
        groups = [saved | way for saved, way in zip(optimizer["param_groups"], ways, strict=True)]
        self.optimizer.load_state_dict(optimizer | {"param_groups": groups})
        self._make_buffers()
        self.scaler.load_state_dict(state["scaler"])
        self.count = state["count"]
        if self.schedule is not None and self.count:
            self.schedule.step_update(self.count - 1)
            self.used_lr = self.lr
            self.schedule.step_update(self.count)


class RangeSchedule:
    """Raise the learning rate from `warmup_lr` to `lr` by the same factor at each update, for a learning-rate range test."""

    def __init__(self, optimizer: Any, config: OptimConfig, updates: int) -> None:
        """Set the first rate.

        Raises:
            UserError: the rate would not rise.
        """
        first, self.optimizer, self.updates = config.schedule.warmup_lr, optimizer, max(updates - 1, 1)
        if not 0 < first < config.lr:
            raise UserError(
                f"optim.schedule.warmup_lr={first:g}: above 0 and below optim.lr={config.lr:g} is expected with schedule range."
            )
        self.ratio = first / config.lr
        self.last = [group["lr"] for group in optimizer.param_groups]
        self.step_update(0)

    def step_update(self, count: int) -> None:
        """Set the rate of the update after `count` updates."""
        for group, last in zip(self.optimizer.param_groups, self.last, strict=True):
            group["lr"] = last * self.ratio ** (1 - min(count / self.updates, 1.0))

    def state_dict(self) -> dict[str, Any]:
        return {}


def make_schedule(optimizer: Any, config: OptimConfig, updates: int, updates_per_epoch: int) -> Any:
    """Return timm's schedule with all its lengths in updates."""
    from timm.scheduler import create_scheduler_v2

    schedule = config.schedule
    if schedule.name == "range":
        return RangeSchedule(optimizer, config, updates)
    warmup = updates // 10 if schedule.warmup_epochs is None else round(schedule.warmup_epochs * updates_per_epoch)
    if warmup and warmup >= updates:
        raise UserError(
            f"optim.schedule.warmup_epochs={schedule.warmup_epochs:g}: the whole run is not longer; use fewer, or more trainer.epochs."
        )
    prefixed = schedule.name in ("cosine", "tanh", "poly")
    options: dict[str, Any] = {}
    if schedule.name in ("wsd", "rsqrt"):
        left = updates - warmup
        decay = left / 5 if schedule.decay_epochs is None else schedule.decay_epochs * updates_per_epoch
        if decay > left:
            raise UserError(
                f"optim.schedule.decay_epochs={schedule.decay_epochs:g}: the run has {left / updates_per_epoch:g} epochs after its "
                "warm-up; use fewer, or more trainer.epochs."
            )
        options = {"decay_epochs": max(1, round(decay)), "stable_timescale": max(1, warmup or updates // 10)}
    elif schedule.name == "step":
        options = {"decay_epochs": max(1, round((schedule.decay_epochs or 90) * updates_per_epoch))}
    made, _ = create_scheduler_v2(
        optimizer,
        sched=schedule.name,
        # the decay begins after the warm-up, at optim.lr, and ends with the run; timm's default would begin it with the warm-up
        num_epochs=updates - warmup if prefixed else updates,
        warmup_epochs=warmup,
        warmup_prefix=prefixed,
        warmup_lr=min(schedule.warmup_lr, config.lr),
        min_lr=min(schedule.min_lr, config.lr),
        decay_milestones=[each * updates_per_epoch for each in schedule.decay_milestones],
        decay_rate=schedule.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=1,
        **options,
    )
    return made

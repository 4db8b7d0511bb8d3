"""Optimiser, schedule, clipping and scaling behind one call a step, with steps that can be skipped on the device."""

from typing import Any

import torch
from torch import Tensor, nn

from lab.config.errors import UserError, unknown
from lab.config.schema import OptimConfig
from lab.train.parallel import as_parameters, in_parts, whole

FUSED = {"adam", "adamw", "sgd", "nesterov", "momentum"}
FUSED_IN_PARTS = {"adam", "adamw"}  # those that torch can run on parameters that FSDP has spread


def check_optimizer_name(name: str) -> None:
    from timm.optim import list_optimizers

    names = [str(known) for known in list_optimizers()]
    if name.lower().removeprefix("lookahead_") not in names:
        raise unknown(f"optim.name={name}", name, names, show=200)


class Updater:
    """Turns gradients into an update.

    A bad update (its loss or gradients are not finite) leaves parameters and optimiser state bitwise as they were. The optimisers in
    FUSED are told so by a flag on the device; for all others the flag is read, which costs a host synchronisation a step on CUDA.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, updates: int, updates_per_epoch: int, scaled: bool, device: torch.device
    ) -> None:
        from timm.optim import create_optimizer_v2

        self.config, self.device = config, device
        options: dict[str, Any] = dict(config.args)
        on_device = config.name.lower() in (FUSED_IN_PARTS if in_parts(model) else FUSED)
        if on_device:
            options.setdefault("fused", True)
        try:
            self.optimizer = create_optimizer_v2(
                model,
                opt=config.name,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                layer_decay=config.layer_decay,
                **options,
            )
        except (TypeError, ValueError, AssertionError, ImportError) as error:
            raise UserError(f"optim.name={config.name} cannot be made with these settings: {error}") from None
        self.on_device = on_device and bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.on_device and isinstance(self.optimizer, torch.optim.SGD):
            # fused SGD makes its first buffers uninitialised and would keep them so if its first step were skipped
            for group in self.optimizer.param_groups:
                for p in group["params"] if group["momentum"] else ():
                    self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        self.schedule = make_schedule(self.optimizer, config, updates, updates_per_epoch)
        self.count = 0

    @property
    def lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def step(self, bad_loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip and apply the gradients unless the loss or they are not finite; move the schedule either way.

        Args:
            bad_loss: 0-d bool on the device.

        Returns:
            whether the gradients were not finite (0-d bool), and their norm before clipping (0-d).
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.scaler.is_enabled():
            # the scaler looks at gradients alone: a nan in one of them makes it skip
            gradients[0].add_(torch.where(bad_loss, torch.nan, 0.0))
            self.scaler.unscale_(self.optimizer)
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        bad_gradient = ~norm.isfinite()
        if self.config.clip is not None and self.config.clip_mode == "norm":
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        elif self.config.clip is not None:
            from timm.utils.clip_grad import dispatch_clip_grad

            dispatch_clip_grad(self.parameters, self.config.clip, mode=self.config.clip_mode)
        self._apply(bad_loss | bad_gradient)
        self.optimizer.zero_grad(set_to_none=True)
        self.count += 1
        if self.schedule is not None:
            self.schedule.step_update(self.count)
        return bad_gradient, norm

    def _apply(self, bad: Tensor) -> None:
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.on_device:
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # fused optimisers read it; Optimizer does not declare it
            self.optimizer.step()
        elif not bool(bad):
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "count": self.count,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state; the schedule is a function of the count, and stays that of this run's length."""
        self.optimizer.load_state_dict(as_parameters(self.optimizer, state["optimizer"]))
        self.scaler.load_state_dict(state["scaler"])
        self.count = state["count"]
        if self.schedule is not None and self.count:
            self.schedule.step_update(self.count)


def make_schedule(optimizer: Any, config: OptimConfig, updates: int, updates_per_epoch: int) -> Any:
    """timm's schedule with all its lengths in updates."""
    from timm.scheduler import create_scheduler_v2

    schedule = config.schedule
    warmup = updates // 10 if schedule.warmup_epochs is None else round(schedule.warmup_epochs * updates_per_epoch)
    if warmup and warmup >= updates:
        raise UserError(
            f"optim.schedule.warmup_epochs={schedule.warmup_epochs:g}: the whole run is not longer; use fewer, or more trainer.epochs."
        )
    decay: dict[str, Any] = (
        {} if schedule.decay_epochs is None else {"decay_epochs": max(1, round(schedule.decay_epochs * updates_per_epoch))}
    )
    made, _ = create_scheduler_v2(
        optimizer,
        sched=schedule.name,
        num_epochs=updates,
        warmup_epochs=warmup,
        warmup_lr=min(schedule.warmup_lr, config.lr),
        min_lr=min(schedule.min_lr, config.lr),
        decay_milestones=[each * updates_per_epoch for each in schedule.decay_milestones],
        decay_rate=schedule.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=1,
        **decay,
    )
    return made

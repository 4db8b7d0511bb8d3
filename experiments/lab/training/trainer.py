"""The training loop: plain torch, the same for all tasks."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.base.drawing import page_of
from lab.base.errors import NonFiniteError, UserError
from lab.base.files import write_whole
from lab.base.process import Stop, StoppedError
from lab.base.seeds import host_state, set_host_state
from lab.config.schema import TrainConfig
from lab.data.batch import Tensors
from lab.data.sets import Data, Loader
from lab.optim.guard import Guard
from lab.optim.updater import Updater
from lab.processes import distributed
from lab.processes.parallel import Parallel, whole_state
from lab.run import checkpoint
from lab.run.checkpoint_checks import fault_of_optimizer
from lab.run.export import export_best
from lab.run.folder import RunFolder
from lab.run.frames import write_rows
from lab.run.machine import autocast, memory
from lab.run.trust import seal_of, signature
from lab.tasks.finetuning import frozen_norms
from lab.tasks.models import placed
from lab.tasks.task import Task
from lab.training.callbacks import Callbacks
from lab.training.console import Console
from lab.training.measures import Clock, KernelsUsed
from lab.training.monitor import Best, Monitor
from lab.training.profile import Profile


class Trainer:
    """Train a task's model on its data, and record the run in its folder.

    An update takes `trainer.accumulate` batches of every rank, fewer at an epoch's end; its loss is the loss of one batch with all their
    samples. Figures are over all ranks and the same on each, so that all ranks make the same decisions.
    Losses and counters stay on the device and are read every `trainer.log_every` updates.
    """

    def __init__(self, config: TrainConfig, task: Task, data: Data, model: nn.Module, device: torch.device, tree: dict[str, Any]) -> None:
        settings = config.trainer
        self.config, self.settings, self.task, self.data, self.device, self.tree = config, settings, task, data, device, tree
        channels_last = settings.channels_last and settings.parallel != "fsdp"  # FSDP takes parameters only in torch's default layout
        self.parallel = Parallel(placed(model, device, channels_last=channels_last), settings, device)
        self.model = self.parallel.model
        self.forward: Callable[..., Any] = torch.compile(self.parallel.forward) if settings.compile else self.parallel.forward
        self.per_epoch = -(-len(data.train) // settings.accumulate)
        self.updates = min(self.per_epoch * settings.epochs, settings.max_updates or 2**62)
        self.updater = Updater(
            self.model,
            config.optim,
            updates=self.updates,
            updates_per_epoch=self.per_epoch,
            scaled=settings.amp == "fp16",
            device=device,
        )
        self.ema = self._make_ema()
        self.guard = Guard(self.model, settings.max_nonfinite, device)
        # a compiled model is compiled again for the first epoch's smaller last batch
        self.clock = Clock(device, max(settings.timing_warmup, self.per_epoch if settings.compile else 0))
        self.kernels = KernelsUsed(config.loss, device)
        self.monitor = Monitor(settings, task.monitor)
        self.epoch, self.batch, self.epoch_ended = 1, 0, False  # batch: how many of the epoch's batches are done
        self.done = 0
        self.values: dict[str, float] = {}
        self.pictured: Any = None
        self.skipped = 0
        self.unexported: dict[str, str] = {}  # rows of the table: what could not be exported, and why
        self.stop: Stop | None = None
        self.draws = False  # the next batch
        self.callbacks = Callbacks()
        self.notes: list[str] = []  # messages about the model, for the user
        self.frozen_norms = frozen_norms(self.model) if config.model.freeze else []
        self.profile: Profile | None = None
        self._clear_window()

    def fit(self, folder: RunFolder, console: Console, stop: Stop | None = None) -> None:
        """Train to the end, from the trainer's present state.

        Raises:
            NonFiniteError: `trainer.max_nonfinite` updates in a row had no finite loss; the last bad batch is saved.
            StoppedError: a stop was requested; a checkpoint is written.
            UserError: a checkpoint cannot be written.
        """
        self.folder, self.console, self.stop = folder, console, stop
        self.draws = self.done == 0 and distributed.rank() == 0
        self.profile = Profile(folder, self.device, self.clock.warmup) if self.settings.profile and distributed.rank() == 0 else None
        self.saved_at = time.monotonic()
        try:
            while self.begin_epoch():
                self.train_epoch()
                self.end_epoch()
        except StoppedError:
            self.save("last.pt", whole=True)
            raise
        self.stop = None  # too late to stop now
        self.score_best()

    def begin_epoch(self) -> bool:
        """Continue the current epoch, or begin the next one; return whether there is one."""
        if not self.epoch_ended:
            return True
        if self.is_over():
            return False
        if self.batch == len(self.data.train):
            self.epoch, self.batch = self.epoch + 1, 0
        self.epoch_ended = False
        return True

    def is_over(self) -> bool:
        """Return whether all updates are done, or early stopping ends the run."""
        return self.done >= self.updates or self.monitor.gives_up

    @property
    def best(self) -> Best:
        return self.monitor.best

    def train_epoch(self) -> None:
        """Train on the rest of the epoch."""
        self.model.train()
        for norm in self.frozen_norms:
            norm.eval()
        if not self.clock.window_updates:
            self.clock.restart()
        self.data.train.begin(self.epoch, self.batch)
        left = min(self.per_epoch * self.epoch, self.updates) - self.done
        if not self.clock.updates:
            self.console.waits("the first batch")
        for group in islice(self.groups(), left):
            if not self.clock.updates:
                self.console.waits("the first update" + self.compiled)
            self.callbacks("on_before_update", self)
            if self.draws:
                self.draw(group[0])
            self.update(group)
            self.batch += len(group)
            self.callbacks("on_update", self)
            if self.profile is not None:
                self.profile.updated()
            self.console.advance(self.done)
            if self.done % self.settings.log_every == 0:
                self.report()
            if self.done >= self.updates:  # a callback may have ended the run early
                break
            if self.save_is_due():
                self.save("last.pt", whole=True)
            if self.may_exchange():
                self.end_if_wanted()
        if self.clock.window_updates:
            self.report()

    @property
    def compiled(self) -> str:
        """Return in words what the first update compiles."""
        parts = ["the model"] * self.settings.compile + ["the loss's kernels"] * (self.kernels.backend == "triton")
        return f", which compiles {' and '.join(parts)}" if parts else ""

    def draw(self, batch: Tensors) -> None:
        """Draw the run's first training batch with its labels, which shows a wrong turn, scale or class at once."""
        self.draws = False
        if found := self.task.first_batch(batch):
            page = page_of([picture for picture, _ in found], [title for _, title in found])
            path: Path = self.folder.path / "first_batch.png"
            write_whole(path, partial(page.save, format="PNG"))
            self.folder.artifact(path, "pictures")

    def end_epoch(self) -> None:
        """Evaluate and save, if they are due."""
        evaluates = self.done >= self.updates or self.epoch % self.settings.eval_every == 0
        improved = evaluates and self.evaluate_epoch()
        self.epoch_ended = True
        last = self.is_over()
        if improved:
            self.save("best.pt", whole=False)
        kept = [f"epoch-{self.epoch:03}.pt"] if self.settings.kept_epochs else []
        if last or kept or self.epoch % self.settings.save_every == 0:
            self.save("last.pt", *kept, whole=True)
        self.callbacks("on_epoch", self)
        if not last:
            self.end_if_wanted()

    def save_is_due(self) -> bool:
        """Return whether a checkpoint is due within the epoch, by the number of updates or by time."""
        updates, minutes = self.settings.save_updates, self.settings.save_minutes
        late = minutes is not None and time.monotonic() - self.saved_at >= minutes * 60
        late = self.may_exchange() and distributed.anywhere(late, self.device)
        return late or (updates is not None and self.done % updates == 0)

    def may_exchange(self) -> bool:
        """Return whether ranks may exchange a decision now: at updates where all wait for the device anyway; a single rank always may."""
        return self.parallel.ranks == 1 or self.done % self.settings.log_every == 0

    def end_if_wanted(self) -> None:
        """Raise StoppedError if any rank was asked to stop; all ranks must call this, and only where a checkpoint can be written."""
        if distributed.anywhere(self.stop is not None and self.stop.wanted, self.device):
            raise StoppedError

    def groups(self) -> Iterator[list[Tensors]]:
        """Yield the batches of each update."""
        group: list[Tensors] = []
        for batch in self.clock.waiting(self.data.train):
            group.append(self.task.prepare(batch, training=True))
            if len(group) == self.settings.accumulate:
                yield group
                group = []
        if group:
            yield group

    def update(self, group: list[Tensors]) -> None:
        """Make one optimiser step on the samples of all batches in `group`; under a fused optimiser without waiting for the device."""
        normalizer = distributed.total(torch.stack([self.task.normalizer(batch) for batch in group]).sum())
        with self.guard.buffers_undone() as verdict:
            parts = []
            for batch in group:
                with self.parallel.gradients(shared=batch is group[-1]):
                    parts.append(self.backward(batch, normalizer))
            losses = [loss for loss, _ in parts]
            images = torch.full((), float(sum(len(batch) for batch in group)), device=self.device)
            sums = [torch.stack(losses).sum(), *torch.stack([scores for _, scores in parts]).sum(0), images]
            loss, *counted = distributed.total(torch.stack(sums).double())
            bad_loss = ~loss.isfinite()
            verdict.append(bad_loss)
        bad_gradient, norm = self.updater.step(bad_loss)
        # a scaler lets gradients overflow sometimes, to find the largest scale; this is not the batch's fault
        bad = bad_loss if self.updater.scaler.is_enabled() else bad_loss | bad_gradient
        for batch, part in zip(group, losses, strict=True):
            self.guard.see(batch, ~part.isfinite() | (bad & ~bad_loss), self.done)
        self.guard.count(bad)
        if self.ema is not None:
            self.ema.update(self.model, step=self.done)
        skipped = bad_loss | bad_gradient
        self.window += torch.stack([torch.where(bad_loss, 0, loss), ~bad_loss, torch.where(skipped, 0, norm), ~skipped, *counted])
        self.done += 1
        self.clock.updated()

    def backward(self, batch: Tensors, normalizer: Tensor) -> tuple[Tensor, Tensor]:
        """Add this batch's gradients; return its part of the loss and its scores.

        The graph is cut at the model's output, a tensor or a named tuple of tensors, to time the loss's own forward and backward.
        """
        with self.autocast():
            output = self.forward(self.laid_out(batch), *self.task.other_inputs(batch))
        parts = (output,) if isinstance(output, Tensor) else output
        leaves = [None if part is None else part.detach().requires_grad_(part.requires_grad) for part in parts]
        cut = leaves[0] if isinstance(output, Tensor) else output._make(leaves)
        with self.clock.loss():
            loss = self.task.loss(cut, batch, normalizer)
            self.updater.scaler.scale(self.parallel.scaled(loss)).backward()
        with torch.no_grad():  # before the model's backward, because FSDP then frees the weights of a HeadInput
            scores = self.task.scores(cut, batch).float()
        trained = [(part, leaf.grad) for part, leaf in zip(parts, leaves, strict=True) if leaf is not None and leaf.grad is not None]
        torch.autograd.backward([part for part, _ in trained], [grad_output for _, grad_output in trained])
        return loss.detach().float(), scores

    def autocast(self) -> torch.autocast:
        return autocast(self.device, self.settings.amp)

    def laid_out(self, batch: Tensors) -> Tensor:
        return batch.images.contiguous(memory_format=torch.channels_last) if self.settings.channels_last else batch.images

    def report(self) -> None:
        """Read the device's counters, the only wait of a window, and write its figures."""
        guard = self.guard
        counters = torch.stack([guard.total, guard.streak, guard.longest]).double()
        bad, streak, longest, loss, finite, norm, applied, *scores, images = torch.cat([counters, self.window]).tolist()
        self._clear_window()
        self.skipped += self.clock.window_updates - int(applied)
        values = {
            "train/loss": loss / finite if finite else float("nan"),
            **{f"train/{name}": score / images for name, score in zip(self.task.score_names, scores, strict=True)},
            "train/gradient_norm": norm / applied if applied else float("nan"),
            "train/lr": self.updater.used_lr,
            "train/skipped_updates": self.skipped,
            "train/nonfinite_updates": bad,
            **distributed.all_max(self.clock.read(images) | memory(self.device), self.device),
        }
        self.clock.loss_ms += [values["train/loss_ms"]] if "train/loss_ms" in values else []
        self.clock.update_ms += [values["train/step_ms"]] if "train/images_per_second" in values else []  # after the warm-up
        self.values |= values
        self.folder.metrics(self.done, values | {"train/epoch": self.done / self.per_epoch})
        self.console.figures(self.done, self.epoch, values)
        self.callbacks("on_report", self, values)
        if longest >= self.settings.max_nonfinite:
            self._stop_nonfinite()
        if streak:
            self.console.say(f"warning: the last {streak:.0f} updates had no finite loss or gradient and were skipped")

    def evaluate_epoch(self) -> bool:
        """Evaluate on held-out data; return whether the result is the best so far."""
        result = self.evaluate(self.model if self.ema is None else self.ema.module, self.data.val)
        values = {f"val/{name}": value for name, value in result.values.items()}
        if self.ema is not None:
            plain = self.evaluate(self.model, self.data.val)
            values |= {f"val_without_ema/{name}": plain.values[name] for name in (self.monitor.name, "loss") if name in plain.values}
        self.values |= values
        self.folder.metrics(self.done, values)
        self.folder.evaluation(self.done, result.tree())
        self.console.say(f"epoch {self.epoch}/{self.settings.epochs} · {self.task.headline(result)}")
        self.callbacks("on_evaluation", self, result.values)
        improves = self.monitor.improves(result.values, self.epoch)
        if isnan(result.values[self.monitor.name]):
            self.console.say(
                f"trainer.monitor={self.monitor.name} is nan, so that epochs cannot be compared by it; another figure can be monitored."
            )
        if not improves:
            return False
        self.pictured = result
        return True

    @torch.no_grad()
    def evaluate(self, model: nn.Module, loader: Loader, see: Callable[[Any, Any], None] | None = None, batches: int | None = None) -> Any:
        """Evaluate the loader's samples, or its first `batches`; call `see` with each output and its batch."""
        model.eval()
        distributed.average_statistics(model)
        counts = self.task.counts(loader)
        for batch in islice(loader, batches):
            if self.parallel.ranks == 1:
                self.end_if_wanted()
            batch = self.task.prepare(batch, training=False)
            with self.autocast():
                output = model(self.laid_out(batch), *self.task.other_inputs(batch))
            self.task.count(counts, output, batch)
            if see is not None:
                see(output, batch)
        return counts.result()

    def save(self, *names: str, whole: bool) -> None:
        """Write checkpoints: weights and their description, and if `whole` all that a continued run needs; else safetensors, too.

        Every rank must call this; the first one writes.
        """
        distributed.average_statistics(self.model)
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "config": self.tree,
            "classes": self.data.classes,
            "samples": self.data.train.samples,
            "data": self.identity,
            "norm": asdict(self.data.norm),
            "epoch": self.epoch,
            "updates": self.done,
            "best": asdict(self.best),
            "tracking": self.folder.tracked(),
        }
        if whole:
            state |= self._progress()
            self.saved_at = time.monotonic()
        state = whole_state(state)
        if distributed.rank() > 0:
            return
        state["signature"] = signature(self.tree, self.folder.path)
        state["seal"] = seal_of(state["tracking"], state["signature"])
        for path in (self.folder.path / "checkpoints" / name for name in names):
            checkpoint.save(state, path)
            if not whole:
                about = {name: state[name] for name in checkpoint.DESCRIBED}
                checkpoint.save_weights(state["ema"] or state["model"], path.with_suffix(".safetensors"), about)
            self.callbacks("on_checkpoint", self, path)
        if self.settings.kept_epochs:
            checkpoint.remove_before(self.epoch - self.settings.kept_epochs + 1, self.folder.path / "checkpoints")

    def _progress(self) -> dict[str, Any]:
        """Return all that a resumed run needs besides the weights, as tensors and plain values; waits for the device.

        The order and augmentation of data depend only on `epoch` and `batch`.
        """
        cuda = self.device.type == "cuda"
        return {
            **self.updater.state(),
            "epoch_ended": self.epoch_ended,
            "batch": self.batch,
            "window": self.window,
            "values": self.values,
            "skipped": self.skipped,
            "nonfinite": self.guard.state(),
            "clock": self.clock.state(),
            "launches": self.kernels.state(),
            "rng": distributed.gathered(
                {
                    **host_state(),
                    "cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
                    "mix": self.task.state(),
                }
            ),
        }

    @cached_property
    def identity(self) -> str:
        """Return what identifies the training samples."""
        return self.data.identity("train")

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of a trainer with the same settings.

        Raises:
            UserError: the training data or the number of processes has changed.
        """
        data = self.data
        if (data.classes, data.train.samples) != (state["classes"], state["samples"]):
            raise UserError(
                f"the training data has changed: it has {data.train.samples} samples of {len(data.classes)} classes, "
                f"while the run has seen {state['samples']} of {len(state['classes'])}.{_renamed(state['classes'], data.classes)}"
            )
        if state.get("data") not in (None, self.identity):
            raise UserError("the training data has changed: its samples have other names or labels than those that the run has seen.")
        if len(state["rng"]) != distributed.ranks():
            raise UserError(
                f"the run was one of {len(state['rng'])} processes, each with its part of every batch; this is one of "
                f"{distributed.ranks()}. Go on with as many: torchrun's --nproc-per-node times --nnodes, or no torchrun for one."
            )
        limits = {"epoch": self.settings.epochs, "batch": len(data.train), "updates": self.updates, "count": self.updates}
        limits |= {"skipped": state["updates"]}
        if wrong := [name for name, most in limits.items() if state[name] > most]:
            raise UserError(f"the checkpoint's {wrong[0]}: {state[wrong[0]]}; at most {limits[wrong[0]]} is expected under these settings.")
        groups, whole = self.updater.optimizer.param_groups, not self.updater.parts.sharded
        if said := fault_of_optimizer(state["optimizer"], groups, whole=whole):
            raise UserError(f"the checkpoint's {said}.")
        self.parallel.load_model_state(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.updater.load_state(state)
        self.epoch, self.batch, self.epoch_ended = state["epoch"], state["batch"], state["epoch_ended"]
        self.done, self.skipped, self.values = state["updates"], state["skipped"], dict(state["values"])
        self.window.copy_(state["window"])
        self.guard.load_state(state["nonfinite"])
        self.clock.load_state(state["clock"])
        self.kernels.load_state(state["launches"])
        self.monitor.best = best = Best(**state["best"])
        if best.values is not None:
            self.task.rows(best.values)  # if a figure is missing, fail here, not at the end of the run
        rng = state["rng"][distributed.rank()]
        self.task.load_state(rng["mix"])
        if rng["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], self.device)
        set_host_state(rng)

    def score_best(self) -> None:
        """Score the best weights on the test images, once; they do not influence any choice.

        Score them also on the held-out images if an earlier process evaluated them, because their pictures are not drawn yet.
        """
        if self.best.values is None or (self.data.test is None and self.pictured is not None) or not self.load_weights("best.pt"):
            return
        if self.pictured is None:
            self.pictured = self.evaluate(self.model, self.data.val)
        if self.data.test is not None:
            values = {f"test/{name}": value for name, value in self.evaluate(self.model, self.data.test).values.items()}
            self.values |= values
            self.folder.metrics(self.done, values)
        self.load_weights("last.pt")

    def load_weights(self, name: str) -> bool:
        """Load a checkpoint's weights into the model on every rank, averaged ones of best.pt; return whether the file exists."""
        state = None
        if distributed.rank() == 0 and (path := self.folder.path / "checkpoints" / name).is_file():
            state = checkpoint.load(path)
        there = bool(distributed.broadcast(state is not None))
        if there:
            self.parallel.load_model_state(state and ((name == "best.pt" and state["ema"]) or state["model"]))
        return there

    def finish(self) -> dict[str, float]:
        """Draw the best evaluation, record the artifacts, and return the run's final figures."""
        if self.profile is not None:
            self.profile.close()
        path: Path = self.folder.path
        best = path / "checkpoints" / "best.pt"
        if self.pictured is not None:
            for picture in self.task.pictures(self.pictured, path):
                self.folder.artifact(picture, "pictures")
            if rows := self.task.per_class(self.pictured):
                self.folder.artifact(write_rows(path / "per_class.csv", rows))
            self.folder.artifact(best, "checkpoints", digest=True)
            self.unexported = export_best(self.folder, self.config, lambda: next(iter(self.data.val)).images, self.console.say)
        values = self.clock.overall()
        values |= {f"best_{name.replace('/', '_')}": value for name, value in (self.best.values or {}).items()}
        values["best_epoch"] = float(self.best.epoch)
        return values

    def _make_ema(self) -> Any:
        if self.settings.ema is None:
            return None
        from timm.utils import ModelEmaV3

        return ModelEmaV3(self.model, decay=self.settings.ema, use_warmup=self.settings.ema_warmup)

    def _clear_window(self) -> None:
        self.window = torch.zeros(5 + len(self.task.score_names), dtype=torch.float64, device=self.device)

    def _stop_nonfinite(self) -> None:
        evidence = distributed.from_largest(self.guard.evidence(), "update")
        if distributed.rank() > 0:
            raise NonFiniteError
        path = self.folder.path / "nonfinite_batch.pt"
        checkpoint.save(dict(evidence), path)
        self.folder.artifact(path)
        raise NonFiniteError(
            f"{self.settings.max_nonfinite} updates in a row (trainer.max_nonfinite) had a loss or gradients that are nan or infinite.\n"
            f"The batch of the last one, update {evidence['update']}, is in {path}"
        )


def _renamed(before: list[str], now: list[str]) -> str:
    """Return which classes are gone and which are new, in words; empty if none are."""
    parts = [
        f"{what}: {', '.join(map(repr, odd[:5]))}{', …' * (len(odd) > 5)}"
        for what, odd in (("Gone", [each for each in before if each not in now]), ("New", [each for each in now if each not in before]))
        if odd
    ]
    if not parts and before != now:
        return f" Their order was {', '.join(before[:5])}, and is {', '.join(now[:5])}."
    return "".join(f" {part}." for part in parts)

"""Callbacks: a user's own code, called while a run trains."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.base.errors import UserError, unknown
from lab.config.objects import find, made


class Callback:
    """Methods that the trainer, a lab.training.trainer.Trainer, calls on every rank. An exception ends the run as FAILED.

    `trainer.folder.metrics(trainer.done, {"own/name": value})` records figures, which go to MLflow like all figures.
    `trainer.console.say(text)` prints.
    """

    def on_before_update(self, trainer: Any) -> None:
        """Run before each update."""

    def on_report(self, trainer: Any, values: dict[str, float]) -> None:
        """Run after each `trainer.log_every` updates, with their figures by name, such as train/loss."""

    def on_update(self, trainer: Any) -> None:
        """Run after each update; trainer.done counts them. Reading a tensor here waits for the device."""

    def on_epoch(self, trainer: Any) -> None:
        """Run at the end of each epoch, trainer.epoch."""

    def on_evaluation(self, trainer: Any, values: dict[str, float]) -> None:
        """Run after each evaluation of held-out data, with its metrics by name, such as top1 and loss."""

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        """Run after a checkpoint was written; only on the first rank."""

    def on_end(self, trainer: Any, status: str) -> None:
        """Run at the end: FINISHED, KILLED or FAILED."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    def __init__(self, targets: Sequence[str] = (), own: Sequence[Any] = ()) -> None:
        """Find and check the callbacks.

        Args:
            targets: `trainer.callbacks`: classes, which are made without arguments, or objects.
            own: objects, or classes as above.

        Raises:
            UserError: a callback is not found or cannot be made, has no method of Callback, or has an unknown on_ method.
        """
        named = [(target, find("trainer.callbacks", target)) for target in targets]
        self.all = [made("trainer.callbacks", title, each) for title, each in (*named, *((str(each), each) for each in own))]
        for each in self.all:
            _check(each)

    def __call__(self, event: str, *args: Any) -> None:
        for each in self.all:
            if (method := getattr(each, event, None)) is not None:
                method(*args)


def _check(callback: Any) -> None:
    methods = [name for name in dir(callback) if name.startswith("on_")]
    title = f"trainer.callbacks: {type(callback).__name__}"
    if not methods:
        raise UserError(f"{title} has none of the methods {', '.join(EVENTS)}.")
    for name in methods:
        if name not in EVENTS:
            raise unknown(f"{title}.{name}", name, EVENTS)
        given = [*inspect.signature(getattr(Callback, name)).parameters][1:]
        try:
            inspect.signature(getattr(callback, name), follow_wrapped=False).bind(*given)
        except TypeError as error:
            raise UserError(f"{title}.{name}: is called with ({', '.join(given)}), which it does not take: {error}.") from None
        except ValueError:  # a builtin has no signature
            pass

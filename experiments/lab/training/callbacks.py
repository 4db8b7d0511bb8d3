"""What a user's own code may do while a run trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.config.errors import UserError, unknown
from lab.config.objects import find, made


class Callback:
    """Called by the trainer, a lab.training.trainer.Trainer, on every rank. An exception ends the run as FAILED.

    `trainer.folder.metrics(trainer.done, {"own/name": value})` records figures, which go to MLflow as all others do.
    `trainer.console.say(text)` prints.
    """

    def on_update(self, trainer: Any) -> None:
        """After each update, trainer.done in all; reading a tensor here waits for the device."""

    def on_epoch(self, trainer: Any) -> None:
        """At the end of each epoch, trainer.epoch."""

    def on_evaluation(self, trainer: Any, values: dict[str, float]) -> None:
        """After each evaluation of held-out data, with its metrics by name, such as top1 and loss."""

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        """After a checkpoint was written; on the first rank alone."""

    def on_end(self, trainer: Any, status: str) -> None:
        """At the end: FINISHED, KILLED or FAILED."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    def __init__(self, targets: Sequence[str] = (), own: Sequence[Any] = ()) -> None:
        """
        Args:
            targets: of `trainer.callbacks`: classes, which are made without arguments, or objects.
            own: objects, or classes as above.

        Raises:
            UserError: one is not found or cannot be made, or has none of the methods of Callback, or one that Callback has not.
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

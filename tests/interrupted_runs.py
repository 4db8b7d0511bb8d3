"""Runs of train.py, each in a process of its own, that something befalls at a moment which the test chooses.

The processes are forked from a server that has imported the libraries already.
"""

import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warm import BEFOREHAND

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = [*BEFOREHAND, "train", "lab.training.assemble", "lab.run.active", "lab.training.summary", "lab.data.load"]


def server() -> Any:
    """What starts the processes. Threads would not survive the fork: a process of its own per run, with one thread for arithmetic."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["interrupted_runs", *LIBRARIES])
    return context


class Child:
    """A training in its own process group; `event` is what befalls it, and hears from it through `line`."""

    def __init__(self, context: Any, words: list[str], output: Path, event: Callable[..., None] | None = None, *given: Any) -> None:
        self.output = output
        self.line, other = context.Pipe()
        self.process = context.Process(target=_train, args=(words, output, event, (*given, other) if event else ()))
        self.process.start()
        other.close()

    def ended(self, timeout: float = 600) -> tuple[int, str]:
        """Exit status, and all that was printed."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, self.output.read_text()
        return self.process.exitcode, self.output.read_text()

    def send(self, number: int) -> None:
        """A signal to all its processes, as a terminal and a scheduler send it."""
        os.killpg(self.process.pid, number)

    def heard(self, timeout: float = 600) -> Any:
        assert self.line.poll(timeout), self.output.read_text()
        return self.line.recv()


def _train(words: list[str], output: Path, event: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    import train

    multiprocessing.set_start_method("fork", force=True)  # of data-loading workers, as in any other run on Linux
    os.setsid()
    os.chdir(output.parent)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # without buffers, which a kill would lose
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(each, "wb", 0), write_through=True) for each in (1, 2))
    if event is not None:
        event(*given)
    sys.exit(train.main(words))


def before_update(number: int, action: Callable[[Any], None]) -> None:
    from lab.training.trainer import Trainer

    update = Trainer.update

    def changed(self: Any, group: Any) -> None:
        if self.done == number:
            action(self)
        update(self, group)

    Trainer.update = changed  # type: ignore[method-assign]  # this process alone, which ends with the run


def killed_at(number: int, _line: Any) -> None:
    before_update(number, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))


def killed_in_checkpoint(_line: Any) -> None:
    """Killed when half of the first checkpoint is in its file."""
    from lab.run import checkpoint

    def save(state: Any, file: Any) -> None:
        whole = io.BytesIO()
        checkpoint_save(state, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_save, checkpoint.torch.save = checkpoint.torch.save, save


def signalled_at(number: int, line: Any) -> None:
    """Tells when it has come to this update, and goes on once the signal is there."""

    def wait(trainer: Any) -> None:
        line.send(number)
        while not trainer.stop.wanted:
            time.sleep(0.01)

    before_update(number, wait)


def signalled_twice_at(number: int, line: Any) -> None:
    """As `signalled_at`, but it tells of the signal and is then busy for ever."""
    from lab.base.process import Stop

    Stop.PAUSE = 0.0

    def wait(trainer: Any) -> None:
        for _ in range(2):
            line.send(number)
            while not trainer.stop.wanted:
                time.sleep(0.01)
        signal.pause()

    before_update(number, wait)


def full_at(number: int, size: int, _line: Any) -> None:
    """From this update on no file can grow beyond `size` bytes, as if the disk were full."""
    before_update(number, lambda trainer: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for line in (folder / "metrics.jsonl").read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


TIMED = ("_ms", "_per_second", "_share", "_mib", "/seconds")


def figures(folder: Path) -> dict[tuple[str, int], Any]:
    """All that is on record but what depends on the machine, by name and step; each is there once."""
    found: dict[tuple[str, int], Any] = {}
    for record in records(folder, "metrics"):
        for name, value in record["values"].items():
            assert (name, record["step"]) not in found, (name, record["step"])
            found[name, record["step"]] = value
    for record in records(folder, "evaluation"):
        assert ("evaluation", record["step"]) not in found
        found["evaluation", record["step"]] = {name: value for name, value in record.items() if name != "time"}
    return {key: value for key, value in found.items() if not key[0].endswith(TIMED) and not key[0].startswith("system/")}

"""What every process but the first does: the same training, without folder, tracking and table."""

import signal
import traceback
from typing import Any

from lab import distributed, peers
from lab.console import Console
from lab.guard import NonFiniteError
from lab.run_folder import RunFolder
from lab.trainer import Trainer


class NoFolder(RunFolder):
    """Keeps nothing: only the first rank writes."""

    def __init__(self) -> None:
        pass

    def record(self, kind: str, **fields: Any) -> None:
        pass

    def artifact(self, path: Any, folder: str = "") -> None:
        pass


def follow(trainer: Trainer) -> int:
    """Train along; the first rank says how the run ended."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with peers.watched(lambda reason: None):
            trainer.fit(NoFolder(), Console(trainer.updates, quiet=True))
            distributed.stop()
    except KeyboardInterrupt:
        return 130
    except NonFiniteError:
        return 0  # all ranks stop together, and the first reports it
    except Exception as error:
        peers.announce("".join(traceback.format_exception(error)), f"{type(error).__name__}: {error}")
        return 1
    return 0

"""Training on every rank except the first: the same training, without folder, tracking and table."""

from typing import Any

from lab.base.errors import RankError
from lab.base.records import History
from lab.base.stop import Stop
from lab.processes import distributed, rank_failures
from lab.run.folder import RunFolder
from lab.run.resume import Earlier, load_state, restore
from lab.training.console import Console
from lab.training.trainer import Trainer


class NoFolder(RunFolder):
    """A folder that keeps nothing, because only the first rank writes."""

    def __init__(self) -> None:
        self.history = History()

    def record(self, kind: str, **fields: Any) -> None:
        pass

    def artifact(self, path: Any, folder: str = "", *, digest: bool = False) -> None:
        pass

    def tracked(self) -> dict[str, str]:
        return {}


def train_on_other_rank(trainer: Trainer, earlier: Earlier | None) -> int:
    """Run the training on this rank; return the exit status. The first rank reports how the run ended."""
    stop = Stop(checkpoint_first=True, quiet=True)
    try:
        with rank_failures.watched(lambda error: None):
            if earlier and (state := load_state(earlier)) is not None:
                restore(trainer, earlier, state)
            trainer.fit(NoFolder(), Console(trainer.updates, quiet=True), stop)
            distributed.stop()
    except rank_failures.TOGETHER:
        return 0
    except KeyboardInterrupt:
        return stop.status
    except RankError:
        return 1
    return 0

"""Runs: their folders, records and checkpoints. The package is also a function: `lab.runs("runs/*")` reads runs into one frame."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Runs(ModuleType):
    """Let `lab.runs` be called, because that is the name of what it returns."""

    def __call__(self, pattern: str | Path | None = None) -> Any:
        """Return a pandas frame with a row for each run folder that the pattern matches, the oldest first, also within sweeps.

        Without a pattern these are the runs where `lab.train` writes them by default: in LOSSFORGE_RUNS, the folder of the user's file,
        or runs/.

        Columns: name, app, status, seconds, each setting, and the last value of each metric; the index is the folder.

        Raises:
            UserError: no run matches, or a run's records are damaged.
        """
        from lab.results.frames import runs_frame

        return runs_frame(pattern)


sys.modules[__name__].__class__ = Runs

"""Runs: their folders, records and checkpoints. The package is also a function: `lab.runs("runs/*")` reads runs into one frame."""

import sys
from types import ModuleType
from typing import Any


class Runs(ModuleType):
    """Let `lab.runs` be called, because that is the name of what it returns."""

    def __call__(self, pattern: str = "runs/*") -> Any:
        """Return a pandas frame with a row for each run folder that the pattern matches, the oldest first, also within sweeps.

        Columns: name, app, status, seconds, each setting, and the last value of each metric; the index is the folder.

        Raises:
            UserError: no run matches, or a run's records are damaged.
        """
        from lab.results.frames import runs_frame

        return runs_frame(pattern)


sys.modules[__name__].__class__ = Runs

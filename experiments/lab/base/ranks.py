"""How this process was started: by itself, or by torchrun. Needs neither torch nor a process group."""

import os

from lab.base.errors import UserError


def launched() -> int:
    """Return how many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_here() -> int:
    """Return how many of them run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", launched()))


def is_rank_zero() -> bool:
    """Return whether this is the rank that writes files and prints."""
    return launched() == 1 or os.environ.get("RANK", "0") == "0"


def local_rank() -> int:
    """Return the number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0")) if launched() > 1 else 0


def refuse_several(app: str) -> None:
    """Raise UserError if torchrun started several processes of an app that runs in one."""
    if launched() > 1:
        raise UserError(f"{app} runs in one process; torchrun started {launched()}. Start it without torchrun.")

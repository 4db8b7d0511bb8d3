"""Write files so that each is either complete or absent."""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from lab.config.errors import UserError

T = TypeVar("T")
UNFINISHED = ".unfinished-"


def write_whole(path: Path, write: Callable[[IO[bytes]], T]) -> T:
    """Write a file under a temporary name, flush it to disk and rename it; until then an earlier file stays. No half-written file remains.

    Args:
        path: the file's path; its folder is made if it does not exist.
        write: called with the open file, whose `name` is its path; its result is returned.

    Raises:
        UserError: the file cannot be written.
    """
    temporary = path.with_name(f"{UNFINISHED}{path.name}")  # with the same suffix, because libraries choose the format by it
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True)
        temporary.unlink(missing_ok=True)  # of a killed process, or a stranger's link
        with temporary.open("xb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return result
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        # torch.save complains that it cannot finish the file; the reason is the error before that
        reason = error.__context__ if isinstance(error, RuntimeError) and error.__context__ else error
        raise unwritable(path, reason) if isinstance(reason, OSError) else reason from None


def try_lock(path: Path, *, needed: bool = True) -> IO[str] | None:
    """Return a file, opened and locked; None if another process has the lock, which ends with the processes that hold or inherited it.

    needed: raise OSError on a file system without locks; else the file is returned there, too.
    """
    if needed:
        path.parent.mkdir(exist_ok=True)
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        if needed:
            file.close()
            raise
    return file


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as the record of an artifact holds it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write text as a complete file in UTF-8, with escapes for bytes of a name that is not; raise as `write_whole`."""
    write_whole(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Save a matplotlib figure as a complete file, in the format of the path's suffix; raise as `write_whole`."""
    write_whole(path, lambda file: figure.savefig(file, format=path.suffix[1:], **options))


def remove_unfinished(*folders: Path) -> None:
    """Remove the temporary files that `write_whole` leaves if its process is killed."""
    for folder in folders:
        for path in folder.glob(f"{UNFINISHED}*"):
            path.unlink()


def refuse_links(folder: Path) -> None:
    """Raise UserError if a link in a folder, or in a folder there, leads out, or a pipe is there: what is written would go elsewhere."""
    inside = f"{os.path.realpath(folder)}{os.sep}"
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if path.is_symlink():
            if not os.path.realpath(path).startswith(inside):
                said = f"{path}: is a link that leads out of {folder}, and nothing is written there."
                raise UserError(f"{said} Put what it leads to in its place, or say trust=PATH if you made the link.")
        elif not path.is_dir() and not path.is_file():
            raise UserError(f"{path}: is neither a file nor a folder, and nothing is written there.")


def unwritable(path: Path, error: OSError) -> UserError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    way_out = "Make room there" if full else "Make it writable, or choose another folder"
    return UserError(f"{path}: cannot be written: {error.strerror}. {way_out}; what was saved before is whole.")

"""Read and write files in folders that somebody else may have made: regular files alone, and each written one complete or absent."""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TypeVar

from lab.base.errors import UserError

T = TypeVar("T")
UNFINISHED = ".unfinished-"
LARGEST = 2**24  # bytes of a file of settings or of a state


class UnfitFileError(UserError, OSError):
    """What a path leads to is not read or written: a pipe, a device, a file that is too large, or a link to write through."""


def refuse_special(path: Path | str, largest: int | None = None) -> None:
    """Refuse what is not a regular file, because a pipe is waited for without end, and a device such as /dev/zero has no end.

    Args:
        path: links in it are followed.
        largest: the most bytes that the file may have; None for any number.

    Raises:
        UnfitFileError: it is something else than a regular file, or larger.
        OSError: there is nothing.
    """
    _refuse(path, os.stat(path), largest)


def open_to_read(path: Path, largest: int | None = None) -> BufferedReader:
    """Open a regular file; raise as `refuse_special`."""
    refuse_special(path, largest)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe put there since then is not waited for
    try:
        _refuse(path, os.fstat(file), largest)
    except UnfitFileError:
        os.close(file)
        raise
    return os.fdopen(file, "rb")


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file that has at most `largest`; raise as `refuse_special`."""
    with open_to_read(path, largest) as file:
        if len(found := file.read(largest + 1)) > largest:
            raise _too_large(path, largest)
    return found


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text of a regular file in UTF-8; raise as `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, largest).decode()


def _refuse(path: Path | str, found: os.stat_result, largest: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError(f"{path}: is not a regular file.")
    if largest is not None and found.st_size > largest:
        raise _too_large(path, largest)


def _too_large(path: Path | str, largest: int) -> UnfitFileError:
    return UnfitFileError(f"{path}: has more than {largest:,} bytes, the most that are read of such a file.")


def open_to_write(path: Path, flags: int = os.O_WRONLY, mode: int = 0o666) -> int:
    """Open a regular file as it is, or a new one; return its descriptor. Nothing is truncated, and a link at the path is not followed.

    Args:
        path: the file.
        flags: of os.open, such as os.O_WRONLY | os.O_APPEND.
        mode: the permissions of a new file.

    Raises:
        UnfitFileError: a link, a pipe or a device is there.
        OSError: the file cannot be opened.
    """
    refuse_to_write(path)
    file = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UnfitFileError(f"{path}: is not a regular file, and nothing is written there.")
    return file


def refuse_to_write(path: Path) -> None:
    """Raise UnfitFileError if a link, a pipe or a device is at a path; there may be nothing."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path).st_mode
        if stat.S_ISLNK(found):
            raise UnfitFileError(f"{path}: is a link, and nothing is written through it. Delete it, or put what it leads to in its place.")
        if not stat.S_ISREG(found):
            raise UnfitFileError(f"{path}: is not a regular file, and nothing is written there.")


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file to append to it, without a buffer; raise as `open_to_write`."""
    return os.fdopen(open_to_write(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it inside the block; the file's contents stay. Raise as `open_to_write`."""
    with open_to_append(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a data worker that was forked meanwhile has the file open, too


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


def try_lock(path: Path, *, needed: bool = True) -> IO[bytes] | None:
    """Return a file, opened and locked; None if another process has the lock, which ends with the processes that hold or inherited it.

    needed: raise OSError on a file system without locks; else the file is returned there, too.
    """
    if needed:
        path.parent.mkdir(exist_ok=True)
    file = open_to_append(path)
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
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write text as a complete file in UTF-8, with escapes for bytes of a name that is not; raise as `write_whole`."""
    write_whole(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def link_whole(source: Path, path: Path) -> bool:
    """Make `path` a second name of a file of this user, in place of a copy; return False if the file system cannot.

    For files that are replaced and never changed: `write_whole` gives the first name a new file, and the second name keeps the old one.
    """
    source, temporary = source.resolve(), path.with_name(f"{UNFINISHED}{path.name}")
    try:
        if path.exists() and path.samefile(source):
            return True
        if source.stat().st_uid != os.geteuid():
            return False  # its owner could change the file under both names
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        temporary.replace(path)
    except OSError:
        return False
    return True


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Save a matplotlib figure as a complete file, in the format of the path's suffix; raise as `write_whole`."""
    write_whole(path, lambda file: figure.savefig(file, format=path.suffix[1:], **options))


def remove_unfinished(*folders: Path) -> None:
    """Remove the temporary files that `write_whole` leaves if its process is killed."""
    for folder in folders:
        for path in folder.glob(f"{UNFINISHED}*"):
            if path.is_symlink() or not path.is_dir():
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
    if isinstance(error, UnfitFileError):
        return error
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    way_out = "Make room there" if full else "Make it writable, or choose another folder"
    return UserError(f"{path}: cannot be written: {error.strerror}. {way_out}; what was saved before is whole.")

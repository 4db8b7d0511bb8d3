"""Where a store's files are. A store in a file may be another person's, and name places for its files that are not theirs to name."""

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lab.base.errors import UserError
from lab.base.files import UnfitFileError, refuse_special, refuse_to_write
from lab.base.paths import sqlite_file
from lab.config.schema import TrackingConfig

CONTROLS = re.compile("[\0-\x1f\x7f-\x9f]")
LOCK = ".lock"  # ends the name of the file that we lock while we create or migrate a store
SQLITES = ("-journal", "-wal", "-shm")  # end the names of files that SQLite writes beside a database
TABLE = "alembic_version"  # a table that every store of MLflow has


def refuse_foreign(uri: str, tracking: TrackingConfig) -> None:
    """Refuse an SQLite store whose experiment keeps its files outside of the store's folder, before a run starts.

    It does not import MLflow. `Store` checks each place once more when it writes there.

    Raises:
        UserError: it does, and tracking.artifacts_outside does not allow it; or as `refuse_links_to_write`.
    """
    database = sqlite_file(uri)
    if database is None:
        return
    refuse_links_to_write(database)
    if not database.is_file():
        return
    # MLflow's own error names a file that is not such a store
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as store:
        found = store.execute("SELECT artifact_location FROM experiments WHERE name = ?", (tracking.experiment,)).fetchone()
        if found and (said := outside(uri, str(found[0]), tracking.artifacts_outside)):
            raise UserError(f"tracking.uri={uri}: experiment {tracking.experiment}: {said}")


def refuse_links_to_write(database: Path) -> None:
    """Refuse a store in a file if opening it would change another file: by a link beside it, or as a link to another kind of file.

    Raises:
        UnfitFileError: it would.
    """
    refuse_to_write(database.with_name(f"{database.name}{LOCK}"))
    if not database.exists():
        return  # a link that leads to nothing is replaced
    refuse_special(database)
    real = database.resolve()  # SQLite names its files after the one that a link leads to
    for ending in SQLITES:
        refuse_to_write(real.with_name(f"{real.name}{ending}"))
    if database.is_symlink():
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(f"{real.as_uri()}?mode=ro", uri=True)) as store:
            if store.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone():
                return
        raise UnfitFileError(f"{database}: is a link to {real}, which is not a store of MLflow, and would become one. Delete the link.")


def outside(uri: str, location: str, allowed: bool) -> str:
    """Return why files of a store must not be written to or read from a location; empty if they may.

    Files of a store in a file are expected in the folder of that file, after links are followed. A server's are where the server says.
    """
    folders = _folders(uri)
    if allowed or not folders or _is_below(location, folders):
        return ""
    return _said(location, folders)


def leads_outside(uri: str, place: str, names: Iterable[str]) -> str:
    """Return why files must not be written to or read from a folder that MLflow took a location for; empty if they may.

    names: of the files, relative to the folder.
    """
    folders = _folders(uri)
    for path in (Path(place), *(Path(place, name) for name in names)) if folders else ():
        if not _is_inside(path, folders) or (path != Path(place) and path.is_symlink()):
            return _said(str(path), folders)
    return ""


def _said(location: str, folders: list[Path]) -> str:
    return (
        f"its files are at {location}, outside of {folders[0]}, so that the store may be another person's. If it is yours, "
        "give tracking.artifacts_outside=true; else another tracking.uri= or tracking.experiment=."
    )


def _folders(uri: str) -> list[Path]:
    """Return the folders of a store in a file: that of its name, and that of the file that a link leads to; none for a server."""
    if database := sqlite_file(uri):
        return [database.parent, database.resolve().parent]
    if uri.startswith("file:") or "://" not in uri:
        return [Path(unquote(urlsplit(uri).path)).absolute()]
    return []


def _is_below(location: str, folders: list[Path]) -> bool:
    # urlsplit drops control characters and outer blanks, MLflow keeps them; only the names of the store's own folders may have some, quoted
    if location != location.strip() or CONTROLS.search(location):
        return False
    place = urlsplit(location)
    if place.scheme not in ("", "file") or place.netloc or place.query or place.fragment:
        return False
    path = unquote(place.path)
    return _is_inside(Path(path), folders) and any(not CONTROLS.search(path.removeprefix(str(folder))) for folder in folders)


def _is_inside(path: Path, folders: list[Path]) -> bool:
    real = os.path.realpath(path)
    return any(Path(real).is_relative_to(folder.resolve()) for folder in folders)

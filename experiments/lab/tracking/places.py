"""Where a store's files are. A store in a file may be another person's, and name places for its files that are not theirs to name."""

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lab.config.errors import UserError
from lab.config.schema import TrackingConfig


def sqlite_file(uri: str) -> Path | None:
    return Path(unquote(uri.removeprefix("sqlite:///"))).absolute() if uri.startswith("sqlite:///") else None


def refuse_foreign(uri: str, tracking: TrackingConfig) -> None:
    """Refuse an SQLite store whose experiment keeps its files outside of the store's folder, before a run starts.

    It does not import MLflow. `Store` checks each place once more when it writes there.

    Raises:
        UserError: it does, and tracking.artifacts_outside does not allow it.
    """
    database = sqlite_file(uri)
    if database is None or not database.is_file():
        return
    # MLflow's own error names a file that is not such a store
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as store:
        found = store.execute("SELECT artifact_location FROM experiments WHERE name = ?", (tracking.experiment,)).fetchone()
        if found and (said := outside(uri, str(found[0]), tracking.artifacts_outside)):
            raise UserError(f"tracking.uri={uri}: experiment {tracking.experiment}: {said}")


def outside(uri: str, location: str, allowed: bool) -> str:
    """Return why files of a store must not be written to or read from a location; empty if they may.

    Files of a store in a file are expected in the folder of that file, after links are followed. A server's are where the server says.
    """
    folders = _folders(uri)
    if allowed or not folders or any(_is_below(location, folder) for folder in folders):
        return ""
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


def _is_below(location: str, folder: Path) -> bool:
    place = urlsplit(location)
    if place.scheme not in ("", "file") or place.netloc or place.query or place.fragment:
        return False
    return Path(unquote(place.path)).resolve().is_relative_to(folder.resolve())

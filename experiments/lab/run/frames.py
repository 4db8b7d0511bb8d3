"""Runs' records as pandas frames, and tables of results as CSV files."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.base.errors import UserError
from lab.base.files import write_text
from lab.base.formats import csv_row
from lab.base.records import NAME, read_history, records_of
from lab.config.user import runs_folder

if TYPE_CHECKING:
    import pandas


def runs_frame(pattern: str | Path | None) -> "pandas.DataFrame":
    """Return a row for each run folder that matches, or that a matching folder of a sweep holds; None: all in the default folder of runs.

    Raises:
        UserError: no run matches, or a run's records are damaged.
    """
    import pandas

    wanted = os.path.join(glob.escape(str(runs_folder(None))), "*") if pattern is None else os.path.expanduser(os.fspath(pattern))
    found = [Path(path) for path in glob.glob(wanted)]
    folders = {folder for path in found for folder in (path, *path.glob("*")) if (folder / NAME).is_file()}
    rows = {}
    for folder in folders:
        history = read_history(folder)
        if history.start is None:
            continue
        values = {name: float(value) for name, value in history.last.items()}
        named = {"name": history.start["name"]}  # the setting of this name may be None
        about = named | {"app": history.start.get("app"), "status": history.status, "seconds": history.seconds}
        rows[history.start["time"], os.path.relpath(folder)] = about | history.start["params"] | named | values
    if not rows:
        raise UserError(f"lab.runs: no run folder matches {wanted}; lab.runs() reads all of {runs_folder(None)}.")
    keys = sorted(rows)
    return pandas.DataFrame([rows[key] for key in keys], index=pandas.Index([folder for _, folder in keys], name="folder"))


def history_frame(folder: Path) -> "pandas.DataFrame":
    """Return a run's metrics: a row an update, a column a metric, nan where it was not recorded."""
    import pandas

    rows: dict[int, dict[str, float]] = {}
    for record in records_of(folder):
        if record["kind"] == "metrics":
            values = {name: float(value) for name, value in record["values"].items() if not name.startswith("system/")}
            if values:
                rows.setdefault(record["step"], {}).update(values)
    return pandas.DataFrame.from_dict(rows, orient="index").sort_index().rename_axis("update")


def frame_of(values: dict[str, float]) -> Any:
    """Return a pandas frame with one column, `value`, and a row for each name."""
    import pandas

    return pandas.Series(values, name="value", dtype=float).rename_axis("metric").to_frame()


def in_short(values: dict[str, float]) -> str:
    """Return the first few figures that name no class, for a result's text."""
    shown = [f"{name}={value:.4g}" for name, value in values.items() if "/" not in name and name != "samples"]
    return ", ".join(shown[:4])


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as CSV, with `csv_cell` applied to names of columns and to values; a value that a row lacks is empty."""
    import pandas

    # pandas quotes the characters of its line ends alone, and a name may hold either; as objects, integers stay integers beside empty cells
    return pandas.DataFrame([csv_row(row) for row in rows], dtype=object).to_csv(index=False, lineterminator="\r\n")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as a complete CSV file, and return its path; raise as `write_text`."""
    write_text(path, csv_text(rows))
    return path

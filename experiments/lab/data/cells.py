"""Columns of tables, read with pandas; a bad cell is named with its row and column."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from lab.base.errors import UserError, first_line
from lab.data.images.files import CorruptError, refuse_bytes, refuse_unfit

if TYPE_CHECKING:
    import pandas

LONGEST = 2**20  # characters of a table's first line
CELL = 64  # bytes of a number or of a short text as Python holds it
BATCH = 2**20  # rows
Where = Callable[[int], str]  # from a row's position to its name in messages


DELIMITERS = (",", ";", "\t", "|")


def first_row(file: Path, errors: str = "strict") -> tuple[list[str], str]:
    """Return the cells of a CSV file's first line, and what divides them: that of DELIMITERS which gives most, a comma if none does."""
    with file.open(newline="", encoding="utf-8-sig", errors=errors) as text:
        line = text.readline(LONGEST)
    divided = [(next(csv.reader([line], delimiter=each), []), each) for each in DELIMITERS]
    return max(divided, key=lambda each: len(each[0]))


def read_cells(file: Path, setting: str, separator: str | None = None) -> "pandas.DataFrame":
    """Read a table, a Parquet file or a CSV file, whose cells are texts; None: an empty cell. An empty file has no columns.

    separator: what divides the cells of a CSV file; None to find it in the first line.

    Raises:
        UserError: it cannot be read.
    """
    import pandas

    try:
        refuse_unfit(file)
        if file.suffix.lower() == ".parquet":
            table = _read_parquet(file)
        else:
            separator = separator or first_row(file)[1]
            with warnings.catch_warnings(record=True, category=pandas.errors.ParserWarning, action="always") as dropped:
                table = pandas.read_csv(file.absolute(), dtype=str, keep_default_na=False, index_col=False, sep=separator, compression=None)
            if dropped:
                _refuse_surplus(file, setting, len(table.columns), separator)
    except pandas.errors.EmptyDataError:
        return pandas.DataFrame()
    except UnicodeDecodeError as error:
        said = f"byte 0x{error.object[error.start]:02x} is not of UTF-8, in which a table is expected"
        raise UserError(f"{setting}={file}: cannot be read: {said}. Save it as UTF-8, or: iconv -f cp1252 -t utf-8 OLD > NEW") from None
    except (CorruptError, OSError, ValueError, ImportError, csv.Error) as error:
        raise UserError(f"{setting}={file}: cannot be read: {first_line(error)}") from None
    table = table.reset_index(drop=True).rename(columns=lambda name: str(name).strip())
    if (again := table.columns[table.columns.duplicated()]).any():
        raise UserError(f"{setting}={file}: has two columns {again[0]!r}; different names are expected.")
    return table.astype(object).where(table.notna(), None)


def _read_parquet(file: Path) -> "pandas.DataFrame":
    """Read a Parquet file without pandas' own description in it, which may be wrong; a small one may hold very many rows.

    Raises:
        ValueError: it cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        schema, texts = refuse_large_parquet(file)
        batches, unpacked = [], 0
        with parquet.ParquetFile(file, read_dictionary=texts) as opened:  # a text of megabytes may stand for each of a million rows
            for batch in opened.iter_batches(BATCH):
                batch.validate(full=True)  # texts that are not UTF-8 would end the app where they are read
                batches.append(batch)
                refuse_bytes(unpacked := unpacked + sum(map(_unpacked, batch.columns)))
        return pyarrow.Table.from_batches(batches, batches[0].schema if batches else schema).cast(schema).to_pandas(ignore_metadata=True)
    except Exception as error:  # a damaged file raises many kinds
        raise ValueError(first_line(error)) from None


def refuse_large_parquet(file: Path) -> tuple[Any, list[str]]:
    """Return a Parquet file's schema for Arrow, and the columns of texts or bytes.

    Raises:
        CorruptError: by its head it unpacks to more bytes than are read; or any error of a damaged file.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        about, schema = opened.metadata, opened.schema_arrow
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    chunks = [(about.schema.column(i), group.column(i)) for group in groups for i in range(about.num_columns)]
    cells = sum(chunk.num_values * max(CELL, column.length or 0) for column, chunk in chunks)
    refuse_bytes(cells + sum(group.total_byte_size for group in groups))
    return schema, sorted({column.path for column, chunk in chunks if chunk.physical_type == "BYTE_ARRAY"})


def _unpacked(column: Any) -> int:
    """Return the bytes of an Arrow array when each value stands for itself."""
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        lengths = compute.take(compute.binary_length(column.dictionary), column.indices)
        return compute.sum(lengths).as_py() or 0
    if types.is_struct(column.type):
        return sum(map(_unpacked, column.flatten()))
    return _unpacked(column.flatten()) if types.is_list(column.type) or types.is_large_list(column.type) else column.nbytes


def _refuse_surplus(file: Path, setting: str, columns: int, separator: str) -> None:
    """Raise UserError for a cell that no column has; an empty one, after a comma at a row's end, is none."""
    with file.open(newline="", encoding="utf-8-sig") as text:
        for row in csv.reader(text, delimiter=separator):
            if surplus := [cell for cell in row[columns:] if cell.strip()]:
                raise UserError(
                    f"{setting}={file}: {surplus[0]!r} is in no column, in the row that begins with {row[0]!r}; name the column."
                )


def rows_of(file: Path) -> Where:
    """Return a function that names a row by its number in the file."""
    first = 1 if file.suffix.lower() == ".parquet" else 2
    return lambda number: f"{file}, row {number + first}"


def as_text(cell: Any) -> str:
    """Return a cell as a text: bytes, which Parquet may hold, by UTF-8, and a float such as 1.0, which was an integer, as that."""
    if isinstance(cell, bytes):
        return cell.decode(errors="backslashreplace").strip()
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53 else cell).strip()


def texts(table: Any, name: str, where: Where) -> list[str]:
    """Return a column's cells as texts; an empty one is an error."""
    found = ["" if each is None else as_text(each) for each in table[name]]
    if several := [number for number, each in enumerate(table[name]) if isinstance(each, (dict, list, numpy.ndarray))]:
        number = several[0]
        raise UserError(
            f"{where(number)}, column {name}: {found[number]:.100}; one value is expected. Lists of labels are for task=multilabel."
        )
    if "" in found:
        raise UserError(f"{where(found.index(''))}, column {name}: is empty; fill it in, or leave the row out.")
    return found


def numbers(table: Any, name: str, where: Where, least: float | None = None) -> Tensor:
    """Return a column's cells as finite numbers (N,), float32."""
    import pandas

    column = table[name]
    values = torch.tensor(pandas.to_numeric(column, errors="coerce").to_numpy(dtype="float64", na_value=float("nan")))
    wrong = ~values.isfinite() if least is None else ~(values.isfinite() & (values >= least))
    if wrong.any():
        number = int(wrong.int().argmax())
        limit = "" if least is None else f" of at least {least:g}"
        raise UserError(f"{where(number)}, column {name}: {column.iloc[number]!r}; a finite number{limit} is expected.")
    return values.float()

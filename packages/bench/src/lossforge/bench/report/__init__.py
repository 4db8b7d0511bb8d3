"""A run's figures as data: one JSON file that says where they come from, with one row for each case and contender."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from lossforge.bench.record import Case

SCHEMA = 2
TIMING = "back to back, contenders in turns"
"""How times are measured now; a report says how its own were."""


def write_text(path: Path, text: str) -> None:
    """Write a text beside the file and rename it, so that neither a reader nor an interrupt meets half of it; a link is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with draft.open("x", encoding="utf-8") as file:  # refuses a link
        file.write(text)
    draft.replace(path)


def said(error: Exception) -> str:
    """Return the status of a contender that raised an error, in one line without a terminal's colours."""
    if isinstance(error, ModuleNotFoundError):
        return f"needs {error.name}, which is not installed"
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return f"failed: {type(error).__name__}: {(text.splitlines() or [''])[0][:200]}"


def spread_of(figure: str) -> tuple[str, str]:
    """Return the fields of a figure's 20 % and 80 % quantiles."""
    what, line, unit = figure.rpartition("_")
    return f"{what}{line}low_{unit}", f"{what}{line}high_{unit}"


@dataclass
class Row:
    """The figures of one contender on one case. Times are in ms unless the name says otherwise; None: not measured.

    Attributes:
        suite, loss, variant, use, shape, dtype: the case, as in cases.Case.
        contender: one of cases.CONTENDERS.
        status: "ok", or why there are no figures.
        value_error: relative error of the loss, against float64.
        gradient_error: of the logits' gradient, or of the gradient of a linear layer's input.
        weight_error: of the gradient of a linear layer's weight.
        ms: forward and backward, of calls back to back. low_ms and high_ms are its 20 % and 80 % quantiles, and so for every other figure.
        idle_ms: the same of one call from an idle host, until the device is done.
        forward_ms: forward without gradient, of calls back to back.
        floor_ms, forward_floor_ms: least bytes over the copy rate, and over the read rate.
        peak_mib: most memory allocated during the call.
        host_us: wall time of a call, where the host limits it.
        first_ms: wall time of the first call, with compilation.
        recompiled_batch, recompiled_options: compilations at other batch sizes, and with other options.
    """

    suite: str
    loss: str
    variant: str
    use: str
    shape: list[int]
    dtype: str
    contender: str
    status: str = "ok"
    value_error: float | None = None
    gradient_error: float | None = None
    weight_error: float | None = None
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    forward_ms: float | None = None
    forward_low_ms: float | None = None
    forward_high_ms: float | None = None
    idle_ms: float | None = None
    idle_low_ms: float | None = None
    idle_high_ms: float | None = None
    floor_ms: float | None = None
    forward_floor_ms: float | None = None
    peak_mib: float | None = None
    host_us: float | None = None
    host_low_us: float | None = None
    host_high_us: float | None = None
    first_ms: float | None = None
    recompiled_batch: int | None = None
    recompiled_options: int | None = None

    @classmethod
    def of(cls, case: Case, contender: str) -> "Row":
        """Return a row without figures."""
        return cls(case.suite, case.loss, case.variant, case.use, list(case.shape), case.dtype, contender)

    @property
    def case(self) -> tuple[str, str, str, str]:
        return self.loss, self.variant, "x".join(map(str, self.shape)), self.dtype

    @property
    def label(self) -> str:
        return " ".join(filter(None, self.case))

    def put(self, name: str, found: Any) -> None:
        """Set a figure's median and quantiles from measure.Times."""
        for field_of, value in zip((name, *spread_of(name)), (found.median, found.low, found.high), strict=True):
            setattr(self, field_of, value)

    def fail(self, error: Exception) -> None:
        """Record the error as the status; times are set only where none occurs."""
        self.peak_mib = None
        self.status = said(error)

    def share(self) -> float | None:
        return self.floor_ms / self.ms if self.floor_ms and self.ms else None

    def forward_share(self) -> float | None:
        return self.forward_floor_ms / self.forward_ms if self.forward_floor_ms and self.forward_ms else None


@dataclass
class Report:
    gpu: str
    versions: dict[str, str]
    commit: str
    date: str
    seconds: float = 0.0
    copy_bytes_per_second: float | None = None
    read_bytes_per_second: float | None = None
    timing: str = TIMING
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n")

    def by_case(self, *suites: str) -> dict[tuple[str, str, str, str], dict[str, Row]]:
        """Group the rows of these suites, or of all, by case and contender, in their order."""
        found: dict[tuple[str, str, str, str], dict[str, Row]] = {}
        for row in self.rows:
            if not suites or row.suite in suites:
                found.setdefault(row.case, {})[row.contender] = row
        return found


class SchemaError(ValueError):
    """A file that is not a report of this schema."""


def load(path: Path) -> Report:
    """Read a report.

    Raises:
        SchemaError: the file does not hold a report of this schema.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path}: {error}") from None
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        raise SchemaError(f"{path}: not a report of schema {SCHEMA}")
    rows = tree.pop("rows", None)
    if not isinstance(rows, list):
        raise SchemaError(f"{path}: has no list of rows")
    report = _checked(Report, tree, str(path))
    report.rows = [_checked(Row, row, f"{path}: row {number}") for number, row in enumerate(rows)]
    return report


def _checked(kind: Any, values: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(values, dict):
        raise SchemaError(f"{where}: is not an object")
    if strange := sorted(set(values) - set(hints)):
        raise SchemaError(f"{where}: unknown {', '.join(strange)}")
    for item in dataclasses.fields(kind):
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if needed and item.name not in values:
            raise SchemaError(f"{where}: lacks {item.name}")
        if item.name in values and not _fits(values[item.name], hints[item.name]):
            raise SchemaError(f"{where}: {item.name} is {values[item.name]!r}, wanted {hints[item.name]}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    plain = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
    if isinstance(value, bool):
        return bool in plain
    return isinstance(value, plain) or (isinstance(value, int) and float in plain)

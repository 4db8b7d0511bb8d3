"""Write docs/settings.md, all settings of the apps, from their schemas; --check only says whether it is stale."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from generated import write_or_check

from lab.compare.schema import CompareConfig
from lab.config.choices import SCHEMAS
from lab.config.help import takes
from lab.config.schema import BenchConfig, TrainConfig
from lab.sweep.schema import SEARCHES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Written by `tools/settings_page.py` from the schemas. A default is the schema's; an option's file in `conf/` may set another value, which
`experiments/train.py --help GROUP` shows. `--cfg` prints the settings of a command.
"""
GROUPS = {"task": "Tasks", "model": "Models", "loss": "Losses", "box_loss": "Losses of boxes, of task=detection", "data": "Data sets"}


def default(item: "Field[Any]") -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def rows(schema: Any, path: str, known: Iterable[str] = ()) -> Iterator[str]:
    """Yield a table's row for each setting of a schema that is not `known`, those of schemas within it too."""
    for item in fields(schema):
        if item.name in known or (path and item.name == "name"):
            continue
        if item.default_factory is not MISSING and is_dataclass(inner := item.default_factory()):
            yield from rows(inner, f"{path}{item.name}.")
        else:
            cells = f"`{path}{item.name}`", f"`{default(item)}`", takes(item), item.metadata.get("meaning", "")
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(schema: Any, path: str, known: Iterable[str] = ()) -> str:
    lines = list(rows(schema, path, known))
    return "\n".join(["| setting | default | takes | meaning |", "| --- | --- | --- | --- |", *lines, ""]) if lines else ""


def group(name: str) -> Iterator[str]:
    """Yield what all options of a group have, and then what only some have."""
    schemas = SCHEMAS[name]
    common = set.intersection(*({item.name for item in fields(schema)} for schema in schemas.values()))
    first = next(iter(schemas.values()))
    yield f"## {GROUPS[name]}: `{name}=`\n"
    yield table(first, f"{name}.", {item.name for item in fields(first)} - common)
    tables: dict[str, list[str]] = {}
    for option, schema in schemas.items():
        tables.setdefault(table(schema, f"{name}.", common), []).append(option)
    for text, options in tables.items():
        if text:
            yield f"### {', '.join(f'`{option}`' for option in options)}\n"
            yield text


def page() -> str:
    whole = [HEAD]
    nested = {item.name for item in fields(TrainConfig) if item.default_factory is not MISSING}
    whole += ["## A run\n", table(TrainConfig, "", nested)]
    for name in GROUPS:
        whole += group(name)
    for name, title in (("optim", "Optimiser"), ("trainer", "Trainer"), ("tracking", "Tracking")):
        schema = next(item for item in fields(TrainConfig) if item.name == name).default_factory()  # type: ignore[misc]
        whole += [f"## {title}: `{name}`\n", table(schema, f"{name}.")]
    whole.append("## Sweeps: `search=`, with `-m`\n")
    for option, schema in SEARCHES.items():
        if text := table(schema, "search."):
            whole += [f"### `{option}`\n", text]
    whole += ["## `experiments/compare.py`\n", table(CompareConfig, "", {"tracking"})]
    whole += ["## `experiments/bench.py`\n", table(BenchConfig, "", {"tracking"})]
    return "\n".join(whole).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}))

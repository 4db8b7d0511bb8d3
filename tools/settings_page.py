"""Make docs/settings.md, all settings of the apps, from their schemas."""

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lab.comparison.runs import CompareConfig
from lab.config.help import walked
from lab.config.schema import SEARCHES, BenchConfig, TrainConfig
from lab.registry import SCHEMAS
from lossforge.bench.report.tables import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Choose a group, then open the option that you take, such as `focal` under Losses. In the terminal:

- `uv run experiments/train.py --help GROUP` shows a group, with the values of the files in `conf/`. The defaults here are the schemas'.
- `--cfg` after a command prints its settings, and stops.
"""
GROUPS = {
    "task": "Tasks",
    "model": "Models",
    "loss": "Losses",
    "box_loss": "Losses of boxes, of task=detection, instances and oriented",
    "data": "Data sets",
}


def table(schema: Any, path: str, known: Iterable[str] = ()) -> str:
    """Return a table of the settings of a schema that are not `known`, and of those of schemas within it; empty without any."""
    found = [each for each in walked(OmegaConf.structured(schema), path) if not each.name.endswith(".name")]
    rows = [
        (f"`{each.name}`", f"`{each.value}`", each.takes, each.meaning)
        for each in found
        if each.name.removeprefix(path).partition(".")[0] not in known
    ]
    return markdown(("setting", "default", "takes", "meaning"), rows) + "\n" if rows else ""


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
            yield folded(", ".join(options), text)


def folded(title: str, text: str) -> str:
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n</details>\n'


def files() -> dict[Path, str]:
    """Return the page."""
    whole = [HEAD]
    nested = {item.name for item in fields(TrainConfig) if item.default_factory is not MISSING}
    whole += ["## A run\n", table(TrainConfig, "", nested)]
    for name in GROUPS:
        whole += group(name)
    for name, title in (("optim", "Optimiser"), ("trainer", "Trainer"), ("export", "Export"), ("tracking", "Tracking")):
        schema = next(item for item in fields(TrainConfig) if item.name == name).default_factory()  # type: ignore[misc]
        whole += [f"## {title}: `{name}`\n", table(schema, f"{name}.")]
    whole.append("## Sweeps: `search=`, with `-m`\n")
    for option, schema in SEARCHES.items():
        if text := table(schema, "search."):
            whole.append(folded(option, text))
    whole += ["## `experiments/compare.py`\n", table(CompareConfig, "", {"tracking"})]
    whole += ["## `experiments/bench.py`\n", table(BenchConfig, "", {"tracking"})]
    return {PAGE: "\n".join(whole).rstrip() + "\n"}

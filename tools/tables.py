"""Tables and pictures of README.md and of the documentation: losses from the registry, measurements as `reported` makes them of results/.

A table stands between `<!-- NAME: uv run tools/generate.py -->` and `<!-- end of NAME -->`, on any page. The page says in words what
the table shows.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import compared
import loss_names
import reported
from loss_text import MissingError, file_of

from lossforge.bench.cases import RECORDS
from lossforge.bench.report import load, pictures, tables
from lossforge.losses.base.declare import DECLARED, Declared
from lossforge.losses.base.text import in_place_of
from lossforge.losses.definitions.language.linear import LINEAR as OF_LAYERS
from lossforge.losses.definitions.preference.common import PREFERENCE
from lossforge.losses.definitions.preference.objectives import PAIRS, POLICIES
from lossforge.losses.templates.router import ROUTER
from lossforge.losses.templates.rowwise import ROWWISE

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DRAWN = ROOT / "docs" / "pictures"
PICTURES = {
    "time": (reported.BENCH, pictures.time_picture, pictures.main_rows),
    "memory": (reported.BENCH, pictures.memory_picture, pictures.main_rows),
    "scaling": (reported.SCALING, pictures.scaling_picture, pictures.scaling_rows),
}


def formula(function: Callable[..., Any]) -> str:
    """Return the formula in the function's docstring: from `L =` to the end of the clause.

    Raises:
        MissingError: the docstring has none.
    """
    text = " ".join((inspect.getdoc(function) or "").split())
    start = text.find(" L = ") + 1
    if not start:
        raise MissingError(f"{file_of(DECLARED[function.__name__])}: the docstring of {function.__name__} has no formula, L = ...")
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([") - (text[i] in ")]")
        if depth == 0 and text.startswith((", ", "; ", ". ", " with ", " with,"), i):
            return text[start:i]
    return text[start:].rstrip(".")


def targets_of(each: Declared) -> str:
    if own := each.facts.get("targets"):
        return own
    known = each.docs.targets
    return known.replace(", probabilities", "") if "probabilities" in each.facts.get("without", ()) else known


GROUPS = {
    "Classification": {
        "cross_entropy": "Cross entropy",
        "classification": "Classification with one label",
        "binary": "Binary, multi-label and focal losses",
        "angular": "Metric learning with a margin",
    },
    "Regression": {
        "regression": "Regression",
        "noise_model": "Regression under a model of the noise",
        "likelihood": "Likelihood",
    },
    "Detection": {
        "detection": "Detection: classes and distributions",
        "iou": "Detection: boxes",
        "rotated": "Detection: rotated boxes",
    },
    "Segmentation": {"dice": "Segmentation"},
    "Distillation": {"divergence": "Distillation", "draft": "Draft models"},
    "Features and ranking": {
        "contrastive": "Contrastive losses",
        "metric_learning": "Metric learning",
        "self_distillation": "Self-distillation",
        "embedding": "Embeddings",
        "margin": "Margins",
    },
}
FAMILIES = {family: title for group in GROUPS.values() for family, title in group.items()}
OWN_PAGES = (OF_LAYERS, PREFERENCE, ROWWISE.docs, ROUTER.docs)
"""What is shared by functions outside the registry that stand on other pages of the reference."""


def family_of(each: Declared) -> str:
    """Return the page of docs/losses that has a loss: the file of its definition."""
    return each.definition.__module__.rpartition(".")[2]


def title_of(each: Declared) -> str:
    """Return the name of a loss in the registry, or of its function."""
    return each.name or each.definition.__name__


def on_pages() -> list[Declared]:
    """Return the functions that stand on the pages of the families."""
    return [each for each in DECLARED.values() if each.name or each.docs not in OWN_PAGES]


def members(family: str) -> list[Declared]:
    return [each for each in on_pages() if family_of(each) == family]


def titles() -> dict[str, str]:
    """Return the title of each family's page. A family that FAMILIES does not know comes last, under the name of its file."""
    found = {family: family.replace("_", " ").capitalize() for family in map(family_of, on_pages())}
    return FAMILIES | {family: title for family, title in found.items() if family not in FAMILIES}


def groups() -> dict[str, list[str]]:
    """Return the families of each group. A family that GROUPS does not know comes last, in a group of its own."""
    found = {group: [*families] for group, families in GROUPS.items()}
    return found | {title: [family] for family, title in titles().items() if family not in FAMILIES}


def families() -> str:
    rows = []
    for group, names in groups().items():
        named = [
            f"[{titles()[each]}](docs/losses/{each}.md): " + ", ".join(f"`{title_of(loss)}`" for loss in members(each)) for each in names
        ]
        rows.append([group, ". ".join(named)])
    return tables.markdown(("for", "losses"), rows)


def functions() -> str:
    """Return a table of the public functions and modules of each family, with links into the reference."""
    rows = []
    for family, title in titles().items():
        page, of = f"losses_{family}.md", members(family)
        names = ([each.definition.__name__ for each in of], [each.module.name for each in of if each.module])
        linked = (", ".join(f"[`{name}`]({page}#lossforge.losses.{name})" for name in kind) for kind in names)
        rows.append([f"[{title}]({page})", *linked])
    return tables.markdown(("family", "functions", "modules"), rows)


def losses() -> str:
    """Return a table of the losses of each group."""
    texts = []
    for group, names in groups().items():
        rows = []
        for each in (loss for family in names for loss in members(family)):
            name, function, like = title_of(each), each.definition, in_place_of(each)
            cells = f"[`{name}`]({family_of(each)}.md#{name})", f"`{function.__name__}`", f"`{formula(function)}`", targets_of(each)
            rows.append([*cells, like and f"`{like}`"])
        texts.append(f"## {group}\n\n{tables.markdown(('name', 'function', 'formula', 'targets', 'in place of'), rows)}")
    return "\n\n".join(texts)


def sources(paper: str) -> str:
    """Return a source with a link to arXiv."""
    return re.sub(r"arXiv (\S+)", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def pair_objectives() -> str:
    rows = [[f"`{name}`", f"`{each.formula}`", each.use, sources(each.paper)] for name, each in PAIRS.items()]
    return tables.markdown(("`loss_type`", "loss of a pair", "when", "source"), rows)


WEIGHTS = {
    "mean": "completions: mean over tokens",
    "sum": "completions: sum over tokens",
    "tokens": "tokens",
    "length": "tokens, by `N max_completion_length`",
}


def policy_objectives() -> str:
    rows = [[f"`{name}`", f"`{each.formula}`", WEIGHTS[each.items], each.use, sources(each.paper)] for name, each in POLICIES.items()]
    return tables.markdown(("`loss_type`", "ℓ of a token", "what weighs the same", "when", "source"), rows)


SMALL = ROOT / "examples" / "losses"


def small_losses() -> str:
    """Return the files of examples/losses, each under its title."""
    texts = []
    for path in sorted(SMALL.glob("*.py")):
        code = path.read_text(encoding="utf-8")
        texts.append(f"## {path.stem.capitalize().replace('_', ' ')}\n\n```python\n# examples/losses/{path.name}\n{code}```")
    return "\n\n".join(texts)


NOT_MEASURED = "Not measured yet."
SECTIONS: dict[str, tuple[Any, ...]] = {
    "losses": (losses,),
    "families": (families,),
    "functions": (functions,),
    "small losses": (small_losses,),
    "loss names": (loss_names.page,),
    "pair objectives": (pair_objectives,),
    "policy objectives": (policy_objectives,),
    **reported.SECTIONS,
}
"""What makes each table, and the files of results that it reads."""
PLACE = re.compile(r"(<!-- (.+): uv run tools/generate\.py -->).*?(<!-- end of \2 -->)", re.DOTALL)


LONGEST = 30
"""Rows of a measured table that a reader sees at once. A longer one is folded."""
TABLE = re.compile(r"^\|.*\|\n\|[ |-]+\|\n(?:\|.*\|(?:\n|$))+", re.M)


def group_of(cell: str, known: dict[str, str]) -> str:
    """Return the group of a row by its first cell: that of the longest title which it begins with, or the cell up to a comma."""
    cell = cell.strip("`")
    title = max((each for each in known if cell.startswith(each)), key=len, default=None)
    return known[title] if title else cell.partition(",")[0].replace("`", "")


def folded(text: str) -> str:
    """Fold long tables by what a reader looks for: the group of the row's loss. A row without a first cell belongs to the one above."""
    known = {name: group for group, names in groups().items() for each in names for loss in members(each) for name in names_of(loss)}

    def parts(table: re.Match[str]) -> str:
        header, _, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[0].splitlines())
        if len(rows) <= LONGEST:
            return table[0]
        found: dict[str, list[list[str]]] = {}
        group = ""
        for row in rows:
            group = group_of(row[0], known) if row[0] else group
            found.setdefault(group, []).append(row)
        few = [name for name, lines in found.items() if len(lines) < 4]
        if others := [row for name in few for row in found.pop(name)]:
            found["Others" if found else "All"] = others
        return "\n\n".join(
            f'<details markdown="1"><summary>{name}: {len(lines)} rows</summary>\n\n{tables.filled(header, lines)}\n\n</details>'
            for name, lines in found.items()
        )

    return TABLE.sub(parts, text)


def names_of(loss: Declared) -> list[str]:
    """Return what tables call a loss: its name, its function's, and its title in the bench."""
    names = {loss.name or loss.definition.__name__, loss.definition.__name__}
    return [*names, *(record.title for name, record in RECORDS.items() if {name, f"{name}_loss", record.function} & names)]


def renewed(text: str) -> str:
    """Return a page's text with the tables of today's registry and results."""

    def filled(place: re.Match[str]) -> str:
        begin, name, end = place.groups()
        make, *files = SECTIONS[name]
        measured = [file for file in files if file.exists()]
        made = make(*measured) if measured or not files else NOT_MEASURED
        return f"{begin}\n\n{folded(made) if name in reported.SECTIONS else made}\n\n{end}"

    return PLACE.sub(filled, text)


def files() -> dict[Path, str]:
    """Return each page with its tables.

    Raises:
        MissingError: no page has the place of a table.
    """
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    placed = {place[2] for text in texts.values() for place in PLACE.finditer(text)}
    if missing := [name for name in SECTIONS if name not in placed]:
        raise MissingError(f"no page has <!-- {missing[0]}: uv run tools/generate.py --> and, below it, <!-- end of {missing[0]} -->")
    return {page: renewed(text) for page, text in texts.items()}


def stale_drawings() -> dict[Path, Callable[[], object]]:
    """Return the pictures that were drawn from other figures than results/ holds now, and what draws each."""
    stale: dict[Path, Callable[[], object]] = {}
    for name, (source, draw, rows) in PICTURES.items():
        report, path = load(source), DRAWN / f"{name}.svg"
        if not path.exists() or pictures.digest(report, rows(report)) not in path.read_text(encoding="utf-8"):
            stale[path] = partial(draw, report, path)
    curves, path = pictures.curves_of(reported.INTEGRATIONS), DRAWN / "first_steps.svg"
    if not path.exists() or pictures.curves_digest(curves) not in path.read_text(encoding="utf-8"):
        stale[path] = partial(pictures.curves_picture, curves, path)
    ratios, path = compared.first_page_ratios(compared.cases()), DRAWN / "first_page.svg"
    if not path.exists() or compared.first_page_digest(ratios) not in path.read_text(encoding="utf-8"):
        stale[path] = partial(compared.first_page_picture, ratios, path)
    return stale

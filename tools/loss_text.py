"""Docstrings of losses: what a definition says itself, and what its template says for all."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import get_args

from lossforge.losses.base.declare import Declared, whole_signature
from lossforge.losses.base.docs import COMMON, INDEX_ERROR, OPTIONS
from lossforge.losses.base.record import SCALAR

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^(Args|Returns|Raises|Examples):\n((?: {4}.*(?:\n|\Z)|\n)*)", re.MULTILINE)
WIDTH = 76
"""Of the text of a docstring: `help` indents it by 4 of a terminal's 80 columns."""
NO_BREAK = "\N{NO-BREAK SPACE}"


class MissingError(SystemExit):
    """Something that a generated file needs is not written yet: tools/generate.py ends, and says which loss, what, and in which file."""


def file_of(each: Declared) -> str:
    return str(Path(inspect.getfile(each.definition)).relative_to(ROOT))


def sections(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text, and what stands under its headings."""
    found: dict[str, str] = {}

    def take(section: re.Match[str]) -> str:
        found[section[1]] = textwrap.dedent(section[2]).rstrip()
        return ""

    return SECTION.sub(take, docstring).rstrip(), found


def described(block: str) -> dict[str, str]:
    """Return the lines of each argument in a block of `name: text`."""
    return {name: text.rstrip() for name, text in re.findall(r"^(\w+): (.*(?:\n +.*)*)", block, re.MULTILINE)}


def filled(text: str, width: int = WIDTH, indent: str = "") -> str:
    """Return a paragraph in lines of a width, those after the first indented. A paragraph with its own layout, such as a table, stays.

    No line ends within a difference, quotient or product, or within the name of a source, or before a sign that Markdown reads as layout.
    """
    if any(each.startswith((" ", "- ")) for each in text.splitlines()) and not indent:
        return text
    joined = re.sub(r" ([-/·*+>#]) |(arXiv|doi) ", lambda found: found[0].replace(" ", NO_BREAK), " ".join(text.split()))
    lines = textwrap.wrap(joined, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines).replace(NO_BREAK, " ")


def line(name: str, meaning: str) -> str:
    """Return an argument's line as it stands in a docstring, without the docstring's indentation."""
    return filled(f"{name}: {meaning}", WIDTH - 4, "    ")


def arguments(each: Declared) -> dict[str, str]:
    """Return the meaning of each argument of a public function.

    Raises:
        MissingError: neither the definition nor its template says what an argument means.
    """
    own = described(sections(inspect.getdoc(each.definition) or "")[1].get("Args", ""))
    known = {**COMMON, **each.docs.arguments, **own}
    names = list(whole_signature(inspect.signature(each.definition), {}).parameters)
    if missing := [name for name in names if name not in known]:
        what = ", ".join(missing)
        raise MissingError(
            f"{file_of(each)}: {each.definition.__name__} does not say what {what} means: add a line under Args in its docstring"
        )
    if unknown := [name for name in own if name not in names]:
        raise MissingError(
            f"{file_of(each)}: {each.definition.__name__} has no argument {', '.join(unknown)}, which its docstring describes"
        )
    return {name: known[name] for name in names}


def example(each: Declared, own: str) -> str:
    """Return an example that runs as it is.

    Raises:
        MissingError: neither the definition nor its template has one.
    """
    name, code = each.definition.__name__, own
    if not code:
        common = each.docs.example
        if common is None:
            raise MissingError(f"{file_of(each)}: {name} has no example: add one under Examples in its docstring")
        made, given = common
        default = inspect.signature(each.definition).parameters["reduction"].default
        reduced = ', reduction="mean"' if default == "none" else ""
        code = "\n".join(f">>> {line}" for line in [*made.split("\n"), f"{name}({given}{reduced}).backward()"])
    return f">>> import torch\n>>> from lossforge.losses import {name}\n{code}"


def in_place_of(each: Declared) -> str:
    """Return the function of another library whose place a loss takes; empty where there is none."""
    like = each.facts.get("like", "").replace(":", ".")
    return "" if like.startswith("lossforge") else like


def source_of(each: Declared) -> str:
    """Return where a loss comes from: its paper, and the function of another library whose place it takes.

    Raises:
        MissingError: a loss of the registry names neither a paper nor a function that computes the same.
    """
    if each.name and not (each.facts.get("paper") or each.facts.get("like")):
        raise MissingError(
            f'{file_of(each)}: {each.definition.__name__} names no source: give its @loss a paper, as paper="arXiv 1708.02002" or "doi …", '
            'or the function that computes the same, as like="module:function"'
        )
    theirs = in_place_of(each)
    return "; ".join(filter(None, (each.facts.get("paper", ""), theirs and f"in place of {theirs}")))


def returned(each: Declared) -> str:
    """Return what the template says of a result; only of a scalar, where the loss has no reduction "none"."""
    reduction = inspect.signature(each.definition).parameters.get("reduction")
    return f"{SCALAR}." if reduction and "none" not in get_args(reduction.annotation) else each.docs.returns


def whole_docstring(each: Declared) -> str:
    """Return the docstring of a public function."""
    text, own = sections(inspect.getdoc(each.definition) or "")
    meanings = arguments(each)
    indices = ["IndexError: " + INDEX_ERROR] if "class indices" in meanings.get("validate", "") else []
    raised = own.get("Raises") or "\n".join(["TypeError, ValueError: an argument is wrong; the message names it.", *indices])
    parts = {
        "Args": "\n".join(line(name, meaning) for name, meaning in meanings.items()),
        "Returns": filled(own.get("Returns") or returned(each), WIDTH - 4),
        "Raises": "\n".join(filled(one, WIDTH - 4, "    ") for one in re.split(r"\n(?! )", raised)),
        "Examples": example(each, own.get("Examples", "")),
    }
    source = source_of(each)
    end = [f"Source: {source}."] if source else []
    if any(meanings.get(name) == COMMON[name] for name in OPTIONS):
        end.append("`help(lossforge.losses.functional)` explains the options.")
    whole = [*map(filled, text.split("\n\n")), *(f"{heading}:\n{textwrap.indent(part, '    ')}" for heading, part in parts.items())]
    return "\n\n".join([*whole, filled(" ".join(end))] if end else whole)

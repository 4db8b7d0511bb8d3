"""Docstrings of losses: what a definition says itself, and what its template says for all."""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, get_args

from lossforge.losses.base.declare import Declared, Module
from lossforge.losses.base.docs import COMMON, INDEX_ERROR, OPTIONS
from lossforge.losses.base.record import SCALAR

SECTION = re.compile(r"^(Args|Returns|Raises|Examples):\n((?: {4}.*(?:\n|\Z)|\n)*)", re.MULTILINE)
ARGUMENT = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.MULTILINE)
JOINED = re.compile(r" ([-/·*+>#]) |(arXiv|doi) ")
WIDTH = 76
"""Of the text of a docstring: `help` indents it by 4 of a terminal's 80 columns."""
NO_BREAK = "\N{NO-BREAK SPACE}"


def sections(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text, and what stands under its headings."""
    found: dict[str, str] = {}

    def take(section: re.Match[str]) -> str:
        found[section[1]] = textwrap.dedent(section[2]).rstrip()
        return ""

    return SECTION.sub(take, docstring).rstrip(), found


def described(block: str) -> dict[str, str]:
    """Return the lines of each argument in a block of `name: text`."""
    return {name: text.rstrip() for name, text in ARGUMENT.findall(block)}


@functools.cache
def filled(text: str, width: int = WIDTH, indent: str = "") -> str:
    """Return a paragraph in lines of a width, those after the first indented. A paragraph with its own layout, such as a table, stays.

    No line ends within a difference, quotient or product, or within the name of a source, or before a sign that Markdown reads as layout.
    """
    if any(each.startswith((" ", "- ")) for each in text.splitlines()) and not indent:
        return text
    words = JOINED.sub(lambda found: found[0].replace(" ", NO_BREAK), " ".join(text.split())).split(" ")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(indent + word)
    return "\n".join(lines).replace(NO_BREAK, " ")


def line(name: str, meaning: str) -> str:
    """Return an argument's line as it stands in a docstring, without the docstring's indentation."""
    return filled(f"{name}: {meaning}", WIDTH - 4, "    ")


def section(heading: str, text: str) -> str:
    return f"{heading}:\n{textwrap.indent(text, '    ')}"


@functools.cache
def documented(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a docstring's text and its sections."""
    return sections(inspect.getdoc(function) or "")


def arguments(each: Declared) -> dict[str, str]:
    """Return the meaning of each argument of a public function."""
    known = {**COMMON, **each.docs.arguments, **described(documented(each.definition)[1].get("Args", ""))}
    return {name: known.get(name, "") for name in each.whole_signature.parameters}


def example(each: Declared, own: str) -> str:
    """Return an example that runs as it is: its own, or its template's."""
    name, code = each.definition.__name__, own
    if not code and each.docs.example:
        made, given = each.docs.example
        reduced = ', reduction="mean"' if each.signature.parameters["reduction"].default == "none" else ""
        code = "\n".join(f">>> {line}" for line in [*made.split("\n"), f"{name}({given}{reduced}).backward()"])
    return f">>> import torch\n>>> from lossforge.losses import {name}\n{code}"


def in_place_of(each: Declared) -> str:
    """Return the function of another library whose place a loss takes; empty where there is none."""
    like = each.facts.get("like", "").replace(":", ".")
    return "" if like.startswith("lossforge") else like


def source_of(each: Declared) -> str:
    """Return where a loss comes from: its paper, and the function of another library whose place it takes."""
    theirs = in_place_of(each)
    return "; ".join(filter(None, (each.facts.get("paper", ""), theirs and f"in place of {theirs}")))


def returned(each: Declared) -> str:
    """Return what the template says of a result; only of a scalar, where the loss has no reduction "none"."""
    reduction = each.signature.parameters.get("reduction")
    return f"{SCALAR}." if reduction and "none" not in get_args(reduction.annotation) else each.docs.returns


def whole_docstring(each: Declared) -> str | None:
    """Return the docstring of a public function; None where Python left docstrings out."""
    if each.definition.__doc__ is None:
        return None
    text, own = documented(each.definition)
    meanings = arguments(each)
    indices = ["IndexError: " + INDEX_ERROR] if "class indices" in meanings.get("validate", "") else []
    raised = own.get("Raises") or "\n".join(["TypeError, ValueError: an argument is wrong; the message names it.", *indices])
    source = source_of(each)
    end = [f"Source: {source}."] if source else []
    if any(meanings.get(name) == COMMON[name] for name in OPTIONS):
        end.append("`help(lossforge.losses.functional)` explains the options.")
    return "\n\n".join(
        [
            *map(filled, text.split("\n\n")),
            section("Args", "\n".join(line(name, meaning) for name, meaning in meanings.items())),
            section("Returns", filled(own.get("Returns") or returned(each), WIDTH - 4)),
            section("Raises", "\n".join(filled(one, WIDTH - 4, "    ") for one in re.split(r"\n(?! )", raised))),
            section("Examples", example(each, own.get("Examples", ""))),
            *([filled(" ".join(end))] if end else ()),
        ]
    )


def module_docstring(each: Declared, module: Module, names: Iterable[str]) -> str | None:
    """Return the docstring of a module; None where Python left docstrings out. names: of the constructor's arguments."""
    if each.definition.__doc__ is None:
        return None
    about = f"{module.summary}: see {each.definition.__name__}.{module.remark}"
    paragraphs = map(filled, re.split(r"(?<=\.) (?=[A-Z`])", about, maxsplit=1))
    meanings = arguments(each) | {how.name: how.meaning for how in module.converted.values()}
    return "\n\n".join([*paragraphs, section("Args", "\n".join(line(name, meanings[name]) for name in names))])

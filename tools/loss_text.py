"""Whether docstrings of losses say all: what a definition says itself, and what its template says for all."""

import inspect
from pathlib import Path

from lossforge.losses.base.declare import Declared
from lossforge.losses.base.text import arguments, described, documented

ROOT = Path(__file__).resolve().parents[1]


class MissingError(SystemExit):
    """Something that a generated file needs is not written yet: tools/generate.py ends, and says which loss, what, and in which file."""


def file_of(each: Declared) -> str:
    return str(Path(inspect.getfile(each.definition)).relative_to(ROOT))


def check(each: Declared) -> None:
    """Check what the docstring of a public function is made of.

    Raises:
        MissingError: neither the definition nor its template says what an argument means, or has an example; the definition describes an
            argument that it lacks; or a loss of the registry names neither a paper nor a function that computes the same.
    """
    name, own = each.definition.__name__, documented(each.definition)[1]
    meanings = arguments(each)
    if missing := [argument for argument, meaning in meanings.items() if not meaning]:
        raise MissingError(f"{file_of(each)}: {name} does not say what {', '.join(missing)} means: add a line under Args in its docstring")
    if unknown := [argument for argument in described(own.get("Args", "")) if argument not in meanings]:
        raise MissingError(f"{file_of(each)}: {name} has no argument {', '.join(unknown)}, which its docstring describes")
    if not ("Examples" in own or each.docs.example):
        raise MissingError(f"{file_of(each)}: {name} has no example: add one under Examples in its docstring")
    if each.name and not (each.facts.get("paper") or each.facts.get("like")):
        raise MissingError(
            f'{file_of(each)}: {name} names no source: give its @loss a paper, as paper="arXiv 1708.02002" or "doi …", '
            'or the function that computes the same, as like="module:function"'
        )

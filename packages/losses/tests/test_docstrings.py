"""Every public name has a full docstring: a line for each argument, what is returned and raised, an example that runs, a source."""

import contextlib
import doctest
import inspect
import io
import itertools
import re
from typing import get_args

import pytest
import torch
from torch.utils._pytree import tree_leaves

import lossforge.losses as losses
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.module import LossModule
from lossforge.losses.registry import LOSSES

HEADINGS = re.compile(r"^(Args|Returns|Raises|Examples):\n", re.MULTILINE)
PUBLIC = {name: getattr(losses, name) for name in losses.__all__}
FUNCTIONS = {name: each for name, each in PUBLIC.items() if inspect.isfunction(each)}
MODULES = {name: each for name, each in PUBLIC.items() if inspect.isclass(each) and issubclass(each, LossModule)}
TUPLES = {name: each for name, each in PUBLIC.items() if inspect.isclass(each) and hasattr(each, "_fields")}
OF_FORMULAS = ("boxes", "elementwise", "rowwise")  # their sources are read from a file: docs/learn/write_your_own_loss.md has them, tested
SLOW = ("check",)


def sections(docstring):
    """A docstring's text, and what stands under its headings."""
    text, *parts = HEADINGS.split(docstring)
    blocks = ("\n".join(itertools.takewhile(lambda line: not line or line.startswith("    "), part.split("\n"))) for part in parts[1::2])
    return text.strip(), {heading: inspect.cleandoc("\n" + block) for heading, block in zip(parts[::2], blocks, strict=True)}


def described(block):
    """The meaning of each argument in a block of `name: text`."""
    return dict(re.findall(r"^(\w+): (.*(?:\n +.*)*)", block, re.MULTILINE))


def lacking(name: str) -> list[str]:
    """What the docstring of a public name does not say."""
    each = PUBLIC[name]
    text, found = sections(inspect.getdoc(each) or "")
    said = described(found.get("Args", ""))
    if name in FUNCTIONS:
        names = inspect.signature(each).parameters
        headings = [heading for heading in ("Returns", "Raises", "Examples") if not found.get(heading)]
        return [*(f"argument {n}" for n in names if not said.get(n)), *headings, *([] if text else ["text"])]
    if name in MODULES:
        return [f"argument {n}" for n in inspect.signature(each).parameters if not said.get(n)]
    if name in TUPLES:
        return [f"field {n}" for n in each._fields if not re.search(rf"^    {n}: \S", inspect.getdoc(each) or "", re.M)]
    return [] if inspect.getdoc(each) else ["text"]


def test_no_public_name_is_without_a_full_docstring():
    found = {name: missing for name in PUBLIC if (missing := lacking(name))}
    assert len(PUBLIC) > 120
    assert not found


@pytest.mark.parametrize("name", [loss.function.__name__ for loss in LOSSES.values()])
def test_a_loss_has_formula_and_source(name):
    loss = next(each for each in LOSSES.values() if each.function.__name__ == name)
    documented = inspect.getdoc(loss.function)
    assert " L = " in f" {' '.join(documented.split())}"
    assert not loss.paper or loss.paper in documented
    theirs = (loss.like or "").replace(":", ".")
    assert not theirs or theirs.startswith("lossforge") or theirs in documented


def test_a_loss_that_refuses_the_reduction_none_tells_nothing_of_its_result():
    signatures = {name: inspect.signature(each).parameters.get("reduction") for name, each in FUNCTIONS.items()}
    refusing = [name for name, reduction in signatures.items() if reduction and "none" not in get_args(reduction.annotation)]
    assert refusing
    assert not [name for name in refusing if '"none"' in sections(inspect.getdoc(FUNCTIONS[name]))[1]["Returns"]]


def with_defaults(function):
    """The function, once the same call with the defaults of its signature gives the same: definitions have these a second time."""
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}

    def call(*args, **kwargs):
        got = function(*args, **kwargs)
        for ours, expected in zip(tree_leaves(function(*args, **{**defaults, **kwargs})), tree_leaves(got), strict=True):
            assert (ours is None and expected is None) or torch.equal(ours, expected)
        return got

    return call


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {*OF_FORMULAS, *SLOW}))
def test_the_example_runs(name, monkeypatch):
    """As it is, in a namespace of its own, on CPU tensors."""
    if name in DECLARED:
        monkeypatch.setattr(losses, name, with_defaults(FUNCTIONS[name]))
    torch.manual_seed(0)
    example = sections(inspect.getdoc(FUNCTIONS[name]))[1]["Examples"]
    lines = [each.source for each in doctest.DocTestParser().get_examples(example)]
    assert any("import" in line for line in lines)
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for line in lines:
            exec(compile(line, name, "exec"), names)


SQUARED = [name for name, each in FUNCTIONS.items() if "temperature_squared" in inspect.signature(each).parameters]


@pytest.mark.parametrize("name", SQUARED)
def test_the_default_of_temperature_squared_is_said(name):
    """Its losses differ in it, as their sources do."""
    default = inspect.signature(FUNCTIONS[name]).parameters["temperature_squared"].default
    said = described(sections(inspect.getdoc(FUNCTIONS[name]))[1]["Args"])["temperature_squared"]
    assert f". {'On' if default else 'Off'} by default" in " ".join(said.split())


def test_device_functions_say_what_they_give():
    math = pytest.importorskip("lossforge.kernels.math")
    functions = {name: each.fn for name, each in vars(math).items() if hasattr(each, "fn") and not name.startswith("_")}
    assert len(functions) > 15
    assert not [name for name, function in functions.items() if not function.__doc__]

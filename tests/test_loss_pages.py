"""What the pages of losses say of arguments follows from signatures and docstrings."""

import inspect
import re
import sys

import pytest
from pages import ROOT

sys.path.append(str(ROOT / "tools"))
from loss_pages import OF_TORCH, arguments

from lossforge.losses.registry import LOSSES


@pytest.mark.parametrize("name", LOSSES)
def test_every_argument_is_there_with_its_meaning(name):
    said = arguments(LOSSES[name])
    rows = {cells[0].strip("` "): cells[2].strip() for line in said.splitlines()[2:] if (cells := re.split(r"(?<!\\)\|", line)[1:-1])}
    own = [each for each, p in inspect.signature(LOSSES[name].definition).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert [each for each in rows if each in own] == [each for each in own if each not in OF_TORCH]
    assert all(rows.values())


def test_defaults_are_the_signatures():
    said = arguments(LOSSES["focal"])
    assert "| `gamma` | `2.0` | γ of at least 0, the focusing exponent: the larger, the less easy examples count. |" in said
    assert "| `inputs` |  | logits" in said
    assert '`empty="nan"`, `gradient=None`' in said

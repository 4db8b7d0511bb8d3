"""Formulas written beside their references become device functions."""

import importlib.util
import sys

import pytest
import torch

from lossforge.losses import FormulaError
from lossforge.losses.formulas import DeviceFormula
from lossforge.losses.formulas.translate import torch_of

BESIDE_ITS_REFERENCE = """
from lossforge.losses.formulas.device_names import exp, log1p_unit, tl

WIDTH = 0.5

def scaled(x):
    return x / WIDTH

def soft_distance(x, y, gamma):
    return log1p_unit(exp(-tl.abs(scaled(x - y)))) * gamma

def soft_distance_and_slope(x, y, gamma):
    return soft_distance(x, y, gamma), x
"""


def test_a_plain_function_becomes_a_device_function(tmp_path, points):
    """As built-in losses have them: in a file without Triton, whose names stay as they are."""
    file = tmp_path / "plain_formula.py"
    file.write_text(BESIDE_ITS_REFERENCE)
    spec = importlib.util.spec_from_file_location("plain_formula", file)
    plain = sys.modules["plain_formula"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    before = set(vars(plain))
    x, y = points
    value, gradient = torch_of(DeviceFormula(plain.soft_distance).load().formula)(x, y, 1.5)
    wanted = torch.log1p(torch.exp(-2 * (x - y).abs())) * 1.5
    (slope,) = torch.autograd.grad(wanted.sum(), x)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-9)
    assert torch_of(DeviceFormula(plain.soft_distance_and_slope).load().formula)(x, y, 1.5)[1] is x  # a gradient that is given stays
    with pytest.raises(FormulaError, match="returns 2 values; a formula returns its value, or \\(value, 8 derivatives\\)"):
        DeviceFormula(plain.soft_distance_and_slope, variables=8).load()
    assert set(vars(plain)) == before

"""What Triton does not compile is refused as the formula is read."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language import sigmoid
from triton.language.extra import libdevice

from lossforge.kernels.math import exp
from lossforge.losses import FormulaError, elementwise

PLAIN = 0.5


def test_what_the_compiler_refuses_is_refused_without_a_gpu():
    beta = 0.3

    @triton.jit
    def reads_global(x, y):
        return PLAIN * x - y

    @triton.jit
    def reads_closure(x, y):
        return beta * x - y

    @triton.jit
    def calls_one(x, y):
        return reads_global(x, y), 1.0

    @triton.jit
    def by_position(x, y, /):
        return x - y

    @triton.jit
    def any_number(*x):
        return x

    @triton.jit
    def constant(x, y):
        return 1.0

    @triton.jit
    def joins(x, y):
        return tl.where((x > 0) and (y > 0), x, y), 1.0

    @triton.jit
    def either(x, y):
        return tl.where((x > 0) or (y > 0), x, y)

    @triton.jit
    def negates(x, y):
        return tl.where(not (x > 0), x, y)

    @triton.jit
    def chains(x, y):
        return tl.where(0 < x < 1, x, y)

    @triton.jit
    def chooses(x, y):
        return x if x > y else y

    @triton.jit
    def undefined(x, y):
        return marginn * x - y  # noqa: F821

    @triton.jit
    def too_early(x, y):
        a = b * x  # noqa: F821
        b = a + y
        return b * y

    @triton.jit
    def misspelt(x, y):
        return tl.maxmum(x, y), 1.0

    @triton.jit
    def python_min(x, y):
        return min(x, y)

    @triton.jit
    def torch_exp(x, y):
        return torch.exp(x) * y

    @triton.jit
    def without_module(x, y):
        return sigmoid(x - y)

    @triton.jit
    def of_one_maker(x, y):
        return libdevice.tanh(x - y)

    @triton.jit
    def fifth(x, y):
        return (x - y) ** 5

    @triton.jit
    def of_variable(x, y):
        return 2.0**x - y

    @triton.jit
    def one_too_few(x, y):
        return tl.abs(x - y) * of_variable(x)

    @triton.jit
    def one_too_many(x, y):
        return exp(x, y)

    @triton.jit
    def imaginary(x, y):
        return x * (-2.0) ** 0.5 - y

    @triton.jit
    def without_end(x, y):
        return x * 0.0 ** (-1) - y

    @triton.jit
    def misnamed(x, y):
        return tl.exp2(x - y, typo=1), 1.0

    @triton.jit
    def bits(x, y):
        return (x - y) & 1, 1.0

    instead = r"write PLAIN = tl.constexpr\(0.5\), or make it a hyper-parameter: hyper=\{'PLAIN': 0.5\}, in `PLAIN` \(.*test_source.py:"
    for formula, message in (
        (reads_global, f"reads_global: PLAIN is a float from outside of the function, which Triton does not compile; {instead}"),
        (reads_closure, r"reads_closure: beta is a float from outside of the function.* write beta = tl.constexpr\(0.3\)"),
        (calls_one, "reads_global: PLAIN is a float from outside"),
        (by_position, "by_position: a formula has plain arguments, without / and \\*, in `def by_position"),
        (any_number, "any_number: a formula has plain arguments"),
        (constant, "constant: its value must depend on x or y$"),
        (joins, r"joins: `and` takes one truth value, .* write \(a\) & \(b\), in `x > 0 and y > 0`"),
        (either, r"either: `or` takes one truth value, .* write \(a\) | \(b\)"),
        (negates, "negates: `not` takes one truth value"),
        (chains, r"chains: Triton takes no chained comparison; write \(a < b\) & \(b < c\), in `0 < x < 1`"),
        (chooses, r"chooses: `if` takes one truth value.* write tl.where\(a, b, c\)"),
        (undefined, "undefined: marginn is not defined, in `marginn`"),
        (too_early, "too_early: b is not defined"),
        (misspelt, r"misspelt: triton.language has no function maxmum; write tl.maximum, in `tl.maxmum\(x, y\)`"),
        (python_min, "python_min: calls min, which is neither .*; write tl.minimum"),
        (torch_exp, "torch_exp: calls torch.exp, which is neither .*; write tl.exp"),
        (without_module, "without_module: sigmoid is called without its module; write tl.sigmoid"),
        (of_one_maker, "of_one_maker: calls libdevice.tanh, which is neither .*; write tl.tanh"),
        (fifth, r"fifth: an exponent must be one of 2, 3, 4, as a constant; write tl.sqrt\(a\) for a \*\* 0.5"),
        (of_variable, "of_variable: an exponent must be one of 2, 3, 4"),
        (one_too_few, r"one_too_few: of_variable takes \(x, y\): missing a required argument: 'y', in `of_variable\(x\)`"),
        (one_too_many, r"one_too_many: exp takes \(x\): too many positional arguments, in `exp\(x, y\)`"),
        (imaginary, r"imaginary: a power must be a real number, in `\(-2.0\) \*\* 0.5`"),
        (without_end, r"without_end: .*negative power.*, in `0.0 \*\* \(?-1\)?`"),
        (misnamed, "misnamed: Triton refuses it: .*typo"),
        (bits, "bits: Triton refuses it: .*invalid operands of type"),
    ):
        with pytest.raises(FormulaError, match=message):
            elementwise(formula)
    if isinstance(joins, triton.runtime.JITFunction):
        return  # which cannot be made of a lambda
    with pytest.raises(FormulaError, match="a formula is a function written with def, got a lambda"):
        elementwise(triton.jit(lambda x, y: x - y))

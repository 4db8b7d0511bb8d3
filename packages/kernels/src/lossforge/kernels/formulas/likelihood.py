"""Losses of log-probabilities x, which are linear in them.

Negative log-likelihood of a target y, 1 in one class and 0 elsewhere, or shares of a mixup pair:

    L = -y x                      dL/dx = -y

Kullback-Leibler divergence of targets y that are probabilities p, or their logarithms (torch.nn.functional.kl_div):

    L = p (ln p - x)              dL/dx = -p

A class with y = 0 or p = 0 adds nothing, for any x.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import exp, log


@triton.jit
def nll(x, y):
    return -y * tl.where(y == 0.0, 0.0, x), -y


@triton.jit
def nll_hard(x, own, w, factor):
    return w * tl.where(own, -x, 0.0), factor * tl.where(own, -1.0, tl.zeros_like(x))


@triton.jit
def kl_div(x, y, log_target):
    return y * tl.where(y == 0.0, 0.0, log(y) - x), -y


@triton.jit
def kl_div_log(x, y, log_target):
    p = exp(y)
    return p * tl.where(p == 0.0, 0.0, y - x), -p


@triton.jit
def is_log(log_target):
    return log_target != 0.0

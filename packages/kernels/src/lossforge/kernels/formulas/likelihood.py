"""Kullback-Leibler divergence of log-probabilities x from targets y that are probabilities p, or their logarithms
(torch.nn.functional.kl_div):

    L = p (ln p - x)              dL/dx = -p

A class with p = 0 adds nothing, for any x.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import exp, log


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

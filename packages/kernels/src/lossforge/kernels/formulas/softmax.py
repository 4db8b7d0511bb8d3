"""Functions φ of the cross entropy z = Σⱼ qⱼ (lse(x) - xⱼ) of a row, each with its derivative."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy(z: tl.tensor):
    return z, 1.0

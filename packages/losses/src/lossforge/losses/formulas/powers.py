"""Integer powers as device functions, because Triton's tensors have no operator for them."""

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it among a function's globals


@triton.jit
def square(x):
    return x * x


@triton.jit
def cube(x):
    return x * x * x


@triton.jit
def fourth(x):
    squared = x * x
    return squared * squared


WHOLE = {2: square, 3: cube, 4: fourth}
"""Device function of each exponent."""

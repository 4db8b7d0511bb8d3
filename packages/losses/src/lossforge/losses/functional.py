"""The losses as functions. Where torch, torchvision or timm has the loss, names, order and defaults are
theirs; our options are keyword-only.

Options that every function has. The losses of overlapping regions take no `target_b` and `lam`.

- `target_b`, `lam`: with class indices, a mixup pair: the target is λ times the class `target` plus 1 - λ times the class `target_b`; λ a
    number, one a sample, or one a row. No one-hot tensor is built.
- `score`: element-wise losses with class indices: one number a row, the target in the row's class where it otherwise is 1. For background
    and ignored rows it does not matter.
- `normalizer`: number or 0-d tensor that takes the place of the mean's divisor: Σ loss / normalizer, with reduction "mean" or "sum".
- `mask`: element-wise and point-wise losses, those of regions, ZLPR and two-way loss: what counts, True or a weight above 0. The result,
    with gradient, is that of a call on the chosen elements or pixels alone; what the others hold, nan too, reaches neither. A mean over
    elements divides by the mask's sum, one over rows or samples counts each by its largest entry, and one over regions still divides by
    their number. A mask of floats multiplies each element's loss, or each pixel in the sums of its region, beside `weight`.
    `ignore_index`, and -2 of element-wise losses, keep their meaning. A mask takes no gradient.
- `empty`: what a mean over nothing (a divisor of 0) gives: "nan" as in torch, or "zero", with gradient 0.
- `gradient`: "forward" writes the gradient in the same launch as the loss, "backward" computes it when it is asked for. By default
    forward where the result is a scalar, except for float16 (whose small gradients a scaler must first lift) and under torch.compile.
    A gradient written in forward is rounded to the dtype of the input, multiplied by the gradient that arrives, and rounded again. In
    bfloat16 the largest relative error is therefore 0.7 % instead of 0.4 %, unless what arrives is a power of two, such as 1.
- `inplace`: the gradient takes the memory of the logits, which must be an intermediate result that fills its memory. Value and gradient are
    the same. A gradient that arrives from a later use of the logits raises. Reading them afterwards silently gives the gradient
    (with gradient="backward", from backward on). For the accuracy take outputs=("correct",), or read the logits before the loss.
    torch.autograd.grad takes what the logits were computed from, not the logits. Where the kernels do not run, and under torch.compile,
    nothing is overwritten.
- `validate`: check class indices on CUDA too, which synchronises with the host (default: the environment's LOSSFORGE_VALIDATE). On CPU they
    always are. Unchecked, a row with an index out of range has loss and gradient nan; other rows are unharmed.

A number may also be a scalar of numpy or a 0-d tensor on the CPU, which is read at the call; one on a GPU, which the host would have to
wait for, is refused. Under torch.compile a number is a constant of the graph, so that one that changes compiles at every value, up to
torch's limit; a 0-d tensor is read, and checked, when the graph runs, and compiles once.

A target of bools or integers that has the shape of the input of an element-wise loss is dense. In any other shape integers are class
indices: of an input (N, N) a target (N,) is read as such.

Every loss computes and sums in float32 (float64 for float64). Scalars and the losses of rows and of boxes of half-precision inputs come
back in float32, per-element losses and gradients in the dtype of the input. What the kernels do not differentiate (targets, weights) is
differentiated through the plain-torch reference when it requires grad.
"""

import types

from lossforge.losses import definitions
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.engine.calls import function_of


def _beside(folder: types.ModuleType) -> dict[str, object]:
    """Return the public names that a folder of definitions writes itself: records of outputs, and helpers."""
    found = {name: getattr(folder, name) for name in getattr(folder, "__all__", ())}
    for each in vars(folder).values():
        if isinstance(each, types.ModuleType) and each.__name__.startswith(f"{folder.__name__}."):
            found |= _beside(each)
    return found


_made = {name: function_of(each, __name__) for name, each in DECLARED.items()} | _beside(definitions)
globals().update(_made)
__all__ = sorted(_made)  # functional.pyi lists them

"""The cases to measure, of all records, and their filters. This file does not import torch, so that a wrong name is reported at once."""

import fnmatch
from collections.abc import Iterable, Sequence

import lossforge.bench.records  # noqa: F401  # which fill RECORDS
from lossforge.bench.record import DTYPES, FUSED, RECORDS, SUITES, Case

__all__ = ["CASES", "CONTENDERS", "CPU_ELEMENTS", "DTYPES", "FUSED", "RECORDS", "SUITES", "Case", "UnknownNameError", "matching", "select"]
CONTENDERS = {
    "lossforge": "ours as it is called",
    "lossforge-backward": 'gradient="backward": the gradient is computed when backward asks for it',
    "lossforge-inplace": "inplace=True: the gradient takes the memory of the logits",
    "lossforge-weight": 'accumulate="weight": the gradient of a layer\'s weight is summed in its own dtype',
    "lossforge-lean": 'accumulate="weight", chunk=512: few rows at a time, and no float32 sum of the weight\'s gradient',
    "lossforge-skip": "skip_ignored=True: ignored rows are left out of a layer's products",
    "lossforge-rounded": 'logits="weight": logits may be rounded to the dtype of the weight',
    "lossforge-float32": 'logits="float32": logits are kept in float32',
    "objective": "an objective alone, from the log-probabilities of tokens",
    "products": "the matrix products that ours makes, alone and at the same chunks",
    "products-weight": "the same of lossforge-weight",
    "products-backward": "the same of lossforge-backward",
    "torch": "torch's function, eager",
    "torch.compile": "the same under torch.compile",
    "torch-linear": "torch's own fused function, in chunks by its default options",
    "torchvision": "torchvision.ops",
    "timm": "timm.loss",
    "liger": "Liger-Kernel; destroys the logits",
    "liger-sm90": "its functions for Hopper, in CuTe DSL",
    "cut-cross-entropy": "cut-cross-entropy by its defaults, which drop small gradients",
    "cut-cross-entropy-exact": "the same with filter_eps=None, which drops none",
    "quack": "QuACK (CuTe DSL) by its defaults",
    "quack-plain": "its plain form: use_scaled_exp=False, tuned=False",
    "trl": "TRL's kernel of log-probabilities and entropies",
    "verl": "verl's kernel of the same",
}
CPU_ELEMENTS = 2**18
"""Largest number of elements in a case on a machine without a GPU."""
CASES = tuple(sorted((case for record in RECORDS.values() for case in record.cases), key=lambda case: SUITES.index(case.suite)))


class UnknownNameError(ValueError):
    """A name or glob that matches none of the choices."""

    def __init__(self, what: str, got: str, choices: Iterable[str]) -> None:
        self.what, self.got, self.choices = what, got, sorted(set(choices))
        super().__init__(f"{what}: {got!r} is not known. Choices: {', '.join(self.choices)}")


def matching(what: str, patterns: Sequence[str], choices: Iterable[str]) -> set[str]:
    """Return the choices that match a name or glob; all of them if there are no patterns.

    Raises:
        UnknownNameError: a pattern matches none.
    """
    choices = set(choices)
    if not patterns:
        return choices
    found: set[str] = set()
    for pattern in patterns:
        fits = {c for c in choices if c == pattern or fnmatch.fnmatchcase(c, pattern)}
        if not fits:
            raise UnknownNameError(what, pattern, choices)
        found |= fits
    return found


def select(suite: Sequence[str] = (), loss: Sequence[str] = (), shape: Sequence[str] = (), dtype: Sequence[str] = ()) -> list[Case]:
    """Return the cases that match every filter, in their order. A shape is given by its size (8192x32000) or its use (retinanet*).

    Raises:
        UnknownNameError: a filter matches no case.
    """
    cases = [c for c in CASES if c.suite in matching("suite", suite, SUITES)]
    losses = matching("loss", loss, {c.loss for c in cases})
    shapes = matching("shape", shape, {name for c in cases for name in (c.size, c.use)})
    dtypes = matching("dtype", dtype, DTYPES)
    chosen = [c for c in cases if c.loss in losses and {c.size, c.use} & shapes and c.dtype in dtypes]
    if not chosen:
        wanted = ", ".join(f"{n}={','.join(v)}" for n, v in (("loss", loss), ("shape", shape), ("dtype", dtype)) if v)
        raise UnknownNameError("no case has all of it", wanted, {c.key for c in cases})
    return chosen

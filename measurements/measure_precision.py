"""Measure the error of cross entropy, log-probabilities and entropy fused with their layer, ours and those of peers, against float64.

Input and weight are bfloat16. Their logits have a standard deviation of 1, 4, 16 or 64, with a common offset of 1e4 or without, which
changes no loss. `value` is the largest error, in nats; `dh` and `dw` are errors of the gradients, relative by norm. A peer that is not
installed, or that fails, has its reason in place of figures. `linear_ce` has a mean; `logps` and `entropy` one upstream gradient a token.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import Request, relative
from torch import Tensor

from lossforge.losses import linear_cross_entropy, linear_entropy, linear_selective_log_softmax

STEP = 256
"""Rows at a time in float64."""


class Sizes(NamedTuple):
    rows: int
    hidden: int
    classes: tuple[int, ...]
    deviations: tuple[float, ...]
    chunks: tuple[int, ...]


FULL = Sizes(2048, 1024, (32_000, 151_936, 262_144), (1.0, 4.0, 16.0, 64.0), (1, 4, 16, 64))
SMALL = Sizes(64, 32, (1000,), (4.0,), (1, 4))
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From input, weight and class indices to a mean loss, to log-probabilities or to entropies."""
QUACK = "quack.linear_cross_entropy:chunked_linear_cross_entropy"
CHUNKED: dict[str, dict[str, Any]] = {
    "": {"accumulate": "float32", "logits": "weight"},
    " of float32": {"accumulate": "float32", "logits": "float32"},
    ", summed in bfloat16": {"accumulate": "weight", "logits": "weight"},
}
TRL_CLASSES = 32_768
"""Classes at a time in TRL's kernel, as its trainers call it."""


class Exact(NamedTuple):
    """Results in float64: each row's log-probability or entropy, and the gradients of input and weight."""

    values: Tensor
    of_input: Tensor
    of_weight: Tensor


def precision(request: Request) -> int:
    sizes = SMALL if request.small else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[dict[str, Any]] = []
    for classes, deviation, offset in itertools.product(sizes.classes, sizes.deviations, (0.0, 1e4)):
        for row in rows_of(sizes, classes, deviation, offset, device):
            found.append({"classes": classes, "deviation": deviation, "offset": offset, **row})
            print(found[-1], flush=True)
        request.save({"source": request.source("triton"), "rows": found})
    return 0


def rows_of(sizes: Sizes, classes: int, deviation: float, offset: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the errors of each contender."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(sizes.rows, sizes.hidden, device=device, generator=generator) * deviation / sizes.hidden**0.5
    weight = torch.randn(classes, sizes.hidden, device=device, generator=generator)
    x[:, 0] = weight[:, 0] = offset**0.5  # 100 · 100, exact in bfloat16
    x, weight = x.bfloat16(), weight.bfloat16()
    target = torch.randint(classes, (sizes.rows,), device=device, generator=generator)
    upstreams = {
        "linear_ce": torch.full((sizes.rows,), -1 / sizes.rows, device=device),
        "logps": torch.randn(sizes.rows, device=device, generator=generator),
    }
    upstreams["entropy"] = upstreams["logps"]
    for loss, upstream in upstreams.items():
        exact = exactly(x, weight, target, upstream, entropy_of if loss == "entropy" else logps_of)
        for name, call in contenders(loss, sizes).items():
            try:
                errors = errors_of(call, (x, weight, target), upstream, exact, loss == "linear_ce")
            except Exception as problem:  # a peer's own, of any kind
                errors = {"failed": f"{type(problem).__name__}: {problem}"[:200]}
            yield {"loss": loss, "contender": name, **errors}


def logps_of(logits: Tensor, target: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, target[:, None])[:, 0]


def entropy_of(logits: Tensor, target: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


OF_LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"linear_ce": F.cross_entropy, "logps": logps_of, "entropy": entropy_of}


def exactly(x: Tensor, weight: Tensor, target: Tensor, upstream: Tensor, of_logits: Callable[[Tensor, Tensor], Tensor] = logps_of) -> Exact:
    """Compute log-probabilities or entropies in float64, and the gradients of input and weight for `upstream`."""
    wide, values, of_input = weight.double().requires_grad_(), [], []
    of_weight = torch.zeros_like(wide)
    for rows, index, grad_output in zip(x.split(STEP), target.split(STEP), upstream.split(STEP), strict=True):
        leaf = rows.double().requires_grad_()
        value = of_logits(F.linear(leaf, wide), index)
        gradients = torch.autograd.grad(value, (leaf, wide), grad_output.double())
        values.append(value.detach())
        of_input.append(gradients[0])
        of_weight += gradients[1]
    return Exact(torch.cat(values), torch.cat(of_input), of_weight)


def errors_of(call: Call, given: tuple[Tensor, Tensor, Tensor], upstream: Tensor, exact: Exact, mean: bool) -> dict[str, float]:
    x, weight, target = given
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    value = call(*leaves, target)
    of_input, of_weight = torch.autograd.grad(value, leaves, None if mean else upstream.to(value.dtype))
    right = -exact.values.mean() if mean else exact.values

    error = (value.detach().double() - right).abs().max().item()
    return {"value": error, "dh": relative(of_input, exact.of_input), "dw": relative(of_weight, exact.of_weight)}


def contenders(loss: str, sizes: Sizes) -> dict[str, Call]:
    """Return what computes a loss, by name."""
    plain = OF_LOGITS[loss]
    found: dict[str, Call] = {
        "torch": lambda x, w, t: plain(F.linear(x, w), t),
        "torch, float32": lambda x, w, t: plain(F.linear(x.float(), w.float()), t),
    }
    if loss == "logps":
        return found | {
            "lossforge": linear_selective_log_softmax,
            "lossforge, chunks of float32": lambda x, w, t: -by_chunks(x, w, t, reduction="none", gradient="backward", logits="float32"),
            "cut-cross-entropy": lambda x, w, t: -cut(x, w, t, reduction="none"),
            "cut-cross-entropy, exact": lambda x, w, t: -cut(x, w, t, reduction="none", filter_eps=None),
            "trl": lambda x, w, t: trl(x, w, t)[0],
            "verl": lambda x, w, t: verl(x, w, t)[0],
        }
    if loss == "entropy":
        return found | {
            "lossforge": lambda x, w, t: linear_entropy(x, w),
            "trl": lambda x, w, t: trl(x, w, t, ("entropy",))[1],
            "verl": lambda x, w, t: verl(x, w, t)[1],
        }
    found |= {
        "torch.compile": torch.compile(lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t)),
        "lossforge": linear_cross_entropy,
        "lossforge, backward": lambda x, w, t: linear_cross_entropy(x, w, t, gradient="backward"),
        "liger": lambda x, w, t: resolve_name("liger_kernel.transformers.functional:liger_fused_linear_cross_entropy")(x, w, t),
        "cut-cross-entropy": cut,
        "cut-cross-entropy, exact": lambda x, w, t: cut(x, w, t, filter_eps=None),
        "quack": lambda x, w, t: resolve_name(QUACK)(x, w, t, tuned=False, use_scaled_exp=False),
        "quack-scaled": lambda x, w, t: resolve_name(QUACK)(x, w, t, tuned=False, use_scaled_exp=True),
    }
    for number, (name, how) in itertools.product(sizes.chunks, CHUNKED.items()):
        call = partial(linear_cross_entropy, chunk=sizes.rows // number, gradient="forward", **how)
        found[f"lossforge, {number} chunks{name}"] = call
    return found


def by_chunks(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Call the engine of chunks, which the product replaces elsewhere: a pair of equal classes is a target that it alone takes."""
    return linear_cross_entropy(x, weight, target, target_b=target, lam=0.5, **options)


def cut(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return resolve_name("cut_cross_entropy:linear_cross_entropy")(x, weight, target, **options)


def trl(x: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    return resolve_name("trl.kernels:ChunkedLogProbFunction").apply(x, weight, None, target, 1.0, TRL_CLASSES, None, 1.0, outputs)


def verl(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return resolve_name("verl.utils.kernel.linear_cross_entropy:linear_cross_entropy")(x, weight, target, 1.0)

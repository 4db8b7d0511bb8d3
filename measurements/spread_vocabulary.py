"""Measure linear_cross_entropy with its classes over several GPUs against one GPU: time, memory and error against float64.

    torchrun --standalone --nproc-per-node 2 measurements/spread_vocabulary.py

The first GPU computes the whole loss, then all of them their parts. A time is the median of WINDOWS, each of CALLS calls, and of several
GPUs the slowest's. The error is the largest difference of a gradient relative to its largest entry, of ROWS rows and CLASSES classes.
"""

import functools
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lossforge.losses import linear_cross_entropy

SHAPES = ((8192, 4096, 128256), (8192, 2304, 256000))
DEVIATION = 4.0  # of the logits
FORMS: dict[str, dict[str, Any]] = {
    "scalar, three products": {},
    "the same by chunks": {"chunk": 2048},
    "scalar, four products": {"gradient": "backward"},
    "a row": {"reduction": "none"},
}
WINDOWS, CALLS, WARM = 5, 4, 3
ROWS = CLASSES = 64


def gradients(input: Tensor, weight: Tensor, target: Tensor, upstream: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    loss = linear_cross_entropy(input, weight, target, **options)
    return torch.autograd.grad(loss, (input, weight), upstream)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return milliseconds a call, and the MiB that it takes beside what is allocated."""
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(WINDOWS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**20


def expected(input: Tensor, weight: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of the first ROWS rows and the first CLASSES classes in float64."""
    w = weight.detach().double()
    lse = torch.cat([(rows.double() @ w.t()).logsumexp(1) for rows in input.detach().split(512)])
    x = input.detach().double()
    p = (x[:ROWS] @ w.t() - lse[:ROWS, None]).exp()
    p[torch.arange(ROWS), target[:ROWS]] -= 1
    of_classes = (x @ w[:CLASSES].t() - lse[:, None]).exp()
    of_classes -= (target[:, None] == torch.arange(CLASSES, device=target.device)).double()
    return p @ w * scale, of_classes.t() @ x * scale


def error(found: Tensor, right: Tensor) -> float:
    return ((found.double() - right).abs().max() / right.abs().max()).item()


def measure(shape: tuple[int, int, int]) -> dict[str, Any]:
    rows, features, classes = shape
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *size: torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)  # noqa: E731
    input, weight = normal(rows, features) * (DEVIATION / features**0.5), normal(classes, features)
    target = torch.randint(classes, (rows,), device=device, generator=generator)
    target[-1] = 0
    upstream = torch.full((rows,), 1 / rows, device=device)
    right = expected(input, weight, target, 1 / rows)
    part = weight.chunk(world)[rank].clone().requires_grad_()
    input.requires_grad_()
    weight.requires_grad_()
    found: dict[str, Any] = {}
    for name, options in FORMS.items():
        of_rows = upstream if options.get("reduction") == "none" else None
        one: tuple[float, float] = (0.0, 0.0)
        if rank == 0:
            one = timed(functools.partial(gradients, input, weight, target, of_rows, **options))
        dist.barrier()
        spread = functools.partial(gradients, input, part, target, of_rows, group=dist.group.WORLD, **options)
        several = timed(spread)
        figures = torch.tensor(several, device=device)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        grads, again = spread(), spread()
        same = all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
        if rank == 0:
            whole = gradients(input, weight, target, of_rows, **options)
            errors = [[error(g[0][:ROWS], right[0]), error(g[1][:CLASSES], right[1])] for g in (whole, grads)]
            ms, mib = figures.tolist()
            found[name] = {
                "one_ms": one[0],
                "ms": ms,
                "share": one[0] / world / ms,
                "one_mib": one[1],
                "mib": mib,
                "errors": errors,
                "same": same,
            }
            print(shape, name, json.dumps(found[name]), flush=True)
        dist.barrier()
    return found


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = {"×".join(map(str, shape)): measure(shape) for shape in SHAPES}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} × {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(
            "rows × features × classes, form | one GPU, ms | its part | several, ms | share | MiB | error of dh, dW: one | several | same"
        )
        for shape, forms in found.items():
            for name, each in forms.items():
                (h, w), (h2, w2) = each["errors"]
                part = each["one_ms"] / dist.get_world_size()
                figures = (
                    f"{each['one_ms']:.2f} | {part:.2f} | {each['ms']:.2f} | {each['share']:.1%} | {each['one_mib']:.0f}, {each['mib']:.0f}"
                )
                print(f"{shape}, {name} | {figures} | {h:.1e}, {w:.1e} | {h2:.1e}, {w2:.1e} | {each['same']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

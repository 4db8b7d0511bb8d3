"""Measure losses of a layer with their classes over several GPUs against one GPU: time, memory and error against float64.

On four GPUs it also measures a model whose vocabulary lies over two of them, and FSDP2 over the other two (beside_fsdp.py).

Each GPU computes the whole loss, then all of them their parts, in turns. A time is the slowest GPU's, the median of WINDOWS of CALLS calls.
`share` is a GPU's part of the time that one GPU takes, over the time of all. Errors are those of a gradient's ROWS rows or CLASSES classes:
the largest difference relative to the largest entry, and the norm of the difference relative to the norm. With --small, little on four
processes of the CPU.
"""

import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import beside_fsdp
import reported
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Request, Timer, largest, launched, processes
from torch import Tensor

from lab.processes import distributed
from lab.run.machine import pick_device
from lossforge.bench.measure import peak_mebibytes
from lossforge.losses import LinearTeacher, linear_cross_entropy, linear_js_div, linear_kl_div

SHAPES, SMALL = ((8192, 4096, 128256), (8192, 2304, 256000)), ((64, 16, 256),)
DEVIATION = 4.0  # of the logits
FORMS: dict[str, dict[str, Any]] = {
    "scalar, three products": {},
    "the same by chunks": {"chunk": 2048},
    "scalar, four products": {"gradient": "backward"},
    "a row": {"reduction": "none"},
}
WINDOWS, CALLS, WARM = 5, 4, 2
ROWS = CLASSES = 64
OF_FLOAT64 = 256  # rows at a time


def gradients(loss: Callable[..., Tensor], leaves: tuple[Tensor, Tensor], upstream: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*leaves, **options), leaves, upstream)


def memory_of(call: Callable[[], Any], device: torch.device) -> float:
    """Return the MiB that a call takes beside what is allocated, 0 on the CPU."""
    for _ in range(WARM):
        call()
    return peak_mebibytes(call, device) if device.type == "cuda" else 0.0


def window(call: Callable[[], Any], device: torch.device) -> float:
    """Return milliseconds a call on this GPU."""
    dist.barrier()
    timer = Timer(device)
    timer.mark()
    for _ in range(CALLS):
        call()
    timer.mark()
    return timer.between()[0] / CALLS


def compared(one: Callable[[], Any], several: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return time and memory of a call on one GPU, and of one on all of them."""
    mib = [largest(memory_of(call, device)) for call in (one, several)]
    times = [(window(one, device), window(several, device)) for _ in range(WINDOWS)]
    one_each, each = (distributed.gathered(statistics.median(t)) for t in zip(*times, strict=True))
    share = max(one_each) / dist.get_world_size() / max(each)
    return {"one_ms": max(one_each), "ms": max(each), "share": share, "one_ms_each": one_each, "one_mib": mib[0], "mib": mib[1]}


def expected(input: Tensor, weight: Tensor, loss: Callable[[Tensor, int, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradients of the first ROWS rows and the first CLASSES classes in float64. loss: of the logits of the rows of a range."""
    w, of_rows = weight.detach().double(), []
    of_classes = w.new_zeros((CLASSES, w.shape[1]))
    for start in range(0, len(input), OF_FLOAT64):
        x = input.detach()[start : start + OF_FLOAT64].double()
        z = (x @ w.t()).requires_grad_()
        (g,) = torch.autograd.grad(loss(z, start, start + len(x)), z)
        of_classes += g[:, :CLASSES].t() @ x
        if start < ROWS:
            of_rows.append(g[: ROWS - start] @ w)
    return torch.cat(of_rows), of_classes


def errors_of(grads: tuple[Tensor, ...], right: tuple[Tensor, Tensor]) -> tuple[list[float], list[float]]:
    """Return the largest and the norm's error of the input's gradient and of the weight's."""
    differences = [(g[: len(r)].double() - r, r) for g, r in zip(grads, right, strict=True)]
    return [(d.abs().max() / r.abs().max()).item() for d, r in differences], [(d.norm() / r.norm()).item() for d, r in differences]


def row_of(one: Callable[[], Any], several: Callable[[], Any], right: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the figures of a loss by one GPU, and of the same by all of them; and whether the input's gradient is the same everywhere."""
    found = compared(one, several, right[0].device)
    grads, again = several(), several()
    same = all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    first = grads[0].clone()
    dist.broadcast(first, 0)
    same = all(distributed.gathered(same and torch.equal(first, grads[0])))
    pairs = [errors_of(g, right) for g in (one(), grads)]
    return {**found, "errors": [p[0] for p in pairs], "norm_errors": [p[1] for p in pairs], "same": same}


def data(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """Return input, weight and target, the same on each GPU."""
    rows, features, classes = shape
    generator = torch.Generator(device).manual_seed(0)
    input = torch.randn(rows, features, device=device, generator=generator, dtype=torch.bfloat16) * (DEVIATION / features**0.5)
    weight = torch.randn(classes, features, device=device, generator=generator, dtype=torch.bfloat16)
    target = torch.randint(classes, (rows,), device=device, generator=generator)
    target[-1] = 0
    return input.requires_grad_(), weight.requires_grad_(), target, generator


def part_of(weight: Tensor) -> Tensor:
    return weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


def cross_entropies(shape: tuple[int, int, int], device: torch.device) -> list[dict[str, Any]]:
    input, weight, target, _ = data(shape, device)
    part, spread = part_of(weight).requires_grad_(), {"group": dist.group.WORLD, "classes": len(weight)}
    upstream = torch.full((len(input),), 1 / len(input), device=input.device)
    right = expected(input, weight, lambda z, start, end: F.cross_entropy(z, target[start:end], reduction="sum") / len(input))
    loss = functools.partial(linear_cross_entropy, target=target)
    found = []
    for form, options in FORMS.items():
        of_rows = upstream if options.get("reduction") == "none" else None
        one = functools.partial(gradients, loss, (input, weight), of_rows, **options)
        several = functools.partial(gradients, loss, (input, part), of_rows, **options, **spread)
        found.append(shown(shape, form, row_of(one, several, right)))
    return found


def divergences(shape: tuple[int, int, int], device: torch.device) -> list[dict[str, Any]]:
    input, weight, _, generator = data(shape, device)
    part, dtype = part_of(weight).requires_grad_(), torch.float64
    spread = {"group": dist.group.WORLD, "classes": len(weight)}
    teacher = torch.randn(weight.shape, device=input.device, generator=generator, dtype=weight.dtype)
    wide = teacher.double()

    def exact(formula: Callable[[Tensor, Tensor], Tensor], z: Tensor, start: int, end: int) -> Tensor:
        return formula(z.log_softmax(1), (input.detach()[start:end].double() @ wide.t()).log_softmax(1)) / len(input)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (q.exp() * (q - p)).sum()

    def js(p: Tensor, q: Tensor) -> Tensor:
        middle = torch.logaddexp(p, q) - torch.tensor(2.0, dtype=dtype).log().item()
        return (kl(middle, p) + kl(middle, q)) / 2

    found = []
    for form, loss, formula in (("KL from a teacher's layer", linear_kl_div, kl), ("JS from a teacher's layer", linear_js_div, js)):
        right = expected(input, weight, functools.partial(exact, formula))
        given = [LinearTeacher(input.detach(), w) for w in (teacher, part_of(teacher))]
        one = functools.partial(gradients, functools.partial(loss, teacher=given[0]), (input, weight), None)
        several = functools.partial(gradients, functools.partial(loss, teacher=given[1]), (input, part), None, **spread)
        found.append(shown(shape, form, row_of(one, several, right)))
    return found


def shown(shape: tuple[int, int, int], form: str, figures: dict[str, Any]) -> dict[str, Any]:
    row = dict(zip(("rows", "features", "classes"), shape, strict=True)) | {"form": form} | figures
    if dist.get_rank() == 0:
        print(json.dumps(row, ensure_ascii=False), flush=True)
    return row


def work(request: Request) -> None:
    """Measure as one of several processes; the first one writes the figures."""
    device = pick_device("cpu" if request.small else "auto")
    distributed.start(device)
    shapes = SMALL if request.small else SHAPES
    rows = [row for shape in shapes for row in cross_entropies(shape, device)] + divergences(shapes[0], device)
    found: dict[str, Any] = {**request.source("triton"), "gpus": distributed.ranks(), "rows": rows}
    found["about"] = " ".join((__doc__ or "").split("\n\n")[-1].split())
    if distributed.ranks() == 4:
        found["beside_fsdp"] = beside_fsdp.measured(device)
    if distributed.rank() == 0:
        request.save(found)
    dist.barrier()
    distributed.stop()


def spread_vocabulary(request: Request) -> int:
    launched(work, processes(request, small=4), request, threads=1 if request.small else 8)
    print(reported.spread_vocabulary(request.out))
    return 0

"""Measure losses of a layer with their classes over several GPUs against one GPU: time, memory and error against float64.

    torchrun --standalone --nproc-per-node 2 measurements/spread_vocabulary.py

On four GPUs it also measures a model whose vocabulary lies over two of them, and FSDP2 over the other two (beside_fsdp.py).

Each GPU computes the whole loss, then all of them their parts, in turns. A time is the slowest GPU's, the median of WINDOWS of CALLS calls.
`share` is a GPU's part of the time that one GPU takes, over the time of all. Errors are those of a gradient's ROWS rows or CLASSES classes:
the largest difference relative to the largest entry, and the norm of the difference relative to the norm. Where OUT is set, the figures
are written to the file spread-vocabulary.json in that folder, too.
"""

import functools
import json
import os
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import beside_fsdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from torch import Tensor

from lossforge.losses import LinearTeacher, linear_cross_entropy, linear_js_div, linear_kl_div

SHAPES = ((8192, 4096, 128256), (8192, 2304, 256000))
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


def memory_of(call: Callable[[], Any]) -> float:
    """Return the MiB that a call takes beside what is allocated."""
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def window(call: Callable[[], Any]) -> float:
    """Return milliseconds a call on this GPU."""
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


def of_all(value: float) -> list[float]:
    """Return a number of each process."""
    values = torch.zeros(dist.get_world_size(), device="cuda", dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


def compared(one: Callable[[], Any], several: Callable[[], Any]) -> dict[str, Any]:
    """Return time and memory of a call on one GPU, and of one on all of them."""
    mib = [max(of_all(memory_of(call))) for call in (one, several)]
    times = [(window(one), window(several)) for _ in range(WINDOWS)]
    one_each, each = (of_all(statistics.median(t)) for t in zip(*times, strict=True))
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
    found = compared(one, several)
    grads, again = several(), several()
    same = all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    first = grads[0].clone()
    dist.broadcast(first, 0)
    same = min(of_all(same and torch.equal(first, grads[0]))) == 1
    pairs = [errors_of(g, right) for g in (one(), grads)]
    return {**found, "errors": [p[0] for p in pairs], "norm_errors": [p[1] for p in pairs], "same": same}


def data(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """Return input, weight and target, the same on each GPU."""
    rows, features, classes = shape
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    input = torch.randn(rows, features, device=device, generator=generator, dtype=torch.bfloat16) * (DEVIATION / features**0.5)
    weight = torch.randn(classes, features, device=device, generator=generator, dtype=torch.bfloat16)
    target = torch.randint(classes, (rows,), device=device, generator=generator)
    target[-1] = 0
    return input.requires_grad_(), weight.requires_grad_(), target, generator


def part_of(weight: Tensor) -> Tensor:
    return weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


def cross_entropies(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    input, weight, target, _ = data(shape)
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


def divergences(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    input, weight, _, generator = data(shape)
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


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    rows = [row for shape in SHAPES for row in cross_entropies(shape)]
    rows += divergences(SHAPES[0])
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": os.environ.get("COMMIT", ""),
        "date": datetime.now(UTC).date().isoformat(),
        "gpus": world,
        "about": " ".join((__doc__ or "").split("\n\n")[-1].split()),
        "rows": rows,
    }
    if world == 4:
        found["beside_fsdp"] = beside_fsdp.measure()
    if dist.get_rank() == 0:
        for row in rows:
            figures = "one {one_ms:.2f} ms, all {ms:.2f} ms, share {share:.1%}, MiB {one_mib:.0f} and {mib:.0f}".format(**row)
            print(f"{row['rows']} × {row['features']} × {row['classes']}, {row['form']}: {figures}, {row['norm_errors']}, {row['same']}")
        if folder := os.environ.get("OUT"):
            Path(folder, "spread-vocabulary.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

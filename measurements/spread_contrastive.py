"""Measure contrastive losses of features spread over GPUs: the ring of `group=` beside open_clip's gathered form.

    torchrun --standalone --nproc-per-node 4 measurements/spread_contrastive.py

BATCH pairs in all, of WIDTH features in bfloat16, with a learned scale in float32. Forward and backward are timed apart. A time is the
median of CALLS calls, the slowest process's; the memory is what a call takes beside the features. Gradients are those that DDP averages:
of open_clip's forms, whose gathers add up the gradients of all processes, and of the ring alike. The error is the largest difference from
float64 of the loss, relative, and of the gradients of ROWS images and texts, relative to their largest entry.

With --small, 64 pairs of 16 features on the CPU, through gloo.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from lossforge.losses import clip_loss_from_features, info_nce_loss, siglip_loss_from_features

SMALL = "--small" in sys.argv[1:]
BATCH, WIDTH = (64, 16) if SMALL else (65536, 512)
CALLS, WARM, ROWS = 7, 2, 16
SCALE, BIAS = 20.0, -10.0
Form = Callable[..., Tensor]


def every(t: Tensor) -> Tensor:
    """Return the features of all processes; backward adds up their gradients, as open_clip's gather_with_grad does."""
    return torch.cat(all_gather(t))


def places(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device) + dist.get_rank() * len(rows)


def gathered_clip(images: Tensor, texts: Tensor, scale: Tensor, _: Tensor, local_loss: bool) -> Tensor:
    """Compute the formula of open_clip's ClipLoss with gather_with_grad."""
    every_image, every_text = every(images), every(texts)
    if local_loss:
        rows, columns, place = scale * images @ every_text.T, scale * texts @ every_image.T, places(images)
    else:
        rows = scale * every_image @ every_text.T
        columns, place = rows.T, torch.arange(len(rows), device=rows.device)
    return (F.cross_entropy(rows, place) + F.cross_entropy(columns, place)) / 2


def gathered_info_nce(images: Tensor, texts: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(scale * images @ every(texts).T, places(images))


def gathered_siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Compute the formula of open_clip's SigLipLoss with dist_impl="gather"."""
    logits = scale * images @ every(texts).T + bias
    signs = torch.full_like(logits, -1.0)
    signs[torch.arange(len(images), device=logits.device), places(images)] = 1.0
    return -F.logsigmoid(signs * logits).sum() / len(images)


def forms() -> dict[str, dict[str, Form]]:
    """Return what computes each loss."""
    world = dist.group.WORLD
    ring: dict[str, Form] = {
        "InfoNCE": lambda a, b, s, _: info_nce_loss(a, b, None, 1.0 / s, normalize=False, group=world),
        "CLIP": lambda a, b, s, _: clip_loss_from_features(a, b, s, group=world),
        "SigLIP": lambda a, b, s, t: siglip_loss_from_features(a, b, s, t, group=world),
    }
    gathered: dict[str, dict[str, Form]] = {
        "InfoNCE": {"gathered": gathered_info_nce},
        "CLIP": {"gathered, local_loss": lambda a, b, s, t: gathered_clip(a, b, s, t, True)},
        "SigLIP": {"gathered": gathered_siglip},
    }
    found = {}
    for name, others in gathered.items():
        found[name] = {"ring": ring[name]} | {f"{how}, eager": form for how, form in others.items()}
        backend = "aot_eager" if SMALL else "inductor"  # which compiles C++ for the CPU
        found[name] |= {f"{how}, torch.compile": torch.compile(form, dynamic=False, backend=backend) for how, form in others.items()}
    # last, because the whole matrix is in the memory of each GPU, and may not fit
    found["CLIP again"] = {"gathered, eager": lambda a, b, s, t: gathered_clip(a, b, s, t, False)}
    return found


class Timer:
    """Measures milliseconds, on the GPU by events."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def between(self) -> list[float]:
        if self.on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def timed(form: Form, leaves: list[Tensor]) -> dict[str, Any]:
    """Return milliseconds and MiB of the slowest and largest process, and the last call's loss and gradients."""
    device = leaves[0].device
    times, mib = [], 0.0
    for call in range(WARM + CALLS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        timer = Timer(device)
        timer.mark()
        loss = form(*leaves)
        timer.mark()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        timer.mark()
        spent = timer.between()
        if call >= WARM:
            times.append(spent)
            if device.type == "cuda":
                mib = max(mib, (torch.cuda.max_memory_allocated() - before) / 2**20)
        if call + 1 < WARM + CALLS:
            del loss, grads
    figures = torch.tensor([*(statistics.median(t[i] for t in times) for i in (0, 1)), statistics.median(map(sum, times)), mib])
    figures = figures.to(device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    forward, backward, both, mib = figures.tolist()
    return {"forward_ms": forward, "backward_ms": backward, "ms": both, "mib": mib, "loss": loss.detach(), "grads": grads}


def expected(name: str, a: Tensor, b: Tensor, first: int) -> tuple[float, Tensor, Tensor]:
    """Return the loss, and the gradients of the ROWS images and texts from `first` on, of all features in float64 on one GPU."""
    x, y = a.double(), b.double()
    own = slice(first, first + ROWS)
    place = torch.arange(own.start, own.stop, device=a.device)
    here = torch.arange(ROWS, device=a.device)
    rows, columns = SCALE * x[own] @ y.T, SCALE * y[own] @ x.T
    if name == "SigLIP":
        value, parts = 0.0, []
        for start in range(0, len(x), 1024):
            z = SCALE * x[start : start + 1024] @ y.T + BIAS
            z[torch.arange(len(z)), torch.arange(len(z)) + start] *= -1
            value += F.softplus(z).sum().item()
        for logits, of in ((rows, y), (columns, x)):
            g = (logits + BIAS).sigmoid()
            g[here, place] -= 1
            parts.append(SCALE * g @ of / len(x))
        return value / len(x), parts[0], parts[1]
    lse_rows = torch.cat([(SCALE * t @ y.T).logsumexp(1) for t in x.split(1024)])
    lse_columns = torch.cat([(SCALE * t @ x.T).logsumexp(1) for t in y.split(1024)])
    pairs = SCALE * (x * y).sum(1)
    both = name != "InfoNCE"
    parts = []
    for logits, of, mine, others in ((rows, y, lse_rows, lse_columns), (columns, x, lse_columns, lse_rows)):
        over_own, over_others = (logits - mine[own, None]).exp(), (logits - others).exp()
        over_own[here, place] -= 1
        over_others[here, place] -= 1
        texts_alone = over_own if of is y else over_others
        parts.append(SCALE * (0.5 * (over_own + over_others) if both else texts_alone) @ of / len(x))
    value = (lse_rows - pairs).mean()
    return (0.5 * (value + (lse_columns - pairs).mean()) if both else value).item(), parts[0], parts[1]


def features(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the unit vectors of all processes, the same in each."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(BATCH, WIDTH, device=device, generator=generator)
    texts = images + 2 * torch.randn(BATCH, WIDTH, device=device, generator=generator)
    a, b = (F.normalize(t, dim=1).bfloat16() for t in (images, texts))
    return a, b


def measure(name: str, of_name: dict[str, Form], a: Tensor, b: Tensor) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    each = BATCH // world
    leaves = [t[rank * each : (rank + 1) * each].clone().requires_grad_() for t in (a, b)]
    leaves += [torch.tensor(v, device=a.device, requires_grad=True) for v in (SCALE, BIAS)]
    value, *right = expected(name, a, b, rank * each)
    found = {}
    for how, form in of_name.items():
        try:
            figures = timed(form, leaves)
        except torch.OutOfMemoryError:  # in every process, because all have equal parts
            found[how] = {"error": "out of memory"}
            continue
        loss, grads = figures.pop("loss").float(), figures.pop("grads")
        dist.all_reduce(loss)  # of local losses the mean is the global one
        wrong = [abs(loss.item() / world - value) / abs(value)]
        for g, exact in zip(grads, right, strict=False):
            wrong.append(((g[:ROWS].double() / world - exact).abs().max() / exact.abs().max()).item())
        errors = torch.tensor(wrong, device=a.device)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        found[how] = {**figures, "errors": errors.tolist()}
        if how == "ring":
            again = torch.autograd.grad(form(*leaves), leaves, allow_unused=True)
            same = all(g is None or torch.equal(g, h) for g, h in zip(grads, again, strict=True))
            found[how]["same"] = same
        if rank == 0:
            print(name, how, json.dumps(found[how]), flush=True)
        del grads
    return found


def report(found: dict[str, dict[str, Any]]) -> None:
    """Print what was measured so far, and write it."""
    whole = {
        "gpu": "CPU" if SMALL else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": os.environ.get("COMMIT", ""),
        "gpus": dist.get_world_size(),
        "batch": BATCH,
        "width": WIDTH,
        "date": time.strftime("%Y-%m-%d"),
        "losses": found,
    }
    print("loss, form | forward, ms | backward, ms | both | MiB | errors of loss, images, texts")
    for name, of_name in found.items():
        for how, each in of_name.items():
            if "error" in each:
                print(f"{name}, {how} | {each['error']}")
                continue
            figures = f"{each['forward_ms']:.2f} | {each['backward_ms']:.2f} | {each['ms']:.2f} | {each['mib']:.0f}"
            print(f"{name}, {how} | {figures} | {', '.join(f'{e:.1e}' for e in each['errors'])}", flush=True)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "spread-contrastive.json").write_text(json.dumps(whole, indent=1) + "\n")


def main() -> None:
    device = torch.device("cpu") if SMALL else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not SMALL:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if SMALL else "nccl")
    a, b = features(device)
    found: dict[str, dict[str, Any]] = {}
    for name, of_name in forms().items():
        found[name] = measure(name, of_name, a, b)
        if dist.get_rank() == 0:
            report(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

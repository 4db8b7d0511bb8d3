"""Measure losses of a layer with their classes over several GPUs against one GPU and other libraries: time, memory and errors.

The libraries are Liger-Kernel and Megatron-Core. From logits each contender takes its part of them; from hidden states it takes its part of
the layer, too. Liger's scaled form is fused with the layer; "product, then" computes the logits by torch, and sums the gradient of the
hidden states over the GPUs as Megatron-Core does. Draft losses, a teacher's top-K and several depths stand beside one GPU alone.
On four GPUs it also measures a model whose vocabulary lies over two of them, and FSDP2 over the other two (beside_fsdp.py).

All contenders of a case take turns: one GPU computes the whole loss, then all of them their parts. A turn begins with a call that is not
timed. A time is the slowest GPU's, the median of WINDOWS of CALLS calls, with the least and the most of them. `share` is a GPU's part of
the time that one GPU takes, over the time of all. `part_ms` is the time of a GPU's classes alone, without exchanges. `exchange_ms` is the
time of NCCL's kernels in a profile, `exposed_ms` when no other kernel runs beside them, `idle_ms` when none runs: each of the GPU with the
least, because the faster one waits in them. Errors are those of a gradient's ROWS rows or CLASSES classes against float64: the largest
difference relative to the largest entry, and the norm of the difference relative to the norm. A contender that fails has its message. With
--small, little on four processes of the CPU.
"""

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import beside_fsdp
import reported
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Request, Timer, free_memory, installed, largest, launched, processes
from torch import Tensor

from lab.processes import distributed
from lab.run.machine import pick_device
from lossforge.bench.measure import peak_mebibytes
from lossforge.losses import (
    LinearTeacher,
    TopKTeacher,
    cross_entropy,
    draft_loss_with_logits,
    linear_cross_entropy,
    linear_draft_loss,
    linear_js_div,
    linear_kl_div,
    linear_mtp_loss,
    linear_top_k,
    topk_kl_div_with_logits,
)

SHAPES, SMALL = ((8192, 4096, 128256), (8192, 2304, 256000)), ((64, 16, 256),)
DEVIATION = 4.0  # of the logits
FORMS: dict[str, dict[str, Any]] = {
    "scalar, three products": {},
    "the same by chunks": {"chunk": 2048},
    "scalar, four products": {"gradient": "backward"},
    "a row": {"reduction": "none"},
}
OURS, MEGATRON = "lossforge", "megatron-core"
FROM_LOGITS, FROM_HIDDEN = "from logits", "from hidden states"
TOP_K, DEPTHS = 64, 2
WINDOWS, CALLS, WARM = 5, 4, 2
ROWS = CLASSES = 64
OF_FLOAT64 = 256  # rows at a time
Gradients = tuple[Tensor, ...]
OfLogits = Callable[[Tensor, int, int], Tensor]
"""A loss of the logits of the rows of a range, in float64."""


class Contender(NamedTuple):
    """What computes a case, each returning gradients.

    one: on one GPU. several: the part of this process. alone: the classes of this process without the other processes, None if not of use.
    """

    one: Callable[[], Gradients]
    several: Callable[[], Gradients]
    alone: Callable[[], Gradients] | None = None


class Case(NamedTuple):
    """A loss that contenders compute.

    right: gradients in float64, of one GPU's leaves and of this process's. same_input: whether all processes have the same first gradient.
    """

    form: str
    right: tuple[Gradients, Gradients]
    contenders: dict[str, Callable[[], Contender]]
    same_input: bool = True


def gradients(loss: Callable[..., Tensor], leaves: Gradients, upstream: Tensor | None = None, **options: Any) -> Gradients:
    return torch.autograd.grad(loss(*leaves, **options), leaves, upstream)


def memory_of(call: Callable[[], Any], device: torch.device) -> float:
    """Return the MiB that a call takes beside what is allocated, 0 on the CPU."""
    for _ in range(WARM):
        call()
    return peak_mebibytes(call, device) if device.type == "cuda" else 0.0


def window(call: Callable[[], Any], device: torch.device) -> float:
    """Return milliseconds a call on this GPU."""
    dist.barrier()
    call()  # which allocates again what was freed for the other contenders
    timer = Timer(device)
    timer.mark()
    for _ in range(CALLS):
        call()
    timer.mark()
    return timer.between()[0] / CALLS


def exchanges(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of NCCL's kernels a call, those beside which no other kernel runs, and those in which none runs.

    Of the GPU with the least of each: a kernel of NCCL also waits for the slower GPU.
    """
    if device.type != "cuda":
        return {}
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() or [] if e.device_type.name == "CUDA" and not e.name.startswith("nccl:")]
    spans = sorted((e.time_range.start, e.time_range.end, e.name.startswith("nccl")) for e in kernels)
    own, others = ([(a, b) for a, b, nccl in spans if nccl == which] for which in (True, False))
    exchanged, computed, busy = covered(own), covered(others), covered([(a, b) for a, b, _ in spans])
    calls = 1e3 * CALLS
    begin, end = (spans[0][0], max(b for _, b, _ in spans)) if spans else (0.0, 0.0)
    found = {"exchange_ms": exchanged / calls, "exposed_ms": (busy - computed) / calls, "idle_ms": (end - begin - busy) / calls}
    return {name: -largest(-value) for name, value in found.items()}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, which are sorted."""
    total, until = 0.0, float("-inf")
    for begin, end in spans:
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def compared(
    contenders: dict[str, Callable[[], Contender]], device: torch.device
) -> Iterator[tuple[str, Contender | None, dict[str, Any]]]:
    """Yield each contender with its time and memory on one GPU and on all of them, or with the message of what failed."""
    made: dict[str, Contender] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, make in contenders.items():
        free_memory()
        try:
            made[name] = contender = make()
            each = [memory_of(call, device) for call in (contender.one, contender.several)]
            found[name] = {"one_mib": largest(each[0]), "mib": largest(each[1])}
        except Exception as problem:  # of a library, of any kind, and in all processes
            found[name] = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
            made.pop(name, None)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(WINDOWS):
        for name, each in made.items():
            times[name].append((window(each.one, device), window(each.several, device)))
    for name in contenders:
        if name in made:
            alone, together = zip(*times[name], strict=True)
            one_each, each_ms = (distributed.gathered(statistics.median(t)) for t in (alone, together))
            slowest = [max(t) for t in zip(*distributed.gathered(together), strict=True)]
            share = max(one_each) / dist.get_world_size() / max(each_ms)
            figures = {"one_ms": max(one_each), "ms": max(each_ms), "low": min(slowest), "high": max(slowest), "share": share}
            found[name] = {**figures, "one_ms_each": one_each, **found[name]}
            if name == OURS and (part := made[name].alone) is not None:
                part()
                found[name]["part_ms"] = largest(statistics.median(window(part, device) for _ in range(WINDOWS)))
            if name == OURS:
                found[name] |= exchanges(made[name].several, device)
        yield name, made.get(name), found[name]


def expected(input: Tensor, weight: Tensor, loss: OfLogits) -> Gradients:
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


def errors_of(grads: Gradients, right: Gradients) -> tuple[list[float], list[float]]:
    """Return the largest and the norm's error of each gradient."""
    differences = [(g.flatten(0, -2)[: len(r)].double() - r, r) for g, r in zip(grads, right, strict=True)]
    return [(d.abs().max() / r.abs().max()).item() for d, r in differences], [(d.norm() / r.norm()).item() for d, r in differences]


def checked(contender: Contender, right: tuple[Gradients, Gradients], same_input: bool) -> dict[str, Any]:
    """Return the errors of one GPU and of all, and whether two calls have the same bits.

    same_input: whether all processes must have the same first gradient.
    """
    grads, again = contender.several(), contender.several()
    same = all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    if same_input:
        first = grads[0].clone()
        dist.broadcast(first, 0)
        same = same and torch.equal(first, grads[0])
    same = all(distributed.gathered(same))
    pairs = [errors_of(g, r) for g, r in zip((contender.one(), grads), right, strict=True)]
    return {"errors": [p[0] for p in pairs], "norm_errors": [p[1] for p in pairs], "same": same}


def rows_of(shape: Iterable[int], case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the rows of a case, one a contender."""
    sizes = dict(zip(("rows", "features", "classes"), shape, strict=False))
    for name, contender, figures in compared(case.contenders, device):
        row = {**sizes, "form": case.form, "contender": name, **figures}
        if contender is not None:
            row |= checked(contender, case.right, case.same_input)
        if dist.get_rank() == 0:
            print(json.dumps(row, ensure_ascii=False), flush=True)
        yield row


@functools.cache
def alone() -> Any:
    """Return a group of this process alone: what libraries take in place of no group."""
    return dist.new_subgroups(group_size=1)[0]


class Data(NamedTuple):
    """Input, weight and target, the same on each GPU, this GPU's part of the weight, and what draws more."""

    input: Tensor
    weight: Tensor
    target: Tensor
    part: Tensor
    generator: torch.Generator

    @property
    def spread(self) -> dict[str, Any]:
        return {"group": dist.group.WORLD, "classes": len(self.weight)}

    @property
    def one(self) -> Gradients:
        return self.input, self.weight

    @property
    def several(self) -> Gradients:
        return self.input, self.part


def data(shape: tuple[int, int, int], device: torch.device) -> Data:
    rows, features, classes = shape
    generator = torch.Generator(device).manual_seed(0)
    input = torch.randn(rows, features, device=device, generator=generator, dtype=torch.bfloat16) * (DEVIATION / features**0.5)
    weight = torch.randn(classes, features, device=device, generator=generator, dtype=torch.bfloat16)
    target = torch.randint(classes, (rows,), device=device, generator=generator)
    target[-1] = 0
    return Data(input.requires_grad_(), weight.requires_grad_(), target, part_of(weight).requires_grad_(), generator)


def part_of(t: Tensor, dim: int = 0) -> Tensor:
    return t.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


# Losses of logits by other libraries, of each row: from logits (N, C of this process), class indices and a group


def liger(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

    found: Tensor = LigerVocabParallelCrossEntropy()(logits.unsqueeze(1), target.unsqueeze(1), group)
    return found


def megatron(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    found: Tensor = vocab_parallel_cross_entropy(logits.unsqueeze(1), target.unsqueeze(1), tp_group=group)
    return found


def megatron_fused(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    found: Tensor = fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), target.unsqueeze(1), group)
    return found


def ours(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    spread = {} if group.size() == 1 else {"group": group, "classes": logits.shape[1] * group.size()}
    found: Tensor = cross_entropy(logits, target, reduction="none", **spread)
    return found


OF_LOGITS = {"liger": liger, MEGATRON: megatron, f"{MEGATRON}, fused": megatron_fused}


class Copied(torch.autograd.Function):
    """Give hidden states to each process's part of a layer, and sum the gradients of the parts, as Megatron-Core does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous()
        if ctx.group.size() > 1:
            dist.all_reduce(total, group=ctx.group)
        return total, None


def product_then(loss: Callable[[Tensor, Tensor, Any], Tensor], target: Tensor, group: Any, x: Tensor, weight: Tensor) -> Tensor:
    return loss(F.linear(Copied.apply(x, group), weight), target, group).mean()


def liger_scaled(target: Tensor, group: Any, x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyTPFunction

    found: Tensor = LigerFusedLinearScaledCrossEntropyTPFunction.apply(x, weight, target, group).mean()
    return found


def by_groups(loss: Callable[..., Tensor], one: Gradients, several: Gradients) -> Contender:
    """Return a contender. loss: of a group and the leaves."""
    groups = alone(), dist.group.WORLD
    calls = [
        functools.partial(gradients, functools.partial(loss, group), leaves) for group, leaves in zip(groups, (one, several), strict=True)
    ]
    return Contender(calls[0], calls[1])


def from_logits(given: Data) -> Case:
    """Return the cross entropy of logits that are there."""
    input, weight, target = given.input.detach(), given.weight.detach(), given.target
    with torch.no_grad():
        logits = input @ weight.t()
        z = logits[:ROWS].double()
        right = z.softmax(1)
        right[torch.arange(len(z)), target[: len(z)]] -= 1
        right /= len(logits)
        part = part_of(logits, 1).requires_grad_()
    logits.requires_grad_()
    of_part = target.remainder(part.shape[1])

    def of_ours() -> Contender:
        one = functools.partial(gradients, functools.partial(cross_entropy, target=target), (logits,))
        several = functools.partial(gradients, functools.partial(cross_entropy, target=target, **given.spread), (part,))
        return Contender(one, several, functools.partial(gradients, functools.partial(cross_entropy, target=of_part), (part,)))

    def of(loss: Callable[..., Tensor]) -> Contender:
        return by_groups(lambda group, z: loss(z, target, group).mean(), (logits,), (part,))

    others = {name: functools.partial(of, loss) for name, loss in OF_LOGITS.items()}
    return Case(FROM_LOGITS, ((right,), (part_of(right, 1),)), {OURS: of_ours, **others}, same_input=False)


def from_hidden(given: Data, forms: Iterable[str] = FORMS, peers: bool = True) -> Iterator[Case]:
    """Yield the cross entropy of hidden states, in each form of ours; beside other libraries in the first one."""
    input, weight, target, part = given[:4]
    upstream = torch.full((len(input),), 1 / len(input), device=input.device)
    right = expected(input, weight, lambda z, start, end: F.cross_entropy(z, target[start:end], reduction="sum") / len(input))
    loss, of_part = (functools.partial(linear_cross_entropy, target=t) for t in (target, target.remainder(len(part))))
    others: dict[str, Callable[[], Contender]] = {}
    if peers:
        composed = {"lossforge, product then cross_entropy": ours, **{f"{name}, after the product": of for name, of in OF_LOGITS.items()}}
        every = {"liger, scaled": functools.partial(liger_scaled, target)}
        every |= {name: functools.partial(product_then, of, target) for name, of in composed.items()}
        others = {name: functools.partial(by_groups, each, given.one, given.several) for name, each in every.items()}
    for number, form in enumerate(forms):
        options = FORMS[form]
        of_rows = upstream if options.get("reduction") == "none" else None
        contender = Contender(
            functools.partial(gradients, loss, given.one, of_rows, **options),
            functools.partial(gradients, loss, given.several, of_rows, **options, **given.spread),
            functools.partial(gradients, of_part, given.several, of_rows, **options),
        )
        yield Case(form, (right, right), {OURS: lambda contender=contender: contender, **(others if not number else {})})


def beside_one(form: str, losses: tuple[Callable[..., Tensor], Callable[..., Tensor]], given: Data, exact: OfLogits) -> Case:
    """Return a loss that no other library computes. losses: of the leaves on one GPU; of the leaves, group and classes on several."""
    right = expected(given.input.flatten(0, -2), given.weight, exact)
    one = functools.partial(gradients, losses[0], given.one)
    several = functools.partial(gradients, losses[1], given.several, **given.spread)
    return Case(form, (right, right), {OURS: lambda: Contender(one, several)})


def teachers(given: Data) -> Iterator[Case]:
    """Yield divergences and draft losses from a teacher's layer, and a divergence from its top-K."""
    weight, generator, count = given.weight, given.generator, len(given.input)
    head = torch.randn(weight.shape, device=weight.device, generator=generator, dtype=weight.dtype)
    input, wide = given.input.detach(), head.double()
    of_one, of_part = (LinearTeacher(input, w) for w in (head, part_of(head)))

    def exactly(formula: Callable[[Tensor, Tensor], Tensor]) -> OfLogits:
        return lambda z, start, end: formula(z, input[start:end].double() @ wide.t()) / count

    def kl(z: Tensor, t: Tensor) -> Tensor:
        p, q = z.log_softmax(1), t.log_softmax(1)
        return (q.exp() * (q - p)).sum()

    def js(z: Tensor, t: Tensor) -> Tensor:
        p, q = z.log_softmax(1), t.log_softmax(1)
        middle = torch.logaddexp(p, q) - torch.tensor(2.0, dtype=torch.float64).log().item()
        return ((p.exp() * (p - middle)).sum() + (q.exp() * (q - middle)).sum()) / 2

    drafts = {f"draft loss {kind}": functools.partial(linear_draft_loss, kind=kind) for kind in ("lk", "tv")}
    formulas = {f"draft loss {kind}": functools.partial(draft_loss_with_logits, kind=kind, reduction="sum") for kind in ("lk", "tv")}
    losses = {"KL from a teacher's layer": linear_kl_div, "JS from a teacher's layer": linear_js_div, **drafts}
    formulas = {"KL from a teacher's layer": kl, "JS from a teacher's layer": js, **formulas}
    for form, loss in losses.items():
        pair = functools.partial(loss, teacher=of_one), functools.partial(loss, teacher=of_part)
        yield beside_one(form, pair, given, exactly(formulas[form]))
    top = linear_top_k(input, head, min(TOP_K, len(head)))
    teacher = TopKTeacher(top.values, top.indices)

    def of_top_k(z: Tensor, start: int, end: int) -> Tensor:
        return topk_kl_div_with_logits(z, top.values[start:end].double(), top.indices[start:end], reduction="sum") / count

    loss = functools.partial(linear_kl_div, teacher=teacher)
    yield beside_one(f"KL from a teacher's top {top.values.shape[-1]}", (loss, loss), given, of_top_k)


def depths(given: Data) -> Case:
    """Return the loss of several depths that share the layer."""
    input = given.input.detach().unflatten(0, (DEPTHS, -1)).requires_grad_()
    weights = [0.3**depth for depth in range(DEPTHS)]
    factors = torch.tensor(weights, dtype=torch.float64, device=input.device).repeat_interleave(input.shape[1]) / input.shape[1]

    def exact(z: Tensor, start: int, end: int) -> Tensor:
        return F.cross_entropy(z, given.target[start:end], reduction="none") @ factors[start:end]

    loss = functools.partial(linear_mtp_loss, target=given.target.view(input.shape[:2]), depth_weights=weights)
    return beside_one(f"multi-token prediction, {DEPTHS} depths", (loss, loss), given._replace(input=input), exact)


def cases(number: int, given: Data) -> Iterator[Case]:
    """Yield the cases of a shape, the first of which has all."""
    if not number:
        yield from_logits(given)
    yield from from_hidden(given, peers=not number)
    if not number:
        yield from teachers(given)
        yield depths(given)


def work(request: Request) -> None:
    """Measure as one of several processes; the first one writes what was measured so far."""
    device = pick_device("cpu" if request.small else "auto")
    distributed.start(device)
    alone()
    found: dict[str, Any] = {**request.source("triton"), **installed(*reported.PARALLEL_LIBRARIES), "gpus": distributed.ranks(), "rows": []}
    found["about"] = " ".join((__doc__ or "").split("\n\n")[-1].split())
    for number, shape in enumerate(SMALL if request.small else SHAPES):
        for case in cases(number, data(shape, device)):
            found["rows"] += rows_of(shape, case, device)
            if distributed.rank() == 0:
                request.save(found)
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

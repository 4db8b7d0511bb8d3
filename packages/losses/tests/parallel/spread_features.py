"""One of the processes of test_contrastive: contrastive losses of features that are spread, against the loss of all features in float64.

On the CPU through gloo, or on as many GPUs through NCCL. Gradients of a scalar are compared with those of its sum over the processes.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather

from lossforge import losses as L
from lossforge.kernels import launch_counts
from lossforge.losses.testing import error

FEATURES = 6
NEGATIVES = 3


def layouts() -> dict[str, list[int]]:
    """Return how many samples each process has."""
    world = dist.get_world_size()
    return {"equal": [5] * world, "uneven": [3 + 2 * r for r in range(world)], "one without": [4] * (world - 1) + [0]}


class Case(NamedTuple):
    """A loss of features of all samples, of which each process has some.

    Attributes:
        function: (leaves, parts, options) to the loss, or to a tensor without a gradient.
        leaves: tensors that get gradients; those of one element are the same in every process.
        parts: other tensors with an entry a sample.
        values: how many values the loss has a sample with reduction "none"; 0: as many in every process.
        common: places of further leaves that are the same in every process.
        scalar: whether the loss has no reduction.
        dtype: of the features. In float64 values agree to 1e-12.
    """

    function: Callable[..., Tensor]
    leaves: list[Tensor]
    parts: tuple[Tensor, ...] = ()
    values: int = 1
    common: tuple[int, ...] = ()
    scalar: bool = False
    dtype: torch.dtype = torch.float32


def sigmoids(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return L.siglip_loss_from_features(a, b, scale, bias, **options)


def cases(samples: int) -> dict[str, Case]:
    rows = lambda n=samples: torch.randn(n, FEATURES)  # noqa: E731
    wide_rows = lambda: torch.randn(samples, samples + 3)  # noqa: E731
    number = torch.tensor
    of = torch.randint(max(samples // 3, 1), (samples,))
    negatives = rows(samples * NEGATIVES)
    views = torch.randn(samples, 2, FEATURES)
    return {
        "info_nce": Case(lambda a, b, t, **o: L.info_nce_loss(a, b, None, t, **o), [rows(), rows(), number(0.3)]),
        "of a fixed temperature": Case(lambda a, b, **o: L.info_nce_loss(a, b, temperature=0.2, **o), [rows(), rows()]),
        "both sides": Case(lambda a, b, n, **o: L.info_nce_loss(a, b, n, symmetric=True, **o), [rows(), rows(), negatives]),
        "hard negatives": Case(lambda a, b, n, t, **o: L.info_nce_loss(a, b, n, t, **o), [rows(), rows(), negatives, number(0.4)]),
        "equal positives": Case(lambda a, b, n, of, **o: L.info_nce_loss(a, b, n, labels=of, **o), [rows(), rows(), negatives], (of,)),
        "negatives alone": Case(lambda a, b, n, **o: L.info_nce_loss(a, b, n, in_batch=False, **o), [rows(), rows(), negatives]),
        "clip": Case(lambda a, b, s, **o: L.clip_loss_from_features(a, b, s, normalize=True, **o), [rows(), rows(), number(7.0)]),
        "a negative scale": Case(lambda a, b, s, **o: L.clip_loss_from_features(a, b, s, **o), [rows(), rows(), number(-0.7)]),
        "siglip": Case(sigmoids, [rows(), rows(), number(2.0), number([-3.0])]),
        "siglip in two rounds": Case(functools.partial(sigmoids, gradient="backward"), [rows(), rows(), number(0.5), number(-1.0)]),
        "nt_xent": Case(lambda a, b, t, **o: L.nt_xent_loss(a, b, t, **o), [rows(), rows(), number(0.5)], values=2),
        "supcon": Case(lambda a, t, of, **o: L.supervised_contrastive_loss(a, of, t, **o), [rows(), number(0.4)], (of,)),
        "supcon of views": Case(lambda a, of, **o: L.supervised_contrastive_loss(a, of, base_temperature=None, **o), [views], (of,)),
        "supcon without labels": Case(lambda a, t, **o: L.supervised_contrastive_loss(a, None, t, **o), [views, number(0.3)]),
        "multi similarity": Case(lambda a, of, **o: L.multi_similarity_loss(a, of, beta=5.0, **o), [rows()], (of,)),
        "mined pairs": Case(lambda a, of, **o: L.multi_similarity_loss(a, of, beta=5.0, epsilon=0.1, **o), [rows()], (of,)),
        "circle": Case(lambda a, of, **o: L.circle_loss(a, of, gamma=4.0, **o), [rows()], (of,)),
        "proxies": Case(lambda a, p, of, **o: L.proxy_anchor_loss(a, p, of, alpha=4.0, **o), [rows(), rows(samples)], (of,), 0, (1,)),
        "barlow twins": exact(lambda a, b, **o: L.barlow_twins_loss(a, b, **o), wide_rows(), wide_rows()),
        "fewer features": exact(lambda a, b, **o: L.barlow_twins_loss(a, b, **o), rows(), rows()),
        "vicreg": exact(lambda a, b, **o: L.vicreg_loss(a, b, **o), wide_rows(), wide_rows()),
        "vicreg of fewer features": exact(lambda a, b, **o: L.vicreg_loss(a, b, **o), rows(), rows()),
        "koleo": exact(lambda a, **o: L.koleo_loss(a, **o), rows()),
        "centre": Case(lambda x, **o: L.mean_center(x, torch.ones(FEATURES).double(), **o), [], (rows().double(),), 0, scalar=True),
        "sinkhorn": Case(lambda x, **o: L.sinkhorn_center(x, 0.3, **o), [], (rows().double(),), 0, scalar=True),
        "sinkhorn by kernels": Case(lambda x, **o: L.sinkhorn_center(x, 0.3, **o), [], (rows(),), 0, scalar=True),
    }


def exact(function: Callable[..., Tensor], *leaves: Tensor) -> Case:
    return Case(function, [*leaves], scalar=True, dtype=torch.float64)


def own(t: Tensor, samples: list[int], times: int = 1) -> Tensor:
    """Return this process's part of a tensor of all samples, one of several a sample side by side; all of a tensor of none."""
    if not times or (t.numel() == 1 and t.ndim < 2):
        return t
    parts = t.unflatten(0, (times, -1)) if times == 2 else t.unflatten(0, (-1, times))
    return parts.split(samples, 1 if times == 2 else 0)[dist.get_rank()].flatten(0, 1)


def times_of(t: Tensor, samples: list[int]) -> int:
    """Return how many rows of a tensor belong to a sample."""
    return NEGATIVES if t.ndim == 2 and len(t) == NEGATIVES * sum(samples) else 1


def graded(case: Case, leaves: list[Tensor], parts: list[Tensor], upstream: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss and the gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    loss = case.function(*leaves, *parts, **options)
    grads = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype).expand(loss.shape)) if leaves else ()
    return [loss.detach(), *grads]


def check_losses(group: Any, samples: list[int], only: Collection[str] = (), reductions: Sequence[str] = ("mean", "sum", "none")) -> None:
    """Compare every case in every reduction, and repeat it. only: the names of fewer cases."""
    every = cases(sum(samples))
    for name in only or every:
        for reduction in ("",) if every[name].scalar else reductions:
            check_loss(group, samples, name, every[name], reduction)


def check_loss(group: Any, samples: list[int], name: str, case: Case, reduction: str) -> None:
    """Compare a case with one process's on all samples, in float64."""
    world, each = dist.get_world_size(), reduction == "none"
    options = {"reduction": reduction} if reduction else {}
    close = functools.partial(torch.testing.assert_close, msg=lambda text: f"{name}, {reduction}: {text}")
    values = case.values if each else 0
    upstream = torch.tensor(1.7)
    if each:
        of_all = case.function(*case.leaves, *case.parts, reduction="none")
        upstream = torch.linspace(0.5, 1.5, of_all.numel()).view(of_all.shape)
    expected = graded(case, [t.double() for t in case.leaves], [*case.parts], upstream, **options)
    times = [0 if i in case.common else times_of(t, samples) for i, t in enumerate(case.leaves)]
    leaves = [own(t, samples, several).to(case.dtype) for t, several in zip(case.leaves, times, strict=True)]
    parts, mine = [own(t, samples) for t in case.parts], own(upstream, samples, values)
    found = graded(case, leaves, parts, mine, group=group, **options)
    again = graded(case, leaves, parts, mine, group=group, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), f"{name}: bits differ"
    wide = found[0].dtype == torch.float64
    digits = 1e-12 if wide else 2e-5
    close(found[0], own(expected[0], samples, values).to(found[0].dtype), rtol=digits, atol=digits)
    if not values:
        first = found[0].clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, found[0]), f"{name}: processes differ"
    for got, right, leaf, several in zip(found[1:], expected[1:], case.leaves, times, strict=True):
        right = right if values else right * world
        if leaf.numel() == 1 or not several:  # each process has its share
            dist.all_reduce(got)
        limit = (1e-10 if wide else 2e-5) * max(1.0, right.abs().max().item())
        close(got, own(right, samples, several).to(got.dtype), rtol=digits, atol=limit)


def check_options(group: Any, samples: list[int]) -> None:
    """Compare a normalizer, a mean over nothing, half precision, no gradient, one of one input alone, and autocast."""
    total, rank = sum(samples), dist.get_rank()
    a, b = F.normalize(torch.randn(total, FEATURES)), F.normalize(torch.randn(total, FEATURES))
    x, y = own(a, samples), own(b, samples)
    close = torch.testing.assert_close
    for normalizer in (4, torch.tensor(4.0)):
        close(L.info_nce_loss(x, y, normalizer=normalizer, group=group), L.info_nce_loss(a, b, normalizer=normalizer), rtol=2e-5, atol=2e-5)
    assert L.info_nce_loss(x[:0], y[:0], group=group).isnan()
    assert L.info_nce_loss(x[:0], y[:0], empty="zero", group=group) == 0
    for dtype in (torch.bfloat16, torch.float16):
        whole = [t.to(dtype).double().requires_grad_() for t in (a, b)]
        expected = L.clip_loss_from_features(*whole, 10.0)
        wanted = torch.autograd.grad(expected, whole, torch.tensor(1.0 / dist.get_world_size(), dtype=torch.float64))
        part = [t.to(dtype).requires_grad_() for t in (x, y)]
        found = L.clip_loss_from_features(*part, 10.0, group=group)
        close(found, expected.float(), rtol=1e-5, atol=1e-5)
        scaled = [g.float() for g in torch.autograd.grad(found / dist.get_world_size() ** 2, part)]
        largest = max(g.abs().max().item() for g in wanted)
        for got, right in zip(scaled, wanted, strict=True):
            assert got.numel() == 0 or (got - own(right, samples)).abs().max() < 2e-2 * largest
        check_half_siglip(group, samples, a.to(dtype), b.to(dtype))
    before = launch_counts().get("similarity_gradient_kernel", 0)
    L.clip_loss_from_features(x, y, group=group)
    L.siglip_loss_from_features(x, y, group=group)
    with torch.no_grad():
        L.clip_loss_from_features(x.clone().requires_grad_(), y, group=group)
    assert launch_counts().get("similarity_gradient_kernel", 0) == before
    whole_b = b.double().requires_grad_()
    part_b = y.clone().requires_grad_()
    (wanted_b,) = torch.autograd.grad(L.info_nce_loss(a.double(), whole_b, reduction="sum"), whole_b)
    (found_b,) = torch.autograd.grad(L.info_nce_loss(x, part_b, reduction="sum", group=group), part_b)
    close(found_b, (dist.get_world_size() * own(wanted_b, samples)).float(), rtol=2e-5, atol=2e-5)
    leaf = x.clone().requires_grad_()  # a locked tower: no gradient travels
    (gradient,) = torch.autograd.grad(L.clip_loss_from_features(leaf, y, group=group), leaf)
    both = L.clip_loss_from_features(leaf, y.clone().requires_grad_(), group=group)
    assert torch.equal(gradient, torch.autograd.grad(both, leaf, retain_graph=True)[0])
    assert torch.equal(gradient, torch.autograd.grad(both, leaf)[0])
    with torch.autocast(x.device.type, torch.bfloat16):
        close(L.clip_loss_from_features(x, y, group=group), L.clip_loss_from_features(a, b), rtol=1e-5, atol=1e-5)
    of = own(torch.arange(total) % 3, samples)
    for function in (
        lambda x, y: L.clip_loss_from_features(x, y, group=group),
        lambda x, y: L.supervised_contrastive_loss(x, of, group=group),
    ):
        compiled = torch.compile(lambda x, y: 2 * function(x, y), backend="aot_eager")  # noqa: B023
        ours = [x.clone().requires_grad_(), y]
        expected, found = 2 * function(*ours), compiled(*ours)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found, ours[0])[0], torch.autograd.grad(expected, ours[0])[0])
    if rank == 0:
        assert error(both.detach(), L.clip_loss_from_features(a.double(), b.double())) < 1e-5


def check_half_siglip(group: Any, samples: list[int], a: Tensor, b: Tensor) -> None:
    """Compare SigLIP of features in half precision, with a learned scale and bias, to float64."""
    numbers = torch.tensor(10.0), torch.tensor(-10.0)
    wide = [t.double().requires_grad_() for t in (a, b, *numbers)]
    part = [t.clone().requires_grad_() for t in (own(a, samples), own(b, samples), *numbers)]
    expected = L.siglip_loss_from_features(*wide)
    found = L.siglip_loss_from_features(*part, group=group)
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)
    wanted, grads = torch.autograd.grad(expected, wide), torch.autograd.grad(found / dist.get_world_size(), part)
    for got, right in zip(grads[:2], wanted[:2], strict=True):
        limit = 2 * torch.finfo(a.dtype).eps * right.abs().max()
        assert got.numel() == 0 or (got - own(right, samples)).abs().max() < limit
    for got, right in zip(grads[2:], wanted[2:], strict=True):
        dist.all_reduce(got)
        torch.testing.assert_close(got, right.float(), rtol=1e-5, atol=1e-5)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = nn.Linear(5, 8), nn.Linear(4, 8)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        features = [F.normalize(f(x), dim=-1) for f, x in ((self.image, images), (self.text, texts))]
        return *features, self.scale.exp(), self.bias


def gathered_clip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, local_loss: bool) -> Tensor:
    """Compute the formula of open_clip's ClipLoss with gather_with_grad, whose backward adds up the gradients of all processes."""
    every_image, every_text = (torch.cat(all_gather(t)) for t in (images, texts))
    rows, columns = (images, texts) if local_loss else (every_image, every_text)
    first = dist.get_rank() * len(images) if local_loss else 0
    place = torch.arange(len(rows)) + first
    return (F.cross_entropy(scale * rows @ every_text.T, place) + F.cross_entropy(scale * columns @ every_image.T, place)) / 2


def gathered_siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Compute the formula of open_clip's SigLipLoss: this process's images with the texts of all, over the number of these images."""
    logits = scale * images @ torch.cat(all_gather(texts)).T + bias
    place = torch.arange(len(images)) + dist.get_rank() * len(images)
    signs = torch.where(place[:, None] == torch.arange(logits.shape[1]), 1.0, -1.0)
    return -F.logsigmoid(signs * logits).sum() / len(images)


def check_open_clip(group: Any) -> None:
    """Compare the gradients that DDP gives a model with open_clip's losses of gathered features, and with ours."""
    generator = torch.Generator("cpu").manual_seed(dist.get_rank())
    images, texts = (torch.randn(4, n, generator=generator, device="cpu").to(Towers().scale) for n in (5, 4))

    def step(loss: Callable[..., Tensor]) -> list[Tensor]:
        model = nn.parallel.DistributedDataParallel(Towers().to(images.device))
        given = model(images, texts)
        (loss(*given) + 0.0 * given[3]).backward()  # CLIP has no bias
        return [t.grad for t in model.parameters()]

    ring_of_clip = step(lambda a, b, s, t: L.clip_loss_from_features(a, b, s, group=group))
    rows_of_clip = step(lambda a, b, s, t: L.clip_loss_from_features(a, b, s, reduction="none", group=group).mean())
    for local_loss in (False, True):
        expected = step(lambda a, b, s, t: gathered_clip(a, b, s, t, local_loss))  # noqa: B023
        for found in (ring_of_clip, rows_of_clip):
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    for reduction in ("mean", "none"):
        found = step(lambda a, b, s, t: L.siglip_loss_from_features(a, b, s, t, reduction=reduction, group=group).mean())  # noqa: B023
        torch.testing.assert_close(found, step(gathered_siglip), rtol=2e-5, atol=2e-6)


def refused(kind: type[Exception], part: str, function: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=re.escape(part)):
        function(*args, **options)


def check_errors(group: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    a = torch.randn(4, FEATURES)
    more = torch.randn(6, FEATURES)
    refused(ValueError, "offset belongs to features that were gathered", L.info_nce_loss, a, more, offset=2, group=group)
    refused(ValueError, "decoupled is not served with group", L.nt_xent_loss, a, a, decoupled=True, group=group)
    refused(ValueError, "gathered belongs to features", L.supervised_contrastive_loss, a, gathered=more, group=group)
    refused(ValueError, "negative_only belongs to features", L.siglip_loss_from_features, a, a, negative_only=True, group=group)
    refused(ValueError, "positive must have as many rows as query where group is given", L.info_nce_loss, a, more, group=group)
    needed = 'gradient="forward" with group is served by siglip_loss_from_features alone'
    refused(ValueError, needed, L.clip_loss_from_features, a, a, gradient="forward", group=group)
    widths = [FEATURES + r for r in range(world)]
    wider = torch.randn(4, widths[rank])
    refused(
        ValueError, f"query must have the same width in all processes of group, got {widths}", L.info_nce_loss, wider, wider, group=group
    )
    half = a.bfloat16() if rank else a
    refused(ValueError, "must have the same dtype in all processes", L.clip_loss_from_features, half, half, group=group)
    once = a.clone().requires_grad_(rank == 0)
    refused(ValueError, "must have the same need of gradients in all processes", L.nt_xent_loss, once, once, group=group)
    odd = (a, more) if rank == 1 else (a, a)  # one process alone is refused: none waits for it
    one = "positive must have as many rows" if rank == 1 else "must be accepted in every process of group, refused in processes [1]"
    refused(ValueError, one, L.info_nce_loss, *odd, group=group)
    elsewhere = (a.to("meta"), a) if rank == 1 else (a, a)
    one = "positive must be on" if rank == 1 else "must be accepted in every process of group, refused in processes [1]"
    refused(ValueError, one, L.info_nce_loss, *elsewhere, group=group)
    refused(TypeError, "group must be a torch.distributed.ProcessGroup or a DeviceMesh", L.nt_xent_loss, a, a, group=1)
    check_errors_of_batches(group, a)
    leaf = a.clone().requires_grad_()
    for function in (L.clip_loss_from_features, L.siglip_loss_from_features):
        loss = function(leaf, a, group=group)
        refused(RuntimeError, "has no second derivative", torch.autograd.grad, loss, leaf, create_graph=True)


def check_errors_of_batches(group: Any, a: Tensor) -> None:
    """Refuse what one process gives, in all of them."""
    rank, labels, leaf = dist.get_rank(), torch.arange(4), a.clone().requires_grad_()
    other, once = a[rank == 1 :], a.clone().requires_grad_(rank == 0)
    elsewhere = "must be accepted in every process of group, refused in processes [1]"
    kind = IndexError if rank == 1 else ValueError
    refused(ValueError, "input2 must have the shape of input1" if rank == 1 else elsewhere, L.vicreg_loss, a, other, group=group)
    refused(ValueError, "eps must be" if rank == 1 else elsewhere, L.koleo_loss, a, 1e-8 - 2.0 * (rank == 1), group=group)
    refused(kind, "labels must hold" if rank == 1 else elsewhere, L.proxy_anchor_loss, a, other, labels, group=group)
    refused(ValueError, "at least 2 rows in all processes of group together, got 1", L.koleo_loss, a[: rank == 1], group=group)
    refused(ValueError, "offset belongs to features that were gathered", L.circle_loss, a, labels, offset=1, group=group)
    refused(ValueError, "must need gradients in all processes", L.barlow_twins_loss, leaf, once, group=group)
    proxies = torch.randn(4 + rank, FEATURES)
    refused(ValueError, "must have as many rows in all processes", L.proxy_anchor_loss, a, proxies, labels, group=group)


def check_grad_cache(group: dist.ProcessGroup) -> None:
    """Chunks of encoders under DDP, of one that reads both sides too, give the gradients of the whole batch; numbers of chunks differ."""
    torch.manual_seed(1)  # the processes have drawn differently until here
    world, rank = dist.get_world_size(), dist.get_rank()
    samples = [3 + 2 * r for r in range(world)]
    part = slice(sum(samples[:rank]), sum(samples[: rank + 1]))
    inputs = torch.randn(2, sum(samples), FEATURES, dtype=torch.float64)
    encoders = [nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(2)]
    for which in ((0, 1), (0, 0)):
        chosen = [encoders[i] for i in which]
        whole = L.info_nce_loss(*[encoder(x) for encoder, x in zip(chosen, inputs, strict=True)])
        used = [encoders[i] for i in sorted({*which})]
        exact = torch.autograd.grad(whole, [p for encoder in used for p in encoder.parameters()])
        wrapped = {id(encoder): nn.parallel.DistributedDataParallel(encoder) for encoder in used}
        loss = functools.partial(L.info_nce_loss, group=group)
        value = L.grad_cache_backward(loss, [wrapped[id(encoder)] for encoder in chosen], [x[part] for x in inputs], chunk_size=2)
        torch.testing.assert_close(value, whole.detach())
        torch.testing.assert_close([p.grad for encoder in used for p in encoder.parameters()], [*exact])
        for encoder in used:
            encoder.zero_grad()


def main() -> None:
    gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group("nccl" if gpus else "gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda" if gpus else "cpu", (dist.get_world_size(),))
    for name, samples in layouts().items():
        if name in sys.argv[1:]:
            check_losses(mesh, samples)
            check_options(mesh.get_group(), samples)
    if "open_clip" in sys.argv[1:]:
        check_open_clip(mesh)
        check_errors(mesh)
        check_grad_cache(mesh.get_group())
    dist.barrier()
    print("every process agrees")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a mesh holds the process group: a thread of gloo's that lets go of a tensor while Python ends aborts the process

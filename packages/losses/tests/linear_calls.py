"""What tests of losses fused with their linear layer share: a call of each template, the unfused one, and the operators that run."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lossforge import kernels
from lossforge import losses as L
from lossforge.kernels import launch_counts

CLASSES = 11
LIKELIEST = 4


def normal(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def indices(rows: int, device: str, classes: int = CLASSES) -> Tensor:
    """Return class indices of which the second and the last are ignored."""
    target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))
    target[1:2], target[-1:] = -100, -100
    return target.to(device)


def layer(rows: int, device: str, dtype: torch.dtype = torch.float32, hidden: int = 6, classes: int = CLASSES) -> list[Tensor]:
    """Return input, weight and bias that require grad."""
    shapes = (rows, hidden), (classes, hidden), (classes,)
    return [normal(*shape, device=device, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


def teacher_layer(hidden: Tensor, classes: int = CLASSES) -> L.LinearTeacher:
    """Return a layer that gives a teacher's logits, the same at each call, under torch.compile too."""
    weight = torch.arange(classes * hidden.shape[-1], dtype=torch.float64, device=hidden.device).cos().view(classes, -1)
    return L.LinearTeacher(hidden, weight.to(hidden.dtype))


def likeliest(rows: int, device: str, classes: int = CLASSES) -> tuple[Tensor, ...]:
    return tuple(normal(rows, classes, device=device, seed=5).log_softmax(-1).topk(min(LIKELIEST, classes)))


class Fused(NamedTuple):
    """A loss fused with its layer. targets: of (rows, device, classes); ours: of input, weight, bias, the targets and options; theirs: of
    logits and the targets."""

    name: str
    targets: Callable[..., tuple[Tensor, ...]]
    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]

    def unfused(self, x: Tensor, w: Tensor, b: Tensor | None, *targets: Tensor) -> Tensor:
        return self.theirs(F.linear(x, w, b), *targets)


focal = L.fuse_linear(L.sigmoid_focal_loss)
FUSED = [
    Fused(
        "ce",
        lambda n, d, c=CLASSES: (indices(n, d, c),),
        lambda x, w, b, t, **options: L.linear_cross_entropy(x, w, t, b, label_smoothing=0.1, **options),
        lambda z, t: L.cross_entropy(z, t, label_smoothing=0.1),
    ),
    Fused(
        "focal",
        lambda n, d, c=CLASSES: (indices(n, d, c).clamp(min=-2),),
        lambda x, w, b, t, **options: focal(x, w, t, bias=b, **{"reduction": "mean", **options}),
        lambda z, t: L.sigmoid_focal_loss(z, t, reduction="mean"),
    ),
    Fused(
        "kl",
        lambda n, d, c=CLASSES: (normal(n, 5, device=d, seed=3),),
        lambda x, w, b, h, **options: L.linear_kl_div(x, w, teacher_layer(h, len(w)), b, temperature=2.0, **options),
        lambda z, h: L.kl_div_with_logits(z, F.linear(*teacher_layer(h, z.shape[-1])[:3]), temperature=2.0),
    ),
    Fused(
        "topk",
        lambda n, d, c=CLASSES: likeliest(n, d, c),
        lambda x, w, b, v, i, **options: L.linear_kl_div(x, w, L.TopKTeacher(v, i), b, tail=True, **options),
        lambda z, v, i: L.topk_kl_div_with_logits(z, v, i, tail=True),
    ),
]


def gradients(function: Callable[..., Tensor], leaves: list[Tensor], *targets: Tensor, upstream: float = 3.0, **options) -> list[Tensor]:
    """Return the value, and the gradients of the leaves that require one."""
    value = function(*leaves, *targets, **options)
    found = torch.autograd.grad(value, [t for t in leaves if t is not None and t.requires_grad], torch.full_like(value, upstream))
    return [value, *found]


def exactly(fused: Fused, leaves: list[Tensor], *targets: Tensor, **options) -> list[Tensor]:
    """Return the same of the unfused computation in float64."""
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    return gradients(fused.unfused, wide, *[t.double() if t.is_floating_point() else t for t in targets], **options)


class Watched(TorchDispatchMode):
    """Records which operators of torch run, and the most bytes that a tensor's memory has, but for the memory at addresses in `given`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.most = 0
        self.given: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        memories = [t.untyped_storage() for t in tree_leaves(found) if isinstance(t, Tensor)]
        sizes = [memory.nbytes() for memory in memories if memory.data_ptr() not in self.given]
        self.most = max([self.most, *sizes])
        return found

    @property
    def products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_") for name in self.names)


def launches_of(kernel: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let a CPU have the product that carries losses, and return how often a kernel was launched since; skip on a GPU without it."""
    launch = kernels.load("linear.launch")
    if device == "cpu":
        monkeypatch.setattr(launch, "programs", lambda device: 2)
    elif not launch.programs(torch.cuda.current_device()):
        pytest.skip("the GPU is older than sm_90")
    before = launch_counts().get(kernel, 0)
    return lambda: launch_counts().get(kernel, 0) - before


def numpy_multiplies_a_row_alike_at_any_place() -> bool:
    """Whether the interpreter's product does: that of some BLAS for some processors rounds a row by its place in the tile."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape, np.float32) for shape in ((128, 64), (64, 128)))
    order = random.permutation(128)
    return np.array_equal((a @ b)[order], a[order] @ b)

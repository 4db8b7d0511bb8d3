"""Who computes a case: ours in each mode, and what people use today, each only where it computes the same function."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import CONTENDERS, Case

Call = Callable[..., Tensor]
DISTRIBUTIONS = {
    "torchvision": "torchvision",
    "timm": "timm",
    "liger": "liger-kernel",
    "quack": "quack-kernels",
}
_MODULES = {"torchvision": "torchvision", "timm": "timm", "liger": "liger_kernel", "quack": "quack"}


@dataclass(frozen=True)
class Contender:
    """call: (x, target, further tensors and options by name) → loss. floor: the mode of `least_bytes` that is the least for it.

    destroys: the gradient takes the memory of the logits. installed: whether its library is there; without it `call` cannot be used.
    """

    name: str
    call: Call
    floor: str = "one launch"
    destroys: bool = False
    installed: bool = True


def contenders(case: Case, device: torch.device, names: set[str]) -> list[Contender]:
    """Those among `names` that compute this case."""
    return [c for name in CONTENDERS if name in names and (c := _MAKERS[name](case, device)) is not None]


def _installed(name: str) -> bool:
    return find_spec(_MODULES[name]) is not None


def eager(loss: str) -> Call:
    """Torch's own computation, which is also the reference in float64."""
    return _EAGER[loss]


def _cross_entropy(
    x: Tensor, target: Tensor, *, target_b: Tensor | None = None, lam: float = 1.0, weight: Tensor | None = None, **options: Any
) -> Tensor:
    value = F.cross_entropy(x, target, weight, **options)
    return value if target_b is None else lam * value + (1 - lam) * F.cross_entropy(x, target_b, weight, **options)


def _one_hot(x: Tensor, target: Tensor) -> Tensor:
    """A background row has no class."""
    return target if target.is_floating_point() else (target.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)).to(x.dtype)


def _focal(x: Tensor, target: Tensor, *, alpha: float, gamma: float, reduction: str) -> Tensor:
    """torchvision.ops.sigmoid_focal_loss's arithmetic, so that measuring needs no torchvision."""
    y = _one_hot(x, target)
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    loss = (alpha * y + (1 - alpha) * (1 - y)) * entropy * (1 - p_t) ** gamma
    return loss.sum() if reduction == "sum" else loss


def _preference_bce(x: Tensor, target: Tensor, *, preference: Tensor, reduction: str = "mean") -> Tensor:
    return F.binary_cross_entropy_with_logits(x, target, preference, reduction=reduction)


_EAGER: dict[str, Call] = {
    "ce": _cross_entropy,
    "focal": _focal,
    "mae": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "preference_bce": _preference_bce,
}


def _passes(case: Case) -> str:
    """A loss a row knows its gradient only when backward brings one factor a row: no single launch can do it."""
    return "split" if case.options.get("reduction") == "none" else "one launch"


def _ours(case: Case, device: torch.device) -> Contender:
    from lossforge.losses.registry import LOSSES

    return Contender("lossforge", LOSSES[case.loss].function, _passes(case))


def _ours_backward(case: Case, device: torch.device) -> Contender | None:
    if case.options.get("reduction") == "none":
        return None
    function = _ours(case, device).call
    return Contender("lossforge-backward", lambda *args, **kwargs: function(*args, gradient="backward", **kwargs), "split")


def _ours_inplace(case: Case, device: torch.device) -> Contender | None:
    """Only on a GPU, where it overwrites, and where forward writes the gradient."""
    if case.options.get("reduction") == "none" or device.type != "cuda":
        return None
    function = _ours(case, device).call
    return Contender("lossforge-inplace", lambda *args, **kwargs: function(*args, inplace=True, **kwargs), destroys=True)


def _torch(case: Case, device: torch.device) -> Contender:
    return Contender("torch", eager(case.loss), _passes(case))


def _compiled(case: Case, device: torch.device) -> Contender:
    torch._dynamo.reset()
    return Contender("torch.compile", torch.compile(eager(case.loss)), _passes(case))


def _torchvision(case: Case, device: torch.device) -> Contender | None:
    if case.loss != "focal":
        return None
    if not _installed("torchvision"):
        return _absent("torchvision")
    function = import_module("torchvision.ops").sigmoid_focal_loss
    return Contender("torchvision", lambda x, target, **options: function(x, _one_hot(x, target), **options))


def _timm(case: Case, device: torch.device) -> Contender | None:
    if not (case.loss == "bce" or (case.loss == "ce" and case.variant in ("label smoothing", "soft targets", "mixup pair"))):
        return None
    if not _installed("timm"):
        return _absent("timm")
    losses = import_module("timm.loss")
    if case.loss == "bce":
        module = losses.BinaryCrossEntropy(smoothing=0.0)
        return Contender("timm", lambda x, target: module(x, target))
    if case.variant == "label smoothing":
        return Contender("timm", lambda x, target, *, label_smoothing: losses.LabelSmoothingCrossEntropy(label_smoothing)(x, target))
    soft = losses.SoftTargetCrossEntropy()
    if case.variant == "soft targets":
        return Contender("timm", lambda x, target: soft(x, target))

    def mixup(x: Tensor, target: Tensor, *, target_b: Tensor, lam: float) -> Tensor:
        """As timm's mixup does: the two classes become a dense target."""
        ones = (F.one_hot(t, x.shape[1]).to(x.dtype) for t in (target, target_b))
        return soft(x, lam * next(ones) + (1 - lam) * next(ones))

    return Contender("timm", mixup)


def _plain_rows(case: Case) -> bool:
    """(N, C) logits with class indices: what the kernels of language models compute."""
    return case.loss == "ce" and len(case.shape) == 2 and case.inputs in ("classes", "class weights", "ignored")


def _liger(case: Case, device: torch.device) -> Contender | None:
    if not _plain_rows(case) or device.type != "cuda":
        return None
    if not _installed("liger"):
        return _absent("liger")
    return Contender("liger", import_module("liger_kernel.transformers.functional").liger_cross_entropy, _passes(case), True)


def _quack(case: Case, device: torch.device) -> Contender | None:
    if not _plain_rows(case) or "label_smoothing" in case.options or device.type != "cuda":
        return None
    if not _installed("quack"):
        return _absent("quack")

    def quack(*args: Any, **kwargs: Any) -> Tensor:
        return import_module("quack.cross_entropy").cross_entropy(*args, **kwargs)

    return Contender("quack", quack, _passes(case))


def _absent(name: str) -> Contender:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        raise ModuleNotFoundError(f"{DISTRIBUTIONS[name]} is not installed")

    return Contender(name, call, installed=False)


_MAKERS: dict[str, Callable[[Case, torch.device], Contender | None]] = {
    "lossforge": _ours,
    "lossforge-backward": _ours_backward,
    "lossforge-inplace": _ours_inplace,
    "torch": _torch,
    "torch.compile": _compiled,
    "torchvision": _torchvision,
    "timm": _timm,
    "liger": _liger,
    "quack": _quack,
}

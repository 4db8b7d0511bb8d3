"""Who computes a case: ours in each mode, and what people use today, each only where it computes the same function."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import CONTENDERS, OVERLAP, Case
from lossforge.bench.plain import Call, eager, log_probabilities, one_hot

DISTRIBUTIONS = {
    "torchvision": "torchvision",
    "timm": "timm",
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "cut-cross-entropy": "cut-cross-entropy",
}
_MODULES = {"torchvision": "torchvision", "timm": "timm", "liger": "liger_kernel", "quack": "quack"}
_MODULES["cut-cross-entropy"] = "cut_cross_entropy"


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
    return [c for name in CONTENDERS if name in names and name in _MAKERS and (c := _MAKERS[name](case, device)) is not None]


def installed(name: str) -> bool:
    return find_spec(_MODULES[name]) is not None


def _passes(case: Case) -> str:
    """A loss a row knows its gradient only when backward brings one factor a row, and sums over regions or columns are complete only when
    all is read: no single reading can do it."""
    return "split" if case.options.get("reduction") == "none" or case.loss in ("clip", *OVERLAP) else "one launch"


def _token_logps(x: Tensor, target: Tensor, *, reduction: str, **options: Any) -> Tensor:
    """Less the entropy where that is asked for, so that one gradient a token reaches both outputs."""
    assert reduction == "none"
    found = import_module("lossforge.losses.functional").selective_log_softmax(x, target, **options)
    return found if isinstance(found, Tensor) else found.logps - found.entropy


def _clip(x: Tensor, **options: Any) -> Tensor:
    return import_module("lossforge.losses.functional").clip_loss(x, **options)


UNREGISTERED: dict[str, Call] = {"clip": _clip, "selective_log_softmax": _token_logps}
"""Losses of ours that are not in the registry."""


def _ours(case: Case, device: torch.device) -> Contender:
    from lossforge.losses.registry import LOSSES

    function = UNREGISTERED.get(case.loss) or LOSSES[case.loss].function
    return Contender("lossforge", function, _passes(case))


def _ours_backward(case: Case, device: torch.device) -> Contender | None:
    if case.options.get("reduction") == "none":
        return None
    function = _ours(case, device).call
    return Contender("lossforge-backward", lambda *args, **kwargs: function(*args, gradient="backward", **kwargs), "split")


def _ours_inplace(case: Case, device: torch.device) -> Contender | None:
    """Only on a GPU, where it overwrites, and where forward writes the gradient, but of boxes, which do not offer it."""
    if case.options.get("reduction") == "none" or device.type != "cuda" or case.inputs == "boxes":
        return None
    function = _ours(case, device).call
    return Contender("lossforge-inplace", lambda *args, **kwargs: function(*args, inplace=True, **kwargs), destroys=True)


def _torch(case: Case, device: torch.device) -> Contender:
    return Contender("torch", eager(case.loss), _passes(case))


def _compiled(case: Case, device: torch.device) -> Contender:
    torch.compiler.reset()
    return Contender("torch.compile", torch.compile(eager(case.loss)), _passes(case))


_TORCHVISION = {
    "focal": "sigmoid_focal_loss",
    "giou": "generalized_box_iou_loss",
    "diou": "distance_box_iou_loss",
    "ciou": "complete_box_iou_loss",
}


def _torchvision(case: Case, device: torch.device) -> Contender | None:
    if case.loss not in _TORCHVISION:
        return None
    if not installed("torchvision"):
        return absent("torchvision")
    function = getattr(import_module("torchvision.ops"), _TORCHVISION[case.loss])
    if case.loss != "focal":
        return Contender("torchvision", function)
    return Contender("torchvision", lambda x, target, **options: function(x, one_hot(x, target), **options))


_TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "bce": ("BinaryCrossEntropy", {"smoothing": 0.0}),
    "bce_smoothed": ("BinaryCrossEntropy", {}),
    "asymmetric": ("AsymmetricLossMultiLabel", {}),
    "poly_bce": ("PolyBinaryCrossEntropy", {}),
    "poly_ce": ("PolyCrossEntropy", {}),
}
"""Modules, and what their options must be beside the case's."""


def _timm(case: Case, device: torch.device) -> Contender | None:
    if case.loss not in _TIMM and not (case.loss == "ce" and case.variant in ("label smoothing", "soft targets", "mixup pair")):
        return None
    if not installed("timm"):
        return absent("timm")
    losses = import_module("timm.loss")
    if case.loss in _TIMM:
        name, fixed = _TIMM[case.loss]
        return Contender("timm", lambda x, target, **options: getattr(losses, name)(**fixed, **options)(x, target))
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


def _divergence(case: Case) -> Call:
    """Liger's, of log-probabilities or probabilities, which torch makes of the logits."""
    liger = import_module("liger_kernel.transformers.functional")

    def kl(x: Tensor, target: Tensor, *, temperature: float, reduction: str) -> Tensor:
        return liger.liger_kl_div(*log_probabilities(x, target, temperature), reduction=reduction, log_target=True) * temperature**2

    def js(x: Tensor, target: Tensor, *, beta: float, temperature: float = 1.0, reduction: str) -> Tensor:
        assert reduction == "batchmean"
        return liger.liger_jsd(*log_probabilities(x, target, temperature), beta=beta)

    def total_variation(x: Tensor, target: Tensor, *, temperature: float = 1.0, reduction: str) -> Tensor:
        p, q = (log_p.exp() for log_p in log_probabilities(x, target, temperature))
        return liger.liger_tvd(p, q, reduction=reduction)

    calls: dict[str, Call] = {"kl": kl, "js": js, "total_variation": total_variation}
    return calls[case.loss]


def _liger(case: Case, device: torch.device) -> Contender | None:
    divergence = case.loss in ("kl", "js", "total_variation") and "reverse" not in case.options
    if not (_plain_rows(case) or divergence) or device.type != "cuda":
        return None
    if not installed("liger"):
        return absent("liger")
    if divergence:
        return Contender("liger", _divergence(case))
    return Contender("liger", import_module("liger_kernel.transformers.functional").liger_cross_entropy, _passes(case), True)


def _quack(case: Case, device: torch.device) -> Contender | None:
    if not _plain_rows(case) or "label_smoothing" in case.options or device.type != "cuda":
        return None
    if not installed("quack"):
        return absent("quack")

    def quack(*args: Any, **kwargs: Any) -> Tensor:
        return import_module("quack.cross_entropy").cross_entropy(*args, **kwargs)

    return Contender("quack", quack, _passes(case))


def absent(name: str) -> Contender:
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

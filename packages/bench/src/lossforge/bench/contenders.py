"""The contenders of a case: each mode of ours, and the libraries in use today that compute the same function."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import CONTENDERS, LATE, Case
from lossforge.bench.plain import Call, eager, log_probabilities, one_hot

DISTRIBUTIONS = {
    "torchvision": "torchvision",
    "timm": "timm",
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "cut-cross-entropy": "cut-cross-entropy",
    "trl": "trl",
    "verl": "verl",
}
_MODULES = {name: name for name in DISTRIBUTIONS} | {"liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}


@dataclass(frozen=True)
class Contender:
    """An implementation to measure.

    Attributes:
        name: one of CONTENDERS.
        call: (x, target, other tensors and options by name) → loss.
        floor: the mode of `least_bytes` that it is compared with.
        destroys: the gradient overwrites the logits.
        installed: whether its library is installed; if not, `call` cannot be used.
    """

    name: str
    call: Call
    floor: str = "one launch"
    destroys: bool = False
    installed: bool = True


def contenders(case: Case, device: torch.device, names: set[str]) -> list[Contender]:
    """Return the contenders among `names` that compute this case."""
    return [c for name in CONTENDERS if name in names and name in _MAKERS and (c := _MAKERS[name](case, device)) is not None]


def installed(name: str) -> bool:
    return find_spec(_MODULES[name]) is not None


def _passes(case: Case) -> str:
    """Return the least passes over memory for a case, as a mode of `least_bytes`.

    A loss a row knows its gradient only when backward brings one factor a row. Sums over regions or columns, and a choice among all rows,
    are complete only after everything was read. None of these can be computed in a single pass.
    """
    return "split" if case.options.get("reduction") == "none" or case.loss in LATE else "one launch"


def _token_logps(function: Callable[..., Any]) -> Call:
    """Subtract the entropy where it is asked for, so that one gradient a token reaches both outputs."""

    def call(x: Tensor, target: Tensor, *, reduction: str, **options: Any) -> Tensor:
        assert reduction == "none"
        found: Any = function(x, target, **options)
        logps: Tensor = found if isinstance(found, Tensor) else found.logps - found.entropy
        return logps

    return call


def _labelled(function: Call) -> Call:
    """Give the labels of two tensors that are compared third, where our function and torch's call them target."""
    return lambda x, other, *, label, **options: function(x, other, label, **options)


def _halves(function: Call) -> Call:
    """Give both halves of one tensor, two views of as many samples, so that both get a gradient."""
    return lambda x, **options: function(*x.chunk(2), **options)


UNREGISTERED = {
    "clip": "clip_loss",
    "selective_log_softmax": "selective_log_softmax",
    "zlpr": "zlpr_loss",
    "two_way": "two_way_loss",
    "jsd": "jsd_cross_entropy",
    "seesaw": "seesaw_loss",
    "load_balancing": "load_balancing_loss",
    "generalized_dice": "generalized_dice_loss",
    "mcc": "mcc_loss",
    "dkd": "dkd_loss",
    "channel_wise_kl_div": "channel_wise_kl_div",
    "dist": "dist_loss",
    "boundary": "boundary_loss",
    "silog": "silog_loss",
    "koleo": "koleo_loss",
    "vicreg": "vicreg_loss",
    "barlow_twins": "barlow_twins_loss",
}
"""Our losses that are not in the registry, and their functions."""
_ADAPTED: dict[str, Callable[[Call], Call]] = {
    "selective_log_softmax": _token_logps,
    "margin_ranking": _labelled,
    "cosine_embedding": _labelled,
    "dkd": _labelled,
    "vicreg": _halves,
    "barlow_twins": _halves,
}


def _function(case: Case) -> Call:
    """Return our function of a case, as it is public."""
    from lossforge.losses.registry import LOSSES

    name = UNREGISTERED.get(case.loss)
    found: Call = LOSSES[case.loss].function if name is None else getattr(import_module("lossforge.losses"), name)
    return found


def _offers(case: Case, option: str) -> bool:
    return option in inspect.signature(_function(case)).parameters


def _ours(case: Case, device: torch.device) -> Contender:
    function = _function(case)
    return Contender("lossforge", _ADAPTED[case.loss](function) if case.loss in _ADAPTED else function, _passes(case))


def _ours_backward(case: Case, device: torch.device) -> Contender | None:
    if case.options.get("reduction") == "none" or not _offers(case, "gradient"):
        return None
    function = _ours(case, device).call
    return Contender("lossforge-backward", lambda *args, **kwargs: function(*args, gradient="backward", **kwargs), "split")


def _ours_inplace(case: Case, device: torch.device) -> Contender | None:
    """Return the contender with inplace=True, on a GPU, where forward writes the gradient and the loss offers it."""
    if case.options.get("reduction") == "none" or device.type != "cuda" or not _offers(case, "inplace"):
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
    "distribution_balanced": ("DistributionBalancedLoss", {}),
    "two_way": ("TwoWayLoss", {}),
    "jsd": ("JsdCrossEntropy", {}),
}
"""The module of each loss, and options that it needs beside the case's."""


def _timm(case: Case, device: torch.device) -> Contender | None:
    if case.loss not in (*_TIMM, "zlpr") and not (case.loss == "ce" and case.variant in ("label smoothing", "soft targets", "mixup pair")):
        return None
    if not installed("timm"):
        return absent("timm")
    losses = import_module("timm.loss")
    if case.loss == "zlpr":
        return Contender("timm", lambda x, target, *, reduction: len(x) * losses.ZlprLoss()(x, target))  # it has the mean alone
    if case.loss in _TIMM:
        name, fixed = _TIMM[case.loss]
        return Contender("timm", lambda x, target, **options: getattr(losses, name)(**fixed, **options)(x, target))
    if case.variant == "label smoothing":
        return Contender("timm", lambda x, target, *, label_smoothing: losses.LabelSmoothingCrossEntropy(label_smoothing)(x, target))
    soft = losses.SoftTargetCrossEntropy()
    if case.variant == "soft targets":
        return Contender("timm", lambda x, target: soft(x, target))

    def mixup(x: Tensor, target: Tensor, *, target_b: Tensor, lam: float) -> Tensor:
        """Turn the two classes into a dense target, as timm's mixup does."""
        ones = (F.one_hot(t, x.shape[1]).to(x.dtype) for t in (target, target_b))
        return soft(x, lam * next(ones) + (1 - lam) * next(ones))

    return Contender("timm", mixup)


def _plain_rows(case: Case) -> bool:
    """Return whether a case is (N, C) logits with class indices, which the kernels of language models compute."""
    return case.loss == "ce" and len(case.shape) == 2 and case.inputs in ("classes", "class weights", "ignored")


def _divergence(case: Case) -> Call:
    """Return Liger's function with log-probabilities or probabilities that torch computes from the logits."""
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

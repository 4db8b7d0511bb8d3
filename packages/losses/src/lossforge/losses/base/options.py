"""Options that every loss has, their checks, the tensors they stand for, and what they make of a call."""

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.option_types import Activation, BoxFormat, Empty, Gradient
from lossforge.losses.base.record import C, CheckedCall, first, of_one_row


class Settings(TypedDict, total=False):
    """Keyword-only options of every loss that a module keeps; lossforge.losses.functional says what they do."""

    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None


class MeanOptions(TypedDict, total=False):
    """Options of losses that are made of several calls."""

    empty: Empty


class CheckedMeanOptions(MeanOptions, total=False):
    """validate: check class indices on CUDA too, which waits for the device."""

    validate: bool | None


class ScalarOptions(MeanOptions, total=False):
    """Options of losses that return a scalar alone."""

    gradient: Gradient | None


class SharedOptions(ScalarOptions, total=False):
    """Options of losses without logits whose memory the gradient may take."""

    normalizer: float | Tensor | None


class InplaceScalarOptions(ScalarOptions, total=False):
    """Options of losses whose gradient may be written over the logits."""

    inplace: bool


class InplaceOptions(InplaceScalarOptions, total=False):
    """Options of losses without class indices."""

    normalizer: float | Tensor | None


class CheckedOptions(SharedOptions, total=False):
    """validate: check values on CUDA too, which waits for the device."""

    validate: bool | None


class Weight(TypedDict, total=False):
    """weight: broadcasts to the losses."""

    weight: Tensor | None


class WeightedOptions(SharedOptions, Weight, total=False):
    """For losses of other things than logits."""


class MaskedWeightedOptions(WeightedOptions, total=False):
    """mask: which elements count."""

    mask: Tensor | None


class CornerOptions(WeightedOptions, total=False):
    """format: of both boxes. validate: raise where a box is flipped, which waits for the device."""

    format: BoxFormat
    validate: bool | None


class CallOptions(Settings, total=False):
    """Settings and what each call brings."""

    normalizer: float | Tensor | None


class Options(CallOptions, total=False):
    target_b: Tensor | None
    lam: float | Tensor | None


class UnscoredOptions(Options, total=False):
    """For losses whose signature has the score."""

    dim: int
    mask: Tensor | None


class WeightedUnscoredOptions(Weight, UnscoredOptions, total=False):
    """For those whose signature does not have the weight."""


class ElementwiseOptions(UnscoredOptions, total=False):
    score: Tensor | None


class WeightedElementwiseOptions(Weight, ElementwiseOptions, total=False):
    """For losses whose signature does not have the weight."""


class MaskedOptions(CheckedOptions, total=False):
    """mask: which pixels count."""

    mask: Tensor | None


class MaskedScalarOptions(ScalarOptions, total=False):
    """mask: which classes of a sample count."""

    mask: Tensor | None


class MaskedInplaceOptions(InplaceOptions, MaskedScalarOptions, total=False):
    """With the gradient in the memory of the logits, and a normalizer."""


class OfRows(TypedDict, total=False):
    """weight, labels: one a row."""

    weight: Tensor | None
    labels: Tensor | None


class DivergenceOptions(OfRows, CallOptions, total=False):
    """For losses of two distributions a row."""


class CappedOptions(DivergenceOptions, total=False):
    """scale, softcap: logits become softcap · tanh(scale · x / softcap) before the temperature."""

    scale: float
    softcap: float | None


class TopKOptions(CappedOptions, total=False):
    """hard_weight: the share of the labels' cross entropy."""

    hard_weight: float


class CappedDivergenceOptions(CappedOptions, total=False):
    """target_scale, target_softcap: the teacher's. hard_weight: the share of the labels' cross entropy."""

    target_scale: float
    target_softcap: float | None
    hard_weight: float


class Regions(TypedDict, total=False):
    """Which regions count, and how."""

    include_background: bool
    activation: Activation | None
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool
    mask: Tensor | None


class RegionSettings(Regions, Settings, total=False):
    """For losses of regions whose mean has two divisors."""


class RegionOptions(Regions, CallOptions, total=False):
    """For losses of regions."""


def check_options(x: Tensor, reduction: str, options: Any, accepted: type, of: str = "input") -> Tensor | None:
    """Check names and values of the options; the normalizer where it is a tensor. of: what the loss calls x."""
    checks.only(accepted.__annotations__, options, "the loss")
    mode = options.get("gradient")
    divisor = checked_reduction(reduction, options.get("normalizer"), x, of)
    checks.one_of("empty", options.get("empty", "nan"), checks.EMPTY)
    checks.one_of("gradient", mode, checks.MODES)
    if reduction == "none" and mode == "forward":
        raise ValueError('gradient="forward" needs a scalar result: reduction "mean" or "sum", got "none"')
    if options.get("inplace") and x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if x.is_leaf:
            raise ValueError("inplace=True needs logits that are an intermediate result, got a leaf that requires grad")
        if not is_dense(x):
            raise ValueError(
                f"inplace=True needs logits without holes or overlaps in memory, got {tuple(x.shape)} with strides {x.stride()}"
            )
        if x.is_neg():
            raise ValueError(
                "inplace=True needs logits whose memory holds their values, got a lazy negative view: call resolve_neg() on it first"
            )
    if isinstance(divisor, Tensor):
        return divisor
    if divisor is not None:
        options["normalizer"] = divisor
    return None


def checked_reduction(reduction: str, normalizer: float | Tensor | None, x: Tensor, of: str = "input") -> float | Tensor | None:
    """Check a reduction; return its normalizer as `checked_normalizer` does. of: what the loss calls x."""
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    if normalizer is None:
        return None
    if reduction == "none":
        raise ValueError('normalizer needs a scalar result: reduction "mean" or "sum", got "none"')
    return checked_normalizer(normalizer, x, of)


def checked_normalizer(normalizer: float | Tensor, x: Tensor, of: str = "input") -> float | Tensor:
    """Return a normalizer as a number, or as a 0-d tensor on the device of x."""
    if not isinstance(normalizer, Tensor) or (checks.known(normalizer) and not checks.is_parameter(normalizer, x)):
        return checks.number("normalizer", normalizer)
    if normalizer.ndim != 0:
        raise ValueError(f"normalizer must be a number or a 0-d tensor, got shape {tuple(normalizer.shape)}")
    checks.beside("normalizer", normalizer, x, of)
    return normalizer


def is_dense(x: Tensor) -> bool:
    """Whether x fills its memory without holes or overlaps, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def checked_call(call: C, options: Any, normalizer: Tensor | None, one_row: bool = False) -> CheckedCall[C]:
    """Return a checked call with what every template's options say of it.

    normalizer: where it is a tensor. one_row: whether the call has logits (C,) as one row.
    """
    record: Any = call
    record = record._replace(
        normalizer=normalizer,
        loss_scale=record.loss_scale * factor(options),
        reduction=call.reduction if options.get("normalizer") is None else "sum",
        empty_is_zero=options.get("empty") == "zero",
    )
    return CheckedCall(record, options, of_one_row if one_row else first)


def broadcast_weight(options: WeightedOptions, x: Tensor, of: str, shape: torch.Size, what: str) -> Tensor | None:
    """Return the weight, once it is checked to broadcast to a shape. of: what the loss calls x. what: what it must do, in a message."""
    weight = options.get("weight")
    if weight is not None:
        checks.floating_beside("weight", weight, x, of)
        checks.fits("weight", weight, checks.expands(weight, shape), f"{what} {{}}", shape)
    return weight


def checked_mask(mask: object, x: Tensor, of: str = "input") -> Tensor:
    """Return a mask once its type and its device are checked: bool, or weights without a gradient. of: what the loss calls x."""
    t = checks.tensor("mask", mask)
    if t.dtype != torch.bool and not t.is_floating_point():
        raise TypeError(f"mask must be of dtype bool, or floating where it holds weights, got {t.dtype}: did you mean mask.bool()?")
    checks.without_gradient("mask", t)
    checks.beside("mask", t, x, of)
    return t


def mask_of_elements(mask: object, x: Tensor, of: str = "input") -> Tensor:
    """Return a mask of elements, which broadcasts to x, once it is checked. of: what the loss calls x."""
    t = checked_mask(mask, x, of)
    checks.broadcasts("mask", t, x, of)
    return t


def mask_of_pixels(mask: object, x: Tensor, by_class: bool) -> Tensor:
    """Return a mask of the pixels of x (N, C, d…), or with `by_class` of its elements, in the shape of x.

    mask: (N, d…) or (N, 1, d…), with `by_class` also (N, C, d…).
    """
    t, shape = checked_mask(mask, x), rows_of(x, 1)
    if t.ndim == x.ndim - 1:
        checks.fits("mask", t, t.shape == shape, "have shape {}, one entry a pixel", shape)
        return t.unsqueeze(1).expand(x.shape)
    fits = t.ndim == x.ndim and rows_of(t, 1) == shape and (t.shape[1] == 1 or (by_class and t.shape == x.shape))
    each = (
        " or that of input" if by_class else ", because under a softmax, and with class indices, a pixel counts in all classes or in none"
    )
    checks.fits("mask", t, fits, "have shape {}, one entry a pixel" + each, shape)
    return t.expand(x.shape)


def of_classes(x: Tensor, name: str = "input") -> int:
    """Return the dimension of the classes of x (C,), (N, C) or (N, C, d…), once it is checked to have one."""
    checks.whole(name, x)
    if x.ndim == 0:
        raise ValueError(f"{name} must have a dimension of classes, got a 0-d tensor")
    dim = min(x.ndim - 1, 1)
    if x.shape[dim] == 0 and 0 not in rows_of(x, dim):
        raise ValueError(f"{name} must have at least one class, got shape {tuple(x.shape)}")
    return dim


def per_class(number: Any, classes: int) -> Any:
    """Return number / classes, by the product in which torch.compile's guards compute it: they compare the last bit."""
    return number * (1.0 / max(int(classes), 1))


def rows_of(x: Tensor, dim: int) -> tuple[int, ...]:
    """Return the shape of x without the dimension `dim`."""
    return tuple([n for d, n in enumerate(x.shape) if d != dim % x.ndim])


def weights_of_classes(name: str, t: Tensor | None, x: Tensor, classes: int) -> Tensor | None:
    if t is None:
        return None
    checks.floating_beside(name, t, x)
    checks.fits(name, t, t.shape == (classes,), "hold one number a class, shape ({},)", classes)
    return t.contiguous()


def factor(options: Any) -> float:
    """Return the factor of the sum that a number as normalizer means. A tensor divides on its device."""
    normalizer = options.get("normalizer")
    if normalizer is None or isinstance(normalizer, Tensor):
        return 1.0
    if normalizer == 0:
        return 0.0 if options.get("empty") == "zero" else math.inf
    return 1.0 / normalizer


def share(lam: float | Tensor | None, target: Tensor, target_b: Tensor | None, x: Tensor) -> Tensor | None:
    """λ of a mixup pair as a tensor of the target's shape; as a number, one a sample, or one a row it expands to that."""
    if (target_b is None) != (lam is None):
        raise ValueError(f"target_b and lam go together, got only {'lam' if target_b is None else 'target_b'}")
    if lam is None:
        return None
    if target.is_floating_point():
        raise TypeError(f"target must hold class indices where target_b is given, got {target.dtype}")
    if not isinstance(lam, Tensor) or (checks.known(lam) and not checks.is_parameter(lam, x)):
        lam = checks.number("lam", lam)
        return torch.full((), lam, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device).expand(target.shape)
    checks.floating_beside("lam", lam, x)
    if lam.ndim == 1 and target.ndim > 1:
        lam = lam.view(-1, *(1,) * (target.ndim - 1))
    if not checks.expands(lam, target.shape):
        raise ValueError(f"lam must be a number, 0-d, or one a sample or row of target {tuple(target.shape)}, got shape {tuple(lam.shape)}")
    return lam.expand(target.shape)


def row_score(score: object, target: Tensor, pair: Mapping[str, object], x: Tensor) -> Tensor:
    """Check the score of each row with a class index, and return it."""
    if target.is_floating_point():
        raise TypeError(f"target must hold class indices where score is given, got {target.dtype}")
    if names := [name for name, t in pair.items() if t is not None]:
        raise ValueError(f"score and {names[0]} exclude each other, got both")
    checks.floating_beside("score", score, x)
    assert isinstance(score, Tensor)
    checks.fits("score", score, score.shape == target.shape, "have the shape of target, {}", target.shape)
    return score

"""A custom loss without kernels: a plain function or module of (logits, target), computed by torch."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lab.base.errors import UserError, unknown
from lab.data.batch import Batch


@dataclass
class PlainLoss:
    """function: takes logits (N, C) and class indices (N,), or multi-hot targets (N, C); returns the batch's mean, or a value for each
    sample (N,) or element (N, C).
    """

    function: Any
    setting: str
    template = SimpleNamespace(name="plain")  # of a loss without kernels: its name alone

    def __call__(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        """Return the sum over the batch, divided by `normalizer`.

        Raises:
            UserError: the function returns something else, a mean although samples have weights, or no elements although labels are masked.
        """
        value = self.of(logits, batch.target)
        if batch.known is not None:
            if value.shape != batch.known.shape:
                got = f"returns {tuple(value.shape)} for logits {tuple(logits.shape)}, and some labels are masked"
                raise UserError(f"{self.setting}: {got}; a value for each element is expected.")
            value = value.where(batch.known, 0.0)
        if batch.target_b is not None and batch.lam is not None:
            value = batch.lam * value + (1 - batch.lam) * self.of(logits, batch.target_b)
        if value.ndim == 0:
            if batch.weight is not None:
                raise UserError(f"{self.setting}: returns a mean, and the samples have weights; a value a sample is expected.")
            return value * len(batch) / normalizer
        rows = value.reshape(len(value), -1).sum(1)
        return (rows if batch.weight is None else rows * batch.weight).sum() / normalizer

    def of(self, logits: Tensor, target: Tensor) -> Tensor:
        value = self.function(logits, target)
        if not isinstance(value, Tensor) or tuple(value.shape) not in ((), tuple(logits.shape[:1]), tuple(logits.shape)):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            wanted = "a mean, or a value for each sample or element, is expected."
            raise UserError(f"{self.setting}: returns {got} for logits {tuple(logits.shape)}; {wanted}")
        if logits.requires_grad and not value.requires_grad:
            raise UserError(f"{self.setting}: its value has no gradient: it does not depend on the logits, or was detached from them.")
        return value


def plain_loss(setting: str, found: Any, hyper: Mapping[str, float], device: torch.device) -> PlainLoss:
    """Return the loss of a function with keyword arguments `hyper`, of a module, or of a module's class, made with `hyper`.

    Raises:
        UserError: it is none of these, does not take `hyper`, or has parameters, which nothing would train.
    """
    if not callable(found):
        raise UserError(f"{setting}: is a {type(found).__name__}; a loss, a function of (logits, target) or a torch.nn.Module is expected.")
    if isinstance(found, nn.Module) and hyper:
        raise UserError(f"{setting}: is a module that is made already; loss.hyper={dict(hyper)} has no effect on it.")
    taken = inspect.signature(found).parameters.values()
    batch = [] if isinstance(found, type) else [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    known = [p.name for p in taken if p not in batch]  # not logits and target
    if wrong := [name for name in hyper if name not in known]:
        raise unknown(f"loss.hyper.{wrong[0]}", wrong[0], known)
    function: Any = found(**hyper) if isinstance(found, type) else partial(found, **hyper) if hyper else found
    if isinstance(function, nn.Module):
        if any(True for _ in function.parameters()):
            raise UserError(f"{setting}: has parameters of its own, which nothing trains; make them buffers, or put them into the model.")
        function = function.to(device)
    return PlainLoss(function, setting)

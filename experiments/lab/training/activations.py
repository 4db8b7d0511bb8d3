"""Activation checkpointing: blocks do not keep activations, but compute them again in backward."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lab.base.errors import UserError
from lab.processes.parallel import blocks


class Checkpointed(nn.Module):
    """Mixin before a block's class, so that parameters keep their names and copies are real copies."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        # a compiled model itself runs the block's side effects once
        contexts: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": lambda: (nullcontext(), statistics_kept(self))}
        return checkpoint(super().forward, *args, use_reentrant=False, **contexts, **kwargs)


def checkpoint_blocks(model: nn.Module, setting: str) -> None:
    """Compute the model's innermost blocks again in backward, as `setting` asks.

    timm's own switch is not used, because with it batch norms count each batch twice in their running statistics.

    Raises:
        UserError: the model has no repeated blocks.
    """
    found = blocks(model)
    outer = {id(module) for block in found for module in found if block is not module and any(block is each for each in module.modules())}
    inner: list[Any] = [block for block in found if id(block) not in outer]
    if not inner:
        raise UserError(f"{setting}: {type(model).__name__} has no blocks in an nn.Sequential or nn.ModuleList; leave it at false.")
    made: dict[type, type] = {}
    for block in inner:
        kind = type(block)
        block.__class__ = made.setdefault(kind, type(f"Checkpointed{kind.__name__}", (Checkpointed, kind), {}))


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """Keep batch norms' running statistics unchanged while a block is computed again, because they already include this batch."""
    norms: list[Any] = [module for module in block.modules() if getattr(module, "num_batches_tracked", None) is not None]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked

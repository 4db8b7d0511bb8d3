"""Contrastive losses of batches whose activations do not fit: gradients of features first, then those of the encoders, chunk by chunk."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from lossforge.losses.base import checks

__all__ = ["grad_cache_backward"]
Chunk = Tensor | Sequence[Any] | Mapping[str, Any]


class Scaler(Protocol):
    """What scales a loss before backward, as torch.amp.GradScaler."""

    def scale(self, outputs: Tensor, /) -> Tensor: ...


@checks.named
def grad_cache_backward(
    loss: Callable[..., Tensor],
    encoders: Sequence[Callable[..., Tensor]],
    inputs: Sequence[Chunk],
    chunk_size: int,
    *,
    scaler: Scaler | None = None,
) -> Tensor:
    """Go backward through a loss of a whole batch by chunks of it, as GradCache (Gao et al. 2021, arXiv 2101.06983).

    The encoders run twice. First without a graph, chunk by chunk, for the features of the whole batch; the loss gives these their
    gradients. Then each chunk runs again with a graph, with the same random numbers, and the gradients of its features go back through
    it. So memory holds the activations of one chunk. Gradients are those of the loss of the whole batch, added to `.grad` as by
    `backward()`: a chunk does not change which negatives count. Each run has a copy of its chunk, so that an encoder may write into it.

    Under DistributedDataParallel, give the module that wraps an encoder: gradients are averaged over the processes once, in its last
    chunk. Give the loss `group=`, so that features are compared with those of all processes. Batches may differ in size, but each must
    have a row.

    When to use it: Take it where a contrastive loss needs more negatives than activations fit in memory. The encoders run forward twice.

    When not: Leave it for an encoder with batch normalisation, which sees chunks in place of the batch and counts each twice, or where a
    queue of earlier features does: `info_nce_loss(negatives=)`. The inputs get no gradients.

    Args:
        loss: from one tensor of features (N, D) an encoder to a scalar, such as `info_nce_loss`. What else it differentiates, such as a
            temperature, gets its gradient too.
        encoders: one or several, also the same one several times. Each takes a chunk of its input, and returns its features (n, D).
        inputs: one for each encoder: a tensor (N, …), a mapping of such, whose names are keywords of the encoder, or a sequence of such,
            which are its arguments. Those of one input have equally many rows, on the device of the encoder.
        chunk_size: rows of a chunk, at least 1.
        scaler: torch.amp.GradScaler, for float16; its step follows as usual.

    Returns:
        The loss, detached.

    Raises:
        ValueError: encoders and inputs are not equally many, or an input has no rows, or rows of several numbers.
        TypeError: an input is neither a tensor, nor a mapping, nor a sequence of tensors; or an encoder does not return a tensor.

    Examples:
        >>> import torch
        >>> from lossforge.losses import grad_cache_backward, info_nce_loss
        >>> encoder = torch.nn.Linear(8, 4)
        >>> grad_cache_backward(info_nce_loss, [encoder, encoder], [torch.randn(6, 8), torch.randn(6, 8)], chunk_size=2)
    """
    size = checks.whole_number("chunk_size", chunk_size)
    if size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {size}")
    if len(encoders) != len(inputs) or not encoders:
        raise ValueError(f"encoders and inputs must be equally many, and at least one, got {len(encoders)} and {len(inputs)}")
    chunks = [_chunks(f"inputs[{i}]", each, size) for i, each in enumerate(inputs)]
    states: list[list[_Randomness]] = [[] for _ in chunks]
    features = []
    for encoder, parts, kept in zip(encoders, chunks, states, strict=True):
        of_chunks = []
        for part in parts:
            kept.append(_Randomness(part))
            with torch.no_grad():
                of_chunks.append(_encoded(encoder, part))
        features.append(torch.cat(of_chunks).requires_grad_())
    value = loss(*features)
    (value if scaler is None else scaler.scale(value)).backward()
    last = {id(encoder): i for i, encoder in enumerate(encoders)}
    for i, (encoder, parts, kept, whole) in enumerate(zip(encoders, chunks, states, features, strict=True)):
        gradients = torch.zeros_like(whole) if whole.grad is None else whole.grad
        for j, (part, randomness, gradient) in enumerate(zip(parts, kept, gradients.split(size), strict=True)):
            averages = last[id(encoder)] == i and j == len(parts) - 1
            alone = contextlib.nullcontext() if averages else getattr(encoder, "no_sync", contextlib.nullcontext)()
            with alone, randomness.again():
                found = _encoded(encoder, part)
                if found.requires_grad:  # not of a frozen encoder
                    found.backward(gradient)
    return value.detach()


class _Randomness:
    """The state of the random numbers of the CPU and of a chunk's devices, to run it again with the same numbers."""

    def __init__(self, chunk: Chunk) -> None:
        self.cpu = torch.get_rng_state()
        self.devices, self.states = get_device_states(*_tensors(chunk))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run with that state, and restore today's."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


def _tensors(chunk: Chunk) -> list[Any]:
    return [chunk] if isinstance(chunk, Tensor) else [*chunk.values()] if isinstance(chunk, Mapping) else [*chunk]


def _chunks(name: str, given: Chunk, size: int) -> list[Chunk]:
    """Return an input in chunks of `size` rows, the last perhaps of fewer."""
    if not isinstance(given, (Tensor, Mapping, Sequence)) or isinstance(given, str):
        raise TypeError(f"{name} must be a tensor, or a mapping or sequence of tensors, got {type(given).__name__}")
    for t in _tensors(given):
        checks.tensor(f"each part of {name}", t)
        checks.without_gradient(name, t)
    rows = sorted({len(t) if t.ndim else 0 for t in _tensors(given)})
    if len(rows) != 1 or not rows[0]:
        raise ValueError(f"{name} must have rows, equally many in each of its tensors, got {rows}")

    def part(start: int) -> Chunk:
        if isinstance(given, Tensor):
            return given[start : start + size]
        if isinstance(given, Mapping):
            return {key: t[start : start + size] for key, t in given.items()}
        return [t[start : start + size] for t in given]

    return [part(start) for start in range(0, rows[0], size)]


def _encoded(encoder: Callable[..., Tensor], chunk: Chunk) -> Tensor:
    """Return the features of a copy of a chunk: what an encoder writes into its input does not reach the next run."""
    if isinstance(chunk, Tensor):
        found = encoder(chunk.clone())
    elif isinstance(chunk, Mapping):
        found = encoder(**{key: t.clone() for key, t in chunk.items()})
    else:
        found = encoder(*[t.clone() for t in chunk])
    if not isinstance(found, Tensor):
        raise TypeError(f"an encoder must return a tensor of features (N, D), got {type(found).__name__}")
    return found

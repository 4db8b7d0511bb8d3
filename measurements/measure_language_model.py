"""Train a small causal language model under the engines of a fused cross entropy, and two unfused ones, from the same weights.

Each step takes the same batch under all of them.

The text is the source code of Python's standard library, by bytes; the vocabulary is padded, as a tokenizer's would be, so that the logits
take their memory. --small: a model for a CPU, which takes seconds.
"""

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import Request, free_memory, largest_difference, peak_mib
from torch import Tensor, nn

from lossforge.bench.measure import synchronize
from lossforge.losses import cross_entropy, linear_cross_entropy

STEPS, UNTIMED = 300, 20
BYTES = 4_000_000


class Size(NamedTuple):
    """The size of a model and its batches. chunk: tokens at a time of the fused loss, None for its default."""

    vocabulary: int
    width: int
    layers: int
    length: int
    batch: int
    rate: float
    chunk: int | None = None


SIZES = {"bfloat16": Size(50_304, 512, 4, 1024, 32, 3e-4), "float32": Size(50_304, 512, 4, 1024, 8, 3e-4)}
SMALL = {"float32": Size(320, 32, 2, 16, 4, 1e-3, 24)}


class LanguageModel(nn.Module):
    """From tokens (N, T) to hidden states (N, T, H); the head shares its weight with the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        how: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(size.width, max(size.width // 64, 1), 4 * size.width, **how)
        self.blocks = nn.TransformerEncoder(block, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.length))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for weight in (self.tokens.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.tokens(tokens) + self.places.weight, self.mask, is_causal=True)


Loss = Callable[[Tensor, nn.Linear, Tensor, Size], Tensor]


def fused(**options: Any) -> Loss:
    return lambda hidden, head, target, size: linear_cross_entropy(hidden, head.weight, target, chunk=size.chunk, **options)


LOSSES: dict[str, Loss] = {
    "linear_cross_entropy": fused(),
    "linear_cross_entropy, gradient=backward": fused(gradient="backward"),
    "linear_cross_entropy, logits=float32": fused(logits="float32"),
    "cross_entropy": lambda hidden, head, target, size: cross_entropy(head(hidden).flatten(0, 1), target.flatten()),
    "torch.nn.functional.cross_entropy": lambda hidden, head, target, size: F.cross_entropy(head(hidden).flatten(0, 1), target.flatten()),
}


def text(device: torch.device) -> Tensor:
    """Return bytes of the standard library's modules in the order of their names."""
    joined = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    return torch.frombuffer(bytearray(joined[:BYTES]), dtype=torch.uint8).to(device)


def trained(name: str, dtype: str, size: Size, device: torch.device) -> dict[str, Any]:
    """Train, and return the losses of all steps, the time of a step, and the most memory that was allocated at once."""
    torch.manual_seed(0)
    model = LanguageModel(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), size.rate)
    source, order = text(device), torch.Generator().manual_seed(1)
    window, losses, began = torch.arange(size.length + 1, device=device), [], 0.0
    free_memory()
    for step in range(STEPS):
        if step == UNTIMED:
            synchronize(device)
            began = time.perf_counter()
        first = torch.randint(len(source) - size.length, (size.batch, 1), generator=order).to(device)
        tokens = source[first + window].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = LOSSES[name](model(tokens[:, :-1]), model.head, tokens[:, 1:], size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize(device)
    ms = (time.perf_counter() - began) / (STEPS - UNTIMED) * 1e3
    return {"dtype": dtype, "loss": name, "ms": ms, "peak_mib": peak_mib(), "losses": torch.stack(losses).tolist()}


def language_model(request: Request) -> int:
    # attention would sum in another order each time, and hide the losses' rounding
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property that torch adds at run time
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, rows = SMALL if request.small else SIZES, []
    for dtype, size in sizes.items():
        found = {name: trained(name, dtype, size, device) for name in LOSSES}
        for name, row in found.items():
            row["largest_difference"] = largest_difference(row["losses"], found["cross_entropy"]["losses"])
            print(dtype, name, f"{row['ms']:.2f} ms, {row['peak_mib'] or 0:,.0f} MiB, {row['losses'][-1]:.6f}", flush=True)
        rows += found.values()
        request.save({**request.source("triton"), "sizes": {dtype: size._asdict() for dtype, size in sizes.items()}, "rows": rows})
    return 0

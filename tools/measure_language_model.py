"""Train a small causal language model under a fused and two unfused cross entropies from the same weights on the same batches.

`python tools/measure_language_model.py [FILE [COMMIT]] [--small]`; COMMIT where the sources are not a git checkout. The text is the source
code of Python's standard library, by bytes; the vocabulary is padded, as a tokenizer's would be, so that the logits take their memory.
--small: a model for a CPU, which takes seconds.
"""

import gc
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.runs.files import write_text

ROOT = Path(__file__).resolve().parents[1]
STEPS, UNTIMED = 200, 20
BYTES = 4_000_000


class Size(NamedTuple):
    """Of a model and its batches. chunk: tokens at a time of the fused loss, None for its own choice."""

    vocabulary: int
    width: int
    layers: int
    length: int
    batch: int
    rate: float
    chunk: int | None = None


SIZES = {"bfloat16": Size(50_304, 512, 4, 1024, 32, 3e-4), "float32": Size(50_304, 512, 4, 1024, 8, 3e-4)}
SMALL = {"float32": Size(320, 32, 2, 16, 4, 1e-3, 24)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(1, -2).unbind(1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


class LanguageModel(nn.Module):
    """From tokens (N, T) to hidden states (N, T, H); the head shares its weight with the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*[Block(size.width) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        for weight in (self.tokens.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))


Loss = Callable[[LanguageModel, Tensor, Tensor, Size], Tensor]


def fused(model: LanguageModel, hidden: Tensor, target: Tensor, size: Size) -> Tensor:
    from lossforge.losses import linear_cross_entropy

    return linear_cross_entropy(hidden, model.head.weight, target, chunk=size.chunk)


def unfused(model: LanguageModel, hidden: Tensor, target: Tensor, size: Size) -> Tensor:
    from lossforge.losses import cross_entropy

    return cross_entropy(model.head(hidden).flatten(0, 1), target.flatten())


def by_torch(model: LanguageModel, hidden: Tensor, target: Tensor, size: Size) -> Tensor:
    return F.cross_entropy(model.head(hidden).flatten(0, 1), target.flatten())


LOSSES: dict[str, Loss] = {"linear_cross_entropy": fused, "cross_entropy": unfused, "torch.nn.functional.cross_entropy": by_torch}


def text(device: torch.device) -> Tensor:
    """Bytes of the standard library's modules in the order of their names."""
    joined = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        joined += path.read_bytes()
    return torch.frombuffer(joined[:BYTES], dtype=torch.uint8).to(device)


def trained(name: str, dtype: str, size: Size, device: torch.device) -> dict[str, Any]:
    """The losses of all steps, the time of a step, and the most memory that was allocated at once."""
    torch.manual_seed(0)
    model = LanguageModel(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), size.rate)
    source, order = text(device), torch.Generator().manual_seed(1)
    window, losses, began = torch.arange(size.length + 1, device=device), [], 0.0
    _start_of_memory(device)
    for step in range(STEPS):
        if step == UNTIMED:
            began = _now(device)
        first = torch.randint(len(source) - size.length, (size.batch, 1), generator=order).to(device)
        tokens = source[first + window].long()
        with _autocast(dtype, device):
            loss = LOSSES[name](model, model(tokens[:, :-1]), tokens[:, 1:], size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    ms = (_now(device) - began) / (STEPS - UNTIMED) * 1e3
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {"dtype": dtype, "loss": name, "ms": ms, "peak_mib": peak, "losses": torch.stack(losses).tolist()}


def _autocast(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def _start_of_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def differences(rows: list[dict[str, Any]]) -> None:
    """Add each curve's largest relative difference from that of `cross_entropy` in the same dtype."""
    for row in rows:
        other = next(each for each in rows if (each["dtype"], each["loss"]) == (row["dtype"], "cross_entropy"))
        row["largest_difference"] = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], other["losses"], strict=True))


def main(arguments: list[str]) -> int:
    import triton

    from lossforge.bench.run import current_commit

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of deterministic products, read when CUDA starts
    # what attention would sum in an order of its own hides the losses' rounding
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    places = [word for word in arguments if not word.startswith("--")]
    path = Path(places[0]) if places else ROOT / "results" / "language-model.json"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = SMALL if "--small" in arguments else SIZES
    rows = []
    for dtype, size in sizes.items():
        for name in LOSSES:
            rows.append(trained(name, dtype, size, device))
            print(dtype, name, f"{rows[-1]['ms']:.2f} ms, {rows[-1]['peak_mib'] or 0:,.0f} MiB, {rows[-1]['losses'][-1]:.6f}", flush=True)
    differences(rows)
    about = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": places[1] if len(places) > 1 else current_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "sizes": {dtype: size._asdict() for dtype, size in sizes.items()},
    }
    write_text(path, json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

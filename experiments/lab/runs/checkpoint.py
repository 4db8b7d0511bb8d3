"""Checkpoints that are complete or absent."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.runs.files import write_whole


def save(state: dict[str, Any], path: Path) -> None:
    """Write tensors and plain values so that `torch.load(path, weights_only=True)` reads them.

    Raises:
        UserError: the file cannot be written; one of that name that was there is as it was.
    """
    write_whole(path, lambda file: torch.save(state, file))


def save_weights(weights: dict[str, Tensor], path: Path, about: dict[str, Any]) -> None:
    """Write weights as safetensors, for other programs; `about` becomes its metadata, as JSON.

    Raises:
        UserError: as `save`.
    """
    import safetensors.torch

    # tensors that share memory or are not contiguous are refused
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    metadata = {name: json.dumps(value) for name, value in about.items()}
    write_whole(path, lambda file: file.write(safetensors.torch.save(tensors, metadata | {"format": "pt"})))


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def load_weights(path: Path) -> dict[str, Any]:
    """What `save_weights` wrote: the weights as `model`, and what they are as in a checkpoint."""
    import safetensors.torch

    with safetensors.safe_open(path, "pt") as file:
        about = {name: json.loads(value) for name, value in (file.metadata() or {}).items() if name != "format"}
    return about | {"model": safetensors.torch.load_file(path), "ema": None}


def remove_before(epoch: int, folder: Path) -> None:
    """Delete the checkpoints `epoch-N.pt` of earlier epochs."""
    for path in folder.glob("epoch-*.pt"):
        if int(path.stem.removeprefix("epoch-")) < epoch:
            path.unlink()

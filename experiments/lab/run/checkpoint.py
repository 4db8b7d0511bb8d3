"""Checkpoints: a file is either complete or absent, and a damaged one is refused."""

import hashlib
import json
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.base.files import open_to_read, write_whole

DIGEST = "sha256"
"""The name in a safetensors file's metadata of the digest of all else that the file holds."""

DESCRIBED = ("classes", "samples", "data", "norm", "config", "signature", "updates")
"""What a safetensors file holds of a checkpoint beside its weights."""

ALLOCATING = ("builtins bytearray", "__builtin__ bytearray", "torch Tensor", "torch._tensor Tensor")
"""What torch.load would call with a number of bytes or a shape, and what does not come from the file then fills the memory."""


def save(state: dict[str, Any], path: Path) -> None:
    """Write tensors and plain values so that `torch.load(path, weights_only=True)` reads them.

    Raises:
        UserError: the file cannot be written; an earlier file of that name is unchanged.
    """
    write_whole(path, lambda file: torch.save(state, file))


def save_weights(weights: dict[str, Tensor], path: Path, about: dict[str, Any]) -> None:
    """Write weights as safetensors, for other programs; `about` becomes its metadata, as JSON.

    Raises:
        UserError: as `save`.
    """
    import safetensors.torch

    # safetensors refuses tensors that share memory or are not contiguous
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    metadata = {name: json.dumps(value) for name, value in about.items()} | {"format": "pt"}
    metadata[DIGEST] = _digest(tensors, metadata)
    write_whole(path, lambda file: file.write(safetensors.torch.save(tensors, metadata)))


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote.

    Raises:
        UserError: a part of the file does not match its checksum, which torch.load would not check, or would take more memory than it has.
    """
    try:
        with open_to_read(path) as opened, zipfile.ZipFile(opened) as file:
            _refuse_more(path, file)
            part = file.testzip()
    except UserError:
        raise
    except Exception as error:  # zipfile raises many kinds of errors for a damaged archive
        raise _damaged(path, f"its directory cannot be read ({error})") from None
    if part is not None:
        raise _damaged(path, f"the checksum of its part {part.partition('/')[2] or part} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True)


def _refuse_more(path: Path, file: zipfile.ZipFile) -> None:
    """Raise UserError for a file that is small and would fill the memory: compressed, or by a call that allocates.

    What `save` writes is not compressed, and calls nothing but torch's functions that put tensors together.
    """
    size = path.stat().st_size
    if (unpacked := sum(part.file_size for part in file.infolist())) > size:
        raise _damaged(path, f"it unpacks to {unpacked:,} bytes from {size:,}, and a checkpoint is not compressed")
    for part in file.infolist():
        if part.filename.endswith("data.pkl"):
            for code, argument, _ in pickletools.genops(file.read(part)):
                if code.name == "GLOBAL" and argument in ALLOCATING:
                    raise _damaged(path, f"it holds a {str(argument).replace(' ', '.')}, which train.py does not save")


def load_weights(path: Path) -> dict[str, Any]:
    """Read what `save_weights` wrote: the weights as `model`, and the rest as in a checkpoint.

    Raises:
        UserError: the file does not match its digest. A file of another program may have no digest.
    """
    import safetensors.torch

    with safetensors.safe_open(path, "pt") as file:
        metadata: dict[str, str] = dict(file.metadata() or {})
    tensors = safetensors.torch.load_file(path)
    digest = metadata.pop(DIGEST, None)
    if digest is None and "config" in metadata:
        raise _damaged(path, f"its metadata has no {DIGEST}, as every file of this version has")
    if digest is not None and digest != _digest(tensors, metadata):
        raise _damaged(path, "its weights or its metadata are not what its digest says")
    about = {name: json.loads(value) for name, value in metadata.items() if name != "format"} if digest else {}
    return about | {"model": tensors, "ema": None}


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: is damaged: {what}. Take another copy of the file, or another checkpoint.")


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of the metadata, and of each tensor's name, dtype, shape and bytes."""
    found = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def remove_before(epoch: int, folder: Path) -> None:
    """Delete the checkpoints `epoch-N.pt` of earlier epochs."""
    for path in folder.glob("epoch-*.pt"):
        if int(path.stem.removeprefix("epoch-")) < epoch:
            path.unlink()

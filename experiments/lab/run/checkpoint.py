"""Checkpoints: a file is either complete or absent, and a damaged one is refused."""

import hashlib
import json
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.base.files import open_to_read, write_whole

DIGEST = "sha256"
"""The name in a safetensors file's metadata of the digest of all else that the file holds."""

DESCRIBED = ("classes", "samples", "data", "norm", "config", "signature", "updates")
"""What a safetensors file holds of a checkpoint beside its weights."""

PART = re.compile(r"(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)")
"""The parts of what torch.save writes; of these data.pkl alone is a pickle, and torch would find it by its name in other letters, too."""
STORED = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1}
"""Bytes of an element, by the name of the storage."""
OPCODES = (
    "PROTO STOP MARK GLOBAL REDUCE BUILD BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1"
)
OPCODES += " BINFLOAT BINUNICODE SHORT_BINSTRING TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS EMPTY_TUPLE EMPTY_LIST EMPTY_DICT"
"""What torch.save writes. Others allocate by a number of the file (BYTEARRAY8), or are not known to torch."""
SET: dict[bytes, Any] = {each: pickle._Unpickler.dispatch[each[0]] for each in (pickle.SETITEM, pickle.SETITEMS)}
KEYS = (str, int, float, bool, type(None))
"""Kinds of a dictionary's keys. The hash of nested tuples may take for ever."""
DTYPES = ("float16", "bfloat16", "float32", "float64")  # an optimiser's group may hold one
MOST_DIMENSIONS = 64  # of a tensor
WANTED = "A checkpoint of train.py, or a file of torch.save(model.state_dict(), path), is expected: plain tensors by name."


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
            parts = _parts(path, file)
            part = file.testzip()
            if part is None:
                _Names(path, file.read(parts["data.pkl"]), {name: each.file_size for name, each in parts.items()}).load()
    except UserError:
        raise
    except Exception as error:  # zipfile and pickle raise many kinds of errors for a damaged archive
        raise _damaged(path, f"it cannot be read ({error})") from None
    if part is not None:
        raise _damaged(path, f"the checksum of its part {part.partition('/')[2] or part} is wrong")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _damaged(path, f"it cannot be read ({error})") from None


def _parts(path: Path, file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the parts of an archive by name.

    Raises:
        UserError: the archive is compressed, has other parts than torch.save writes, or one twice.
    """
    size, every = path.stat().st_size, file.infolist()
    if (unpacked := sum(part.file_size for part in every)) > size:
        raise _damaged(path, f"it unpacks to {unpacked:,} bytes from {size:,}, and a checkpoint is not compressed")
    parts = {part.orig_filename.partition("/")[2]: part for part in every}
    script = any(name.startswith("code/") for name in parts)
    odd = [name for name, part in parts.items() if not PART.fullmatch(name) or part.filename != part.orig_filename]
    if script or odd or len(parts) < len(every) or "data.pkl" not in parts or len({each.filename.partition("/")[0] for each in every}) > 1:
        what = "a TorchScript archive" if script else f"an archive with a part {odd[0]!r}" if odd else "an archive of other parts"
        raise UserError(f"{path}: is {what}, and is not read. {WANTED}")
    return parts


class _Storage:
    """Stands for a kind of storage. element: bytes of one element."""

    def __init__(self, element: int) -> None:
        self.element = element


class _Inert:
    """Stands for a tensor or storage while a pickle is looked at, and cannot be changed."""

    def __init__(self, held: int, element: int) -> None:
        self.held, self.element = held, element  # bytes of all elements, and of one

    def __setstate__(self, _state: object) -> None:
        raise pickle.UnpicklingError("a tensor is changed after it was made")


class _Names(pickle._Unpickler):
    """Go through a pickle without making tensors; torch would call some of the functions that it allows with sizes of a stranger's choice.

    Args:
        path: the archive.
        content: its pickle.
        sizes: bytes of the archive's parts.

    Raises:
        UserError: it names something that a checkpoint does not need, or a tensor is larger than the part with its elements.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in OPCODES.split())
    }

    def __init__(self, path: Path, content: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(BytesIO(content))
        self.path, self.sizes = path, sizes

    def find_class(self, module: str, name: str) -> Any:
        element = STORED.get(name.removesuffix("Storage")) if module == "torch" and name.endswith("Storage") else None
        known = {"_rebuild_tensor_v2": self._tensor, "_rebuild_parameter": lambda data, _grad, _hooks: _Inert(data.held, data.element)}
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in DTYPES:
            return name
        if element is None and (module != "torch._utils" or name not in known):
            raise UserError(f"{self.path}: names {module}.{name}, and is not read. {WANTED}")
        return known[name] if element is None else _Storage(element)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or len(pid) != 5 or type(pid[1]) is not _Storage or type(pid[2]) is not str or type(pid[4]) is not int:
            raise pickle.UnpicklingError("a storage is not described as one")
        _kind, storage, key, _place, count = pid
        held = self.sizes[f"data/{key}"]
        if count * storage.element != held:
            raise pickle.UnpicklingError(f"a storage of {count} elements has {held:,} bytes")
        return _Inert(held, storage.element)

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:])
        SET[pickle.SETITEM](self)

    def load_setitems(self) -> None:
        self._check_keys(self.stack)
        SET[pickle.SETITEMS](self)

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems

    def _check_keys(self, items: Sequence[object]) -> None:
        if any(type(key) not in KEYS for key in items[::2]):
            raise pickle.UnpicklingError("a key is neither a text nor a number")

    def _tensor(self, storage: Any, _offset: int, size: tuple[int, ...], _stride: Any, _grad: bool, _hooks: Any) -> _Inert:
        if type(storage) is not _Inert or type(size) is not tuple or len(size) > MOST_DIMENSIONS:
            raise pickle.UnpicklingError("a tensor is not described as one")
        fits = all(type(each) is int and 0 <= each < 2**63 for each in size)
        if not fits or math.prod(size) * storage.element > storage.held:
            shape = f"{size!r:.100}" if fits else "of other kinds than sizes"
            raise UserError(f"{self.path}: has a tensor of the shape {shape}, and {storage.held:,} bytes of it. {WANTED}")
        return _Inert(storage.held, storage.element)


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

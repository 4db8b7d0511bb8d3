"""The matrix products around a chunk's logits: torch's own, where cuBLAS needs it in parts.

In half precision tensor cores take numbers of classes and distances between rows that are multiples of 16 bytes. 50,257 classes and
21,841 are not: on an H200 their products took about four times as long. So the stride of the rows of logits is a multiple of 16 bytes,
and the few classes that are left over have separate products.
"""

import functools

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.plans import applied, computed
from lossforge.kernels.product import add_product

UNIT = 8
"""Elements of half precision that tensor cores take at once."""
SMALL = 2**20
"""Products with no more elements are added up in float32. Of a small one, cuBLAS may split a sum and add the parts in half precision."""


HALF = (torch.float16, torch.bfloat16)


def _by_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


def room(classes: int, x: Tensor) -> int:
    """Return how many elements a row of logits takes in memory."""
    return -(-classes // UNIT) * UNIT if x.dtype in HALF else classes


def _parts(logits: Tensor, x: Tensor | None = None) -> list[slice]:
    """Return which classes a product takes: as many as tensor cores do, then the rest. x: what has the dtype of the products."""
    classes = logits.shape[1]
    whole = classes // UNIT * UNIT if _by_tensor_cores(logits if x is None else x) else 0
    return [slice(whole), slice(whole, classes)] if 0 < whole < classes else [slice(classes)]


def new_logits(rows: int, classes: int, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for logits, of the dtype of x unless given."""
    return computed(functools.partial(_new_logits, rows, classes, dtype or x.dtype), x)


def _new_logits(rows: int, classes: int, dtype: torch.dtype, x: Tensor) -> Tensor:
    found, wide = torch.empty((rows, room(classes, x)), dtype=dtype, device=x.device), room(classes, x) > classes
    return found[:, :classes] if wide else found


def logits_of(layer: Head, out: Tensor) -> Tensor:
    """Write a layer's logits into memory of their shape, and return it."""
    applied(_write_logits, out, *layer.tensors)
    return out


def _write_logits(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    for part in _parts(out, x):
        if out.dtype != x.dtype:
            if bias is not None:
                out[:, part].copy_(bias[part])
            add_product(out[:, part], x, weight[part].t(), bias is None)
        elif bias is None:
            torch.mm(x, weight[part].t(), out=out[:, part])
        else:
            torch.addmm(bias[part], x, weight[part].t(), out=out[:, part])


def write_product(out: Tensor, logits: Tensor, weight: Tensor) -> None:
    """out ← logits · weight, with sums in float32."""
    applied(_write_product, out, logits, weight)


def _write_product(out: Tensor, logits: Tensor, weight: Tensor) -> None:
    if len(_parts(logits)) == 1 and not (_by_tensor_cores(logits) and out.numel() <= SMALL):
        torch.mm(logits, weight, out=out)
        return
    if len(_parts(logits)) == 1:
        out.copy_(torch.mm(logits, weight, out_dtype=torch.float32))
        return
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _add_products(True, total, logits, weight)
    out.copy_(total)


def add_products(total: Tensor, logits: Tensor, weight: Tensor, first: bool) -> None:
    """total ← total + logits · weight, or logits · weight where it is the first, in the dtype of the total."""
    applied(functools.partial(_add_products, first), total, logits, weight)


def _add_products(first: bool, total: Tensor, logits: Tensor, weight: Tensor) -> None:
    for part in _parts(logits):
        add_product(total, logits[:, part], weight[part], first and not part.start)


def add_transposed(total: Tensor, logits: Tensor, x: Tensor, first: bool) -> None:
    """total ← total + logitsᵀ · x, or logitsᵀ · x where it is the first, in the dtype of the total."""
    applied(functools.partial(_add_transposed, first), total, logits, x)


def _add_transposed(first: bool, total: Tensor, logits: Tensor, x: Tensor) -> None:
    for part in _parts(logits):
        if part.start and total.dtype == x.dtype:  # see SMALL
            product = torch.mm(logits[:, part].t(), x, out_dtype=torch.float32)
            total[part].copy_(product) if first else total[part].add_(product)
        else:
            add_product(total[part], logits[:, part].t(), x, first)


def of_counting_rows(x: Tensor) -> Tensor:
    """Return a copy of a layer's input with 0 in place of what is not finite, to be multiplied by the gradient of the logits.

    That is 0 in a row that does not count, and 0 · nan would be nan. In a row that counts it is nan where the input is not finite.
    """
    return computed(_finite, x)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def sums_of_classes(logits: Tensor, dtype: torch.dtype, factors: Tensor | None = None) -> Tensor:
    """Return the sum over the rows, times a factor a row if there are some.

    On an H200 torch's own sum took up to 251 MiB beside a chunk of 1 GiB, and no less time.
    """
    given = (logits,) if factors is None else (logits, factors)
    return computed(functools.partial(_sums_of_classes, dtype), *given)


def _sums_of_classes(dtype: torch.dtype, logits: Tensor, factors: Tensor | None = None) -> Tensor:
    if not _by_tensor_cores(logits):
        return logits.sum(0, dtype=dtype) if factors is None else torch.mv(logits.to(dtype).t(), factors)
    if factors is None:
        of_rows = logits.new_ones(1, logits.shape[0])
    else:  # in two numbers of half precision, because tensor cores take no others
        high = factors.to(logits.dtype)
        of_rows = torch.stack((high, (factors - high).to(logits.dtype)))
    return torch.cat([torch.mm(of_rows, logits[:, part], out_dtype=dtype).sum(0) for part in _parts(logits)])

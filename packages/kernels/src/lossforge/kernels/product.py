"""Matrix products that are summed over chunks."""

import torch
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total ← total + a · b, or a · b where it is the first, in the dtype of the total."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif not a.is_cuda:
        with torch.autocast(a.device.type, enabled=False):  # which would round the product
            product = torch.mm(a.to(total.dtype), b.to(total.dtype))
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)

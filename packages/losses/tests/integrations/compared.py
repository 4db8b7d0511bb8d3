"""A library's call as it is, and the same call with our losses in it."""

import torch
from torch.utils._pytree import tree_leaves

from lossforge.patch.patching import _SAID


def graded(call, leaves):
    """Return a call's type and results, and the gradients of leaves under upstream gradients other than 1."""
    found = call()
    parts = tree_leaves(found)
    upstream = [1.7 + i + torch.arange(part.numel(), dtype=part.dtype).view(part.shape) for i, part in enumerate(parts)]
    return type(found), [part.detach() for part in parts], torch.autograd.grad(parts, leaves, upstream)


def compare(patch, call, leaves, exact=False, said=False, differs=True, rtol=1e-4, atol=1e-6):
    """Compare both.

    exact: the library's own code runs, and says so. said: it says so, and ours runs as well. differs: ours gives other bits.
    """
    expected = graded(call, leaves)
    _SAID.clear()
    with patch():
        found = graded(call, leaves)
    assert (exact or said) == bool(_SAID), _SAID
    assert found[0] is expected[0]
    assert exact or not differs or any(not torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True))
    torch.testing.assert_close(found[1:], expected[1:], **({"rtol": 0, "atol": 0} if exact else {"rtol": rtol, "atol": atol}))

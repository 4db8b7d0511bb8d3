"""Joining dimensions, and the addresses that follow."""

import torch

from lossforge.kernels.elementwise import geometry
from lossforge.kernels.layout import collapse
from lossforge.kernels.row_launch import as_rows


def test_collapse():
    assert collapse((2, 3, 4), [(12, 4, 1)]) == ([24], [[1]])
    assert collapse((2, 3, 4), [(12, 4, 1), (0, 0, 0)]) == ([24], [[1], [0]])
    assert collapse((2, 3, 4), [(12, 4, 1), (3, 1, 0)]) == ([6, 4], [[4, 1], [1, 0]])
    assert collapse((4, 3), [(1, 4)]) == ([12], [[1]])
    assert collapse((4, 3), [(1, 4)], reorder=False) == ([4, 3], [[1, 4]])
    assert collapse((1, 5, 1), [(7, 1, 9)]) == ([5], [[1]])
    assert collapse((), [()]) == ([], [[]])


def addressed(t, at, n1, n2):
    """What a kernel would read: elements of `t` at flat indices of the launch."""
    flat = torch.arange(at) if isinstance(at, int) else at
    memory = torch.as_strided(t.ptr, (t.ptr.untyped_storage().nbytes() // t.ptr.element_size(),), (1,), 0)
    start = t.ptr.storage_offset()
    if t.s0 is None:
        return memory[start + flat]
    i0, i1, i2 = flat // (n1 * n2), flat // n2 % n1, flat % n2
    return memory[start + i0 * t.s0 + i1 * t.s1 + i2 * t.s2]


def test_geometry_reads_matching_elements():
    """Over layouts: the elements that a launch pairs are those at the same place of both tensors."""
    base = torch.arange(2.0 * 3 * 4 * 10).view(2, 3, 4, 10)
    cases = [
        (base, base),
        (base.permute(0, 3, 1, 2), base.permute(0, 3, 1, 2).contiguous()),
        (base[..., ::2], base[..., :5].contiguous()),
        (base[:, :, 1:3], base[:, :, :2].contiguous()),
        (base, base[:1, :, :, :1].expand_as(base)),
        (base.transpose(0, 3), base.transpose(0, 3).contiguous()),
    ]
    for x, y in cases:
        g = geometry([x, y], None)
        assert g is not None
        pairs = torch.stack([addressed(t, x.numel(), g.n1, g.n2) for t in g.strided], 1)
        expected = torch.stack([x.reshape(-1), y.reshape(-1)], 1)
        assert sorted(map(tuple, pairs.tolist())) == sorted(map(tuple, expected.tolist()))
        classes = geometry([x, y], 1)
        if classes is not None:
            assert classes.n1 == x.shape[1]


def test_geometry_gives_up_beyond_three_dimensions():
    x = torch.zeros(4, 4, 4, 4, 4)[::2, ::2, ::2, ::2, ::2]
    assert geometry([x], None) is None
    assert geometry([torch.zeros(2, 6, 5, 6)[:, :3, :, ::2], None], 2) is None


def test_as_rows():
    x = torch.zeros(2, 5, 3, 4)
    assert as_rows([x]) == (2, 12, 5, [(60, 1, 12)])
    assert as_rows([x.to(memory_format=torch.channels_last)]) == (1, 24, 5, [(0, 5, 1)])
    assert as_rows([torch.zeros(7, 5)]) == (1, 7, 5, [(0, 5, 1)])
    assert as_rows([torch.zeros(1, 5)]) == (1, 1, 5, [(0, 0, 1)])
    assert as_rows([torch.zeros(2, 5, 4, 6)[:, :, ::2, ::2]]) is None

"""Joining dimensions, and the addresses that follow."""

import importlib
import typing

import pytest
import torch

from lossforge.kernels.classes.rowwise.layout import as_rows
from lossforge.kernels.elements.layout import arrange, geometry
from lossforge.kernels.engine.layout import broadcast, collapse, per_row


def test_collapse():
    assert collapse((2, 3, 4), [(12, 4, 1)]) == ([24], [[1]])
    assert collapse((2, 3, 4), [(12, 4, 1), (0, 0, 0)]) == ([24], [[1], [0]])
    assert collapse((2, 3, 4), [(12, 4, 1), (3, 1, 0)]) == ([6, 4], [[4, 1], [1, 0]])
    assert collapse((4, 3), [(1, 4)]) == ([12], [[1]])
    assert collapse((4, 3), [(1, 4)], reorder=False) == ([4, 3], [[1, 4]])
    assert collapse((1, 5, 1), [(7, 1, 9)]) == ([5], [[1]])
    assert collapse((), [()]) == ([], [[]])


def addressed(t, strides, n1, n2):
    """What a kernel would read: all elements of `t` in the order of the launch."""
    flat = torch.arange(t.numel())
    memory = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    start = t.storage_offset()
    if not strides:
        return memory[start + flat]
    i0, i1, i2 = flat // (n1 * n2), flat // n2 % n1, flat % n2
    return memory[start + i0 * strides[0] + i1 * strides[1] + i2 * strides[2]]


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
        g = geometry(x.shape, [x.stride(), y.stride()], None)
        assert g is not None
        pairs = torch.stack([addressed(t, strides, g.n1, g.n2) for t, strides in zip((x, y), g.strides, strict=True)], 1)
        expected = torch.stack([x.reshape(-1), y.reshape(-1)], 1)
        assert sorted(map(tuple, pairs.tolist())) == sorted(map(tuple, expected.tolist()))
        classes = geometry(x.shape, [x.stride(), y.stride()], 1)
        if classes is not None:
            assert classes.n1 == x.shape[1]


def test_geometry_gives_up_beyond_three_dimensions():
    x = torch.zeros(4, 4, 4, 4, 4)[::2, ::2, ::2, ::2, ::2]
    assert geometry(x.shape, [x.stride()], None) is None
    x = torch.zeros(2, 6, 5, 6)[:, :3, :, ::2]
    assert geometry(x.shape, [x.stride()], 2) is None


def test_boxes_are_paired_whatever_their_strides():
    """Each box's four coordinates, read as a launch reads them, in its order of pairs; packed ones at once where they lie in that order."""
    base = torch.arange(2.0 * 3 * 5 * 8).view(2, 3, 5, 8)
    packed = base[..., :4].contiguous()
    cases = [
        (packed, packed, (None, None)),
        (packed, base[..., 2:6], (None, 1)),
        (base[..., ::2], packed, (2, None)),
        (packed.mT.contiguous().mT, packed, (5, None)),
        (packed.transpose(0, 2), packed.transpose(0, 2), (None, None)),
        (packed.transpose(0, 2), packed.transpose(0, 2).contiguous(), (None, 1)),
        (packed[:1, :1, :1], packed[:1, :1, :1], (None, None)),
        (packed[0, :, :1].expand(3, 5, 4), packed[0], (1, None)),
    ]
    for boxes1, boxes2, steps in cases:
        g, found = arrange((boxes1, boxes2), ())
        assert tuple(found) == steps
        read = []
        for t, strides, step in zip((boxes1, boxes2), g.strides, steps, strict=True):
            in_order = [s * (4 if step is None else 1) for s in (g.n1 * g.n2, g.n2, 1)]
            read += [addressed(t[..., k], strides or in_order, g.n1, g.n2) for k in range(4)]
        expected = torch.cat([boxes1.reshape(-1, 4), boxes2.reshape(-1, 4)], 1)
        assert sorted(map(tuple, torch.stack(read, 1).tolist())) == sorted(map(tuple, expected.tolist()))
    assert arrange([torch.zeros(4, 4, 4, 8, 4)[::2, ::2, ::2, ::2]] * 2, ()) is None


def test_expanded_strides_are_those_of_expand():
    for sizes, shape in (((3, 1, 5), (3, 4, 5)), ((5,), (3, 4, 5)), ((), (2, 3)), ((1, 1), (1, 7)), ((4, 5), (4, 5))):
        t = torch.zeros(sizes)
        x = t.expand(shape)
        strides = broadcast(t.shape, t.stride(), shape)
        assert all(n == 1 or a == b for n, a, b in zip(shape, strides, x.stride(), strict=True))
    assert per_row((2, 4), (4, 1), (2, 3, 4), 1) == torch.zeros(2, 4).unsqueeze(1).expand(2, 3, 4).stride()
    with pytest.raises(ValueError, match=r"shape \(2,\) does not broadcast to \(3, 4\)"):
        broadcast((2,), (1,), (3, 4))
    with pytest.raises(ValueError, match="does not broadcast"):
        per_row((2, 3), (3, 1), (2, 3, 4), 1)


def test_as_rows():
    x = torch.zeros(2, 5, 3, 4)

    def rows(t):
        return as_rows(t.shape, [t.stride()])

    assert rows(x) == (2, 12, 5, [(60, 1, 12)])
    assert rows(x.to(memory_format=torch.channels_last)) == (1, 24, 5, [(0, 5, 1)])
    assert rows(torch.zeros(7, 5)) == (1, 7, 5, [(0, 5, 1)])
    assert rows(torch.zeros(1, 5)) == (1, 1, 5, [(0, 0, 1)])
    assert rows(torch.zeros(2, 5, 4, 6)[:, :, ::2, ::2]) is None


@pytest.mark.parametrize(
    "module",
    [
        "assignment.hungarian",
        "assignment.matching",
        "assignment.task_aligned",
        "boxes.boxes",
        "boxes.rotated",
        "classes.distribution",
        "classes.rowwise.rows",
        "elements.elementwise.kernel",
        "elements.elementwise.targets",
        "elements.pointwise",
        "features.vectors",
        "masks.overlap.kernel",
        "masks.overlap.planes",
    ],
)
def test_records_that_hold_records_end_with_a_constant(module):
    """Without one Triton takes the inner records' constants for None in loops and branches: see layout.END."""
    found = importlib.import_module(f"lossforge.kernels.{module}")
    for record in [each for each in vars(found).values() if getattr(each, "__module__", "") == found.__name__]:
        fields = typing.get_type_hints(record) if hasattr(record, "_fields") else {}
        held = [kind for hint in fields.values() for kind in (hint, *typing.get_args(hint)) if hasattr(kind, "_fields")]
        last = record._fields[-1] if fields else ""
        assert not held or last == "end" or last.isupper(), f"{record.__name__} holds {held}"

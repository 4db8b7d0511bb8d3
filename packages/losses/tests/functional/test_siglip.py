"""The pairwise sigmoid loss against open_clip's formula in float64: diagonals, shards, gradients of scale and bias, edges."""

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.losses import SigLIPLoss, siglip_loss
from lossforge.losses.testing import error

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])


def theirs(logits, offset=0, negative_only=False):
    """open_clip's loss: labels of -1, and 1 on the diagonal."""
    labels = -torch.ones_like(logits)
    if not negative_only:
        n, m = logits.shape
        labels += 2 * (torch.arange(m, device=logits.device) == torch.arange(n, device=logits.device)[:, None] + offset)
    return -F.logsigmoid(labels * logits).sum() / len(logits)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 8), {}),
        ((9, 9), {}),
        ((1, 1), {}),
        ((1, 17), {"offset": 16}),
        ((17, 1), {"offset": -16}),
        ((4, 32), {"offset": 12}),
        ((40, 7), {"offset": -20}),
        ((6, 6), {"offset": 6}),
        ((6, 6), {"offset": -6}),
        ((5, 8), {"offset": 2**40}),
        ((5, 8), {"negative_only": True}),
    ],
    ids=str,
)
def test_is_open_clips(shape, options, dtype, mode, device):
    x = (torch.randn(shape, device=device) * 4 - 3).to(dtype)
    value, g = gradient_of(siglip_loss, x, **options, gradient=mode)
    exact, g_exact = gradient_of(theirs, x.double(), **options)
    assert value.dtype == torch.float32
    assert error(value, exact) < 1e-6
    assert error(g, g_exact) < (3e-6 if dtype == torch.float32 else 2.0**-7)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_logits_are_exact(dtype, mode, device):
    x = torch.tensor([[-1e4, 1e4], [-200.0, 6e4]], device=device, dtype=dtype)
    value, g = gradient_of(siglip_loss, x, reduction="sum", gradient=mode)
    assert value == x[0, 0].double().neg() + x[0, 1]
    assert torch.equal(g.cpu().float(), torch.tensor([[-1.0, 1.0], [0.0, 0.0]]))
    value, g = gradient_of(siglip_loss, x, reduction="sum", gradient=mode, negative_only=True)
    assert value == x[0, 1].double() + x[1, 1]


def features(device):
    images, texts = (F.normalize(torch.randn(6, 5, dtype=torch.float64, device=device), dim=1) for _ in range(2))
    scale, bias = torch.tensor(10.0, dtype=torch.float64, device=device), torch.tensor([-10.0], dtype=torch.float64, device=device)
    return images, texts, scale, bias


def test_shards_add_up(device):
    """Three devices with two images each: their texts and, one after the other, those of the others; or all texts at once."""
    images, texts, scale, bias = features(device)
    x = (scale * images @ texts.T + bias).float()
    whole = siglip_loss(x)
    gathered = [siglip_loss(x[r : r + 2], offset=r) for r in (0, 2, 4)]
    torch.testing.assert_close(sum(gathered) / 3, whole)
    blocks = [siglip_loss(x[r : r + 2, c : c + 2], negative_only=r != c) for r in (0, 2, 4) for c in (0, 2, 4)]
    torch.testing.assert_close(sum(blocks) / 3, whole)
    of_texts = [siglip_loss(x[:, c : c + 2], offset=-c) for c in (0, 2, 4)]
    torch.testing.assert_close(sum(of_texts), whole)


def test_targets_that_say_the_same(device):
    x = torch.randn(6, 8, device=device)
    expected = gradient_of(siglip_loss, x, offset=1)
    torch.testing.assert_close(gradient_of(siglip_loss, x, torch.arange(1, 7, device=device)), expected)
    torch.testing.assert_close(gradient_of(siglip_loss, x, torch.eye(6, 8, device=device).roll(1, 1)), expected)
    torch.testing.assert_close(gradient_of(siglip_loss, x.t(), offset=-1, dim=1, normalizer=6), (expected[0], expected[1].t()))
    torch.testing.assert_close(gradient_of(siglip_loss, x.t(), offset=1, dim=0), (expected[0], expected[1].t()))
    torch.testing.assert_close(gradient_of(SigLIPLoss(), x, offset=1), expected)


def test_images_without_a_text(device):
    """-1 has no pair, -2 does not count."""
    x = torch.randn(3, 4, device=device)
    value, g = gradient_of(siglip_loss, x, torch.tensor([2, -1, -2], device=device))
    exact, g_exact = gradient_of(lambda x: (theirs(x[:1], 2) + theirs(x[1:2], negative_only=True)) / 2, x.double())
    assert error(value, exact) < 1e-6
    assert error(g, g_exact) < 3e-6


def test_compiled_with_another_offset(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, offset: siglip_loss(x, offset=offset), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, offset in ((4, 0), (5, 2), (6, 3), (7, -4)):
        x = torch.randn(rows, 12, device=device)
        value, g = gradient_of(compiled, x, offset)
        exact, g_exact = gradient_of(theirs, x.double(), offset)
        assert error(value, exact) < 1e-6
        assert error(g, g_exact) < 3e-6


@pytest.mark.parametrize(
    ("kind", "message", "x", "target", "options"),
    [
        (ValueError, r"input must be a matrix where target is None, got shape \(2, 3, 4\)", torch.rand(2, 3, 4), None, {}),
        (TypeError, "offset must be a whole number, got float", torch.rand(3, 4), None, {"offset": 1.0}),
        (ValueError, "offset must be a whole number of 64 bits, got", torch.rand(3, 4), None, {"offset": 2**70}),
        (ValueError, "target must be None where offset is given, got a tensor", torch.rand(3, 4), torch.rand(3, 4), {"offset": 1}),
        (ValueError, "target must be None where negative_only is given", torch.rand(3, 4), torch.rand(3, 4), {"negative_only": True}),
        (TypeError, "target must hold class indices where lam is given, got None", torch.rand(3, 4), None, {"lam": 0.5}),
        (TypeError, "target must hold class indices where score is given, got None", torch.rand(3, 4), None, {"score": torch.rand(3)}),
        (
            ValueError,
            r"got \(5, 4\); .*siglip_loss\(.* images @ texts.T",
            torch.rand(3, 4),
            torch.rand(5, 4),
            {},
        ),
        (
            ValueError,
            r"in \[0, 1\].* got values from -0.5 to .*; embeddings",
            torch.rand(3, 4),
            torch.rand(3, 4).sub(0.5).fill_diagonal_(-0.5),
            {},
        ),
        (ValueError, "got the output of a network", torch.rand(3, 4), torch.rand(3, 4, requires_grad=True) * 1, {}),
        (ValueError, "dim must be at least -2 and below 2 .* got 2", torch.rand(3, 4), None, {"dim": 2}),
    ],
)
def test_mistakes(kind, message, x, target, options):
    with pytest.raises(kind, match=message):
        siglip_loss(x, target, **options)

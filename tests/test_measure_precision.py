"""The measurement of precision: what it calls exact, and the errors that it finds."""

import sys

import measure_precision
import torch
import torch.nn.functional as F
from measure_precision import Sizes, entropy_of, errors_of, exactly


def test_what_counts_as_exact_is_what_autograd_finds(monkeypatch):
    monkeypatch.setattr(measure_precision, "STEP", 3)
    x, weight = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    target, upstream = torch.randint(11, (7,)), torch.randn(7, dtype=torch.float64)
    logps = F.linear(x, weight).log_softmax(-1).gather(1, target[:, None])[:, 0]
    of_input, of_weight = torch.autograd.grad(logps, (x, weight), upstream)
    found = exactly(x.detach(), weight.detach(), target, upstream)
    for got, right in zip(found, (logps, of_input, of_weight), strict=True):
        torch.testing.assert_close(got, right)


def test_the_exact_entropy_is_what_autograd_finds(monkeypatch):
    monkeypatch.setattr(measure_precision, "STEP", 3)
    x, weight = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    upstream = torch.randn(7, dtype=torch.float64)
    entropy = torch.distributions.Categorical(logits=F.linear(x, weight)).entropy()
    of_input, of_weight = torch.autograd.grad(entropy, (x, weight), upstream)
    found = exactly(x.detach(), weight.detach(), torch.zeros(7, dtype=torch.int64), upstream, entropy_of)
    for got, right in zip(found, (entropy, of_input, of_weight), strict=True):
        torch.testing.assert_close(got, right)


def test_a_peer_that_is_not_installed_gives_its_reason(monkeypatch):
    """By name, beside the figures of the others."""
    for name in ("trl.kernels", "verl.utils.kernel.linear_cross_entropy"):
        monkeypatch.setitem(sys.modules, name, None)
    rows = list(measure_precision.rows_of(Sizes(8, 128, (50,), (4.0,), (2,)), 50, 4.0, 0.0, torch.device("cpu")))
    for loss in ("logps", "entropy"):
        found = {row["contender"]: row for row in rows if row["loss"] == loss}
        assert found["lossforge"]["value"] < 0.05
        for name in ("trl", "verl"):
            assert found[name]["failed"].startswith(f"ModuleNotFoundError: import of {name}.")


def test_logits_in_float32_are_far_closer():
    """Of the mean and of each token, beside the same chunks with rounded logits."""
    sizes = Sizes(16, 16, (50,), (4.0,), (2,))
    x, weight = torch.randn(16, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    target, upstream = torch.randint(50, (16,)), torch.full((16,), -1 / 16)
    exact = exactly(x, weight, target, upstream)
    calls = measure_precision.contenders("linear_ce", sizes)
    names = "lossforge, 2 chunks", "lossforge, 2 chunks of float32"
    rounded, wide = (errors_of(calls[name], (x, weight, target), upstream, exact, True) for name in names)
    assert wide["value"] < 0.05 * rounded["value"]
    assert wide["dh"] < rounded["dh"]
    assert wide["dw"] < rounded["dw"]

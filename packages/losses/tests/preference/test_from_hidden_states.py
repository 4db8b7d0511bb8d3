"""The objectives from hidden states, as the package's docstring has them, against the computation through all logits in float64."""

import doctest
import functools

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import linear_selective_log_softmax, preference
from lossforge.losses.testing import error

N, T, H, V = 4, 7, 6, 13
NAMES = ("dpo", "cpo", "simpo", "orpo", "kto", "grpo")


def padded(generator):
    """Tokens of completions of several lengths: none for one of them, behind prompts and before padding."""
    index = torch.randint(V, (N, T), generator=generator)
    for row, (start, end) in enumerate([(2, 7), (3, 5), (0, 6), (4, 4)]):
        index[row, :start] = index[row, end:] = -100
    return index


def heads(bias, dtype, device):
    generator = torch.Generator().manual_seed(1)
    made = [torch.nn.Linear(H, V, bias=bias) for _ in range(2)]
    with torch.no_grad():
        for parameter in (p for head in made for p in head.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return [head.to(device, dtype) for head in made]


def given(bias, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    names = ("hidden", "reference_hidden", "kl_hidden", "reference_kl_hidden")
    found = {name: torch.randn(N, T, H, generator=generator).to(device, dtype).requires_grad_() for name in names}
    found["head"], found["reference_head"] = heads(bias, dtype, device)
    found["index"], found["kl_index"] = padded(generator).to(device), padded(generator).to(device)
    found["advantages"] = torch.tensor([1.3, -0.7, 0.4, -2.0], device=device, dtype=dtype)
    found["old_logps"] = (-3 * torch.rand(N, T, generator=generator)).to(device, dtype)
    return found


def unfused(hidden, weight, index, bias=None):
    """By torch's own functions, through the logits of all tokens."""
    logps = F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, index.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(index == -100, 0.0, logps)


def computed(names, token_logps):
    """Run the docstring's lines."""
    lines = "".join(example.source for example in doctest.DocTestParser().get_examples(preference.__doc__))
    names |= {name: getattr(preference, name) for name in preference.__all__}
    exec(compile(lines, preference.__file__, "exec"), names | {"torch": torch, "linear_selective_log_softmax": token_logps}, names)
    return names


def gradients(names, objective):
    leaves = [names["hidden"], *names["head"].parameters()]
    return torch.autograd.grad(names[objective], leaves, torch.tensor(1.5).to(names[objective]))


@pytest.mark.parametrize("objective", NAMES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_value_and_gradients(objective, bias, device):
    ours = computed(given(bias, device), functools.partial(linear_selective_log_softmax, chunk=8))
    theirs = computed(given(bias, device, torch.float64), unfused)
    assert error(ours[objective], theirs[objective]) < 1e-5
    (hidden, *of_head), exact = gradients(ours, objective), gradients(theirs, objective)
    for got, right in zip((hidden, *of_head), exact, strict=True):
        assert error(got, right) < 2e-5
    assert not hidden[ours["index"] == -100].any()
    assert hidden[ours["index"] != -100].any()


def test_reference_and_mismatched_completions_carry_no_gradient(device):
    names = computed(given(True, device), linear_selective_log_softmax)
    assert not any(names[name].requires_grad for name in ("reference_logps", "reference_sums", "kl", "reference_kl"))
    sum(names[name] for name in NAMES).backward()
    assert all(p.grad is None for p in names["reference_head"].parameters())
    assert names["reference_hidden"].grad is None
    assert names["kl_hidden"].grad is None
    assert names["hidden"].grad is not None

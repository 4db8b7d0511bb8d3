"""verl's fused heads with our log-probabilities: values and gradients against float64, and forwards of a model as verl patches it."""

import pytest
import torch
from processes import run

REASON = "needs pip install verl"
pytest.importorskip("verl.utils.experimental.torch_functional", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from verl.models.transformers import dense_common  # noqa: E402
from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: E402
from verl.utils.kernel import linear_cross_entropy as kernel  # noqa: E402

from lossforge.integrations import verl as ours  # noqa: E402

SHAPES = [(13,), (3, 5)]


def trained(compute, x, w, *arguments):
    """Return log-probabilities, entropies and both gradients under random upstream gradients."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    logps, entropy = compute(x, w, *arguments)
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, logps.numel(), generator=generator).to(logps.dtype)
    (logps.flatten() @ a + entropy.flatten() @ b).backward()
    return logps.detach(), entropy.detach(), x.grad, w.grad


def formula(x, w, labels, temperature):
    logps = (x @ w.T / temperature).log_softmax(-1)
    return logps.gather(-1, labels[..., None]).squeeze(-1), -(logps.exp() * logps).sum(-1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6, "one", "a sample", "a token"])
@pytest.mark.parametrize("backend", ["torch", "liger", "triton"])
def test_log_probabilities(backend, temperature, shape):
    torch.manual_seed(0)
    x, w, labels = torch.randn(*shape, 16), torch.randn(57, 16), torch.randint(57, shape)
    exact = temperature
    if isinstance(temperature, str):  # tensors, as verl makes them of samples
        temperature = {"one": torch.tensor(0.6), "a sample": torch.rand(shape[0]) + 0.5, "a token": torch.rand(shape) + 0.5}[temperature]
        exact = temperature.double().view(*temperature.shape, *(1,) * (x.ndim - temperature.ndim))
    expected = trained(formula, x.double(), w.double(), labels, exact)
    with ours.patch() as handle:
        assert len(handle.replaced) == 2
        compute = kernel.linear_cross_entropy if backend == "triton" else FusedLinearForPPO(impl_backend=backend)
        found = trained(compute, x, w, labels, temperature)
    assert found[0].shape == found[1].shape == (labels.flatten().shape if backend == "triton" else shape)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.view(one.shape), rtol=1e-4, atol=1e-5)


def test_a_model_as_verl_patches_it():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 53}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    tokens = torch.randint(53, (2, 9))

    def trained_by(forward):
        model.zero_grad()
        output = forward(model, input_ids=tokens, return_dict=True, temperature=0.8)
        (output.log_probs.sum() * 1.7 - 0.1 * output.entropy.sum()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        return output.log_probs.detach().flatten(), output.entropy.detach().flatten(), gradients

    expected = trained_by(dense_common.forward_with_torch_backend)
    with ours.patch():
        for forward in (dense_common.forward_with_torch_backend, dense_common.forward_with_triton_backend):
            torch.testing.assert_close(trained_by(forward), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_classes_on_several_processes(tmp_path):
    assert run("verl_runs.py", processes=2, folder=tmp_path).count("equal to the whole vocabulary") == 2


def test_what_ours_lacks_runs_in_verl_and_is_said_once(caplog):
    torch.manual_seed(0)
    x, w, labels = torch.randn(13, 16), torch.randn(57, 16), torch.randint(57, (13,))
    with ours.patch():
        for _ in range(2):
            with pytest.raises((AssertionError, RuntimeError, ImportError)):  # theirs, which needs a GPU
                kernel.linear_cross_entropy(x, w, labels, 1.0, "mean")
    assert caplog.text.count("verl's own linear_cross_entropy runs: reduction='mean' is not in lossforge") == 1

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import compute_cache_key

from lossforge.kernels import plans
from lossforge.kernels.engine import launch
from lossforge.kernels.engine.launch import Step
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates import TEMPLATES, reference


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def offset():
    """Copies a tensor to memory that begins some elements after an aligned address."""

    def copied(t, elements):
        memory = torch.empty(t.numel() + elements, dtype=t.dtype, device=t.device)
        return memory[elements:].view(t.shape).copy_(t)

    return copied


@pytest.fixture
def launches(monkeypatch):
    """Each launch of a plan as (device, whether it was started directly); its kernel is the one that Triton's launcher would choose."""
    seen = []
    original, new_sums = Step.start, launch.new_sums

    def checked(step, pool, device):
        made = []
        with monkeypatch.context() as patch:
            patch.setattr(launch, "new_sums", lambda *args: made.append(sums := new_sums(*args)) or sums)
            tensors = [pool[place] for place in step.places]
            original(step, pool, device)
        if not launch.DIRECT:
            return
        values = [*tensors, *[t for sums in made for t in sums]]
        kernels, keys, _, _, binder = step.kernel.device_caches[device]
        _, specialization, options = binder(*step.filled(values), **step.options, debug=False, instrumentation_mode="")
        own = kernels[compute_cache_key(keys, specialization, options)]
        assert step.compiled is own
        seen.append((device, step.compiled is not None))

    monkeypatch.setattr(Step, "start", checked)
    return seen


@pytest.fixture
def by_plan():
    """Starts a template's forward or backward by a plan, as the losses do: an equal call, without Triton's launcher."""

    def leaves(node):
        return [each for n in node for each in leaves(n)] if isinstance(node, tuple | list) else [node]

    def started(function, call, formulas, *arguments):
        values = leaves((call, *arguments))
        tensors = [v for v in values if isinstance(v, Tensor)]
        others = [Tensor if isinstance(v, Tensor) else v for v in values]
        key = (function.__module__, function.__name__, *plans.layouts(tensors), *others)
        return plans.by_plan(key, tensors, function, lambda: (call, formulas, *arguments))

    return started


@pytest.fixture
def judged():
    """Launches a call's forward with its gradient, and its backward, and compares both with the reference in float64."""

    def judge(call):
        template, formula = TEMPLATES[type(call)].launches, FORMULAS.get(call.loss)
        formulas = None if formula is None else formula.kernels
        wide = call._replace(**{name: t.double() for name, t in call._asdict().items() if isinstance(t, Tensor) and t.is_floating_point()})
        x = wide.x.requires_grad_()
        exact, *further = reference(wide)  # results that the call has not asked for are None
        upstream = torch.rand_like(exact) + 0.5
        exact.backward(upstream)
        bound = {"rtol": 1e-2, "atol": 1e-2 * x.grad.abs().max()} if call.x.dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-6}
        each = call.reduction == "none"
        fused = None if each else torch.full_like(call.x, float("nan"))
        value, *kept = template.forward(call, formulas, [fused], True)
        kept = kept[len(further) :]
        torch.testing.assert_close(value.double(), exact.detach(), rtol=1e-5, atol=1e-5)
        written = torch.full_like(call.x, float("nan"))
        template.backward(call, formulas, tuple(kept), (upstream.float(),), [written])
        torch.testing.assert_close(written.double(), x.grad, **bound)
        if fused is not None:
            torch.testing.assert_close(fused.double() * upstream, x.grad, **bound)

    return judge

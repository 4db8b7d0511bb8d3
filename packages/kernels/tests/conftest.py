import pytest
import torch
from torch import Tensor
from triton.runtime.jit import compute_cache_key

from lossforge.kernels import of_folder
from lossforge.kernels.call import KINDS
from lossforge.kernels.engine import launch
from lossforge.kernels.engine.launch import Plan
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.reference import reference


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
    """Each launch as (plan, whether it was started directly); its kernel is the one that Triton's launcher would choose."""
    seen = []
    original, new_sum = Plan.launch, launch.new_sum

    def checked(plan, tensors, floats=()):
        before = dict(plan.compiled)
        sums = []
        with monkeypatch.context() as patch:
            patch.setattr(launch, "new_sum", lambda *args: sums.append(made := new_sum(*args)) or made)
            totals = original(plan, tensors, floats)
        if not plan.direct:
            return totals
        sums = [t for each in sums for t in each]
        values = (*tensors, *map(float, floats), *sums)
        arguments = [launch._filled(a, values) for a in plan.arguments]
        kernels, keys, _, _, binder = plan.kernel.device_caches[tensors[0].get_device()]
        _, specialization, options = binder(*arguments, **plan.meta, debug=False, instrumentation_mode="")
        own = kernels[compute_cache_key(keys, specialization, options)]
        pointers = [t.data_ptr() for t in (*tensors, *sums)]
        aligned = all(p % 16 == 0 for p in pointers) or tuple(p % 16 == 0 for p in pointers)
        assert plan.compiled[aligned] is own
        seen.append((tensors[0].get_device(), aligned in before))
        return totals

    monkeypatch.setattr(Plan, "launch", checked)
    return seen


@pytest.fixture
def judged():
    """Launches a call's forward with its gradient, and its backward, and compares both with the reference in float64."""

    def judge(call):
        kind = KINDS[type(call)]
        template, formula = of_folder(kind.folder), FORMULAS.get(call.loss)
        formulas = None if formula is None else formula.kernels
        wide = call._replace(**{name: t.double() for name, t in call._asdict().items() if isinstance(t, Tensor) and t.is_floating_point()})
        x = wide.x.requires_grad_()
        (exact,) = reference(wide)
        upstream = torch.rand_like(exact) + 0.5
        exact.backward(upstream)
        bound = {"rtol": 1e-2, "atol": 1e-2 * x.grad.abs().max()} if call.x.dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-6}
        each = call.reduction == "none"
        fused = None if each else torch.full_like(call.x, float("nan"))
        value, *kept = template.forward(call, formulas, [fused], True)
        torch.testing.assert_close(value.double(), exact.detach(), rtol=1e-5, atol=1e-5)
        written = torch.full_like(call.x, float("nan"))
        template.backward(call, formulas, tuple(kept), (upstream.float(),), [written])
        torch.testing.assert_close(written.double(), x.grad, **bound)
        if fused is not None:
            torch.testing.assert_close(fused.double() * upstream, x.grad, **bound)

    return judge

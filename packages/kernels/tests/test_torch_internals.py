"""Versions of torch and triton: what changed in them is met in one place, and what is not known there is left out."""

import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from lossforge.kernels.call import Formulas
from lossforge.kernels.classes.calls import DivergenceCall, RowwiseCall
from lossforge.kernels.classes.divergence import launch as divergence_launch
from lossforge.kernels.classes.rowwise import launch as row_launch
from lossforge.kernels.classes.rowwise import layout
from lossforge.kernels.engine import launch
from lossforge.kernels.formulas.softmax import cross_entropy, kl, kl_averaged
from lossforge.kernels.plans import PLANS
from lossforge.kernels.torch_internals import triton_internals

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CE, KL = Formulas(cross_entropy), Formulas(kl, averaged=kl_averaged)
CLASSES = 9000  # of float32: a row that would stay on chip
GLUON = "triton.experimental.gluon.language"
INTERFACES = {
    "no barrier": [(GLUON, "barrier"), (GLUON, "thread_barrier")],
    "no copies": [(f"{GLUON}.nvidia.ampere.async_copy", name) for name in ("async_load", "async_copy_global_to_shared")],
    "no groups of copies": [(f"{GLUON}.nvidia.ampere.async_copy", "commit_group")],
    "no waiting": [(f"{GLUON}.nvidia.ampere.async_copy", "wait_group")],
    "no Gluon": [("triton.experimental", "gluon")],
    "a Triton to come": [],
}


@pytest.fixture
def plans(monkeypatch):
    """Names of the kernels that launches plan, as on an H200; nothing is planned before or kept after."""
    names = []
    original = row_launch.Launch

    def planned(kernel, *args, **kwargs):
        names.append(kernel.fn.__name__)
        return original(kernel, *args, **kwargs)

    for module in (row_launch, divergence_launch):
        monkeypatch.setattr(module, "chip", lambda device: (132, 232448))
    for module in (row_launch, divergence_launch, layout):
        monkeypatch.setattr(module, "Launch", planned)
    PLANS.clear()
    return names


def plan(x, target, teacher):
    """Let both templates plan a launch for these rows, which need not be able to start here."""
    with mock.patch.object(launch.Launch, "start", return_value=(torch.empty(()),)):
        row_launch.forward(RowwiseCall("ce", x, target), CE, [torch.empty_like(x)], False)
        divergence_launch.forward(DivergenceCall("kl", x, teacher), KL, [torch.empty_like(x)], False)


@pytest.mark.parametrize("interface", INTERFACES)
def test_an_unknown_gluon_is_left_out(plans, monkeypatch, interface):
    x, teacher = torch.randn(2, 3, CLASSES, device=DEVICE)
    target = torch.tensor([3, CLASSES - 1, 0], device=DEVICE)
    plan(x, target, teacher)
    assert plans == ["resident_kernel", "resident_divergence_kernel"]

    for module, name in INTERFACES[interface]:
        monkeypatch.delattr(sys.modules[module], name, raising=False)
        monkeypatch.delitem(sys.modules, f"{module}.{name}", raising=False)
    if interface == "no Gluon":
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    if interface == "a Triton to come":
        monkeypatch.setattr(triton_internals(), "known", False)
    for name in ("engine.gluon", "classes.rowwise.resident", "classes.divergence.resident"):
        monkeypatch.delitem(sys.modules, f"lossforge.kernels.{name}")
    PLANS.clear()
    plans.clear()

    gradient = torch.full_like(x, float("nan"))
    value = row_launch.forward(RowwiseCall("ce", x, target), CE, [gradient], False)[0]
    wide = x.double().requires_grad_()
    expected = F.cross_entropy(wide, target, reduction="sum")
    expected.backward()
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-5, atol=1e-7)

    gradient = torch.full_like(x, float("nan"))
    value = divergence_launch.forward(DivergenceCall("kl", x, teacher), KL, [gradient], False)[0]
    wide = x.double().requires_grad_()
    expected = F.kl_div(wide.log_softmax(1), teacher.double().log_softmax(1), reduction="sum", log_target=True)
    expected.backward()
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-5, atol=1e-7)
    assert plans == ["rowwise_kernel", "divergence_kernel"]


@pytest.mark.slow
def test_an_old_triton_is_refused():
    script = "import triton; triton.__version__ = '3.4.0'; from lossforge import kernels; kernels.load('math')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: lossforge needs triton>=3.5,<3.10, found triton 3.4.0" in done.stderr


@pytest.mark.slow
def test_gluon_waits_for_a_launch():
    script = "import sys, lossforge.kernels; sys.exit('triton.experimental.gluon' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0

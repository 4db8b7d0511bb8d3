"""Private names of torch are a faster way only: without any one of them a loss and its gradient are the same."""

import ast
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import lossforge.kernels
import lossforge.losses
from lossforge.kernels import torch_internals
from lossforge.losses import cross_entropy, sigmoid_focal_loss
from lossforge.losses.base import state

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGES = [Path(lossforge.losses.__file__).parent, Path(lossforge.kernels.__file__).parent]
INTERNALS = ("torch_internals.py", "gluon.py")  # Gluon is all experimental
MARKED = ("torch._", "triton._", "triton.runtime", "forward_ad._", "torch.nn._", "torch.utils._", "torch.autograd._")


def reached(file: Path) -> set[str]:
    """The names of torch and triton that a file imports or reads, in full."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if "__version__" not in name}


def used() -> list[str]:
    """The private names of torch that torch_internals.py reaches for."""
    tree = ast.parse(Path(torch_internals.__file__).read_text())
    owned = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    asked = {  # by getattr or hasattr
        f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant)
    }
    return sorted(name for name in owned | asked if name.startswith(("torch._C.", "forward_ad._")))


def test_private_names_stand_in_one_file():
    files = [file for package in PACKAGES for file in package.rglob("*.py") if file.name not in INTERNALS]
    assert len(files) > 50
    assert not [f"{file.name}: {name}" for file in files for name in reached(file) if name.startswith(MARKED)]


def loaded_without(name, monkeypatch):
    """torch_internals as it is where torch lacks the name."""
    owner, _, attribute = name.rpartition(".")
    with monkeypatch.context() as patch:
        patch.delattr({"torch._C": torch._C, "forward_ad": forward_ad}[owner], attribute, raising=False)
        spec = importlib.util.spec_from_file_location("without", torch_internals.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def put_in_place(module, monkeypatch):
    """Let every module of the losses call this module's functions."""
    for other in [m for name, m in sys.modules.items() if name.startswith("lossforge") and m is not torch_internals]:
        for name in ("modes", "ordinary", "transformed", "in_forward_mode", "NO_MODES"):
            if hasattr(other, name):
                monkeypatch.setattr(other, name, getattr(module, name))
    monkeypatch.setattr(state, "_PLAIN_STATES", [(*module.NO_MODES, grad, False) for grad in (True, False)])


def loss(x, **options):
    return cross_entropy(x, torch.tensor([1, 0, 6, -100, 3], device=DEVICE), label_smoothing=0.1, **options)


def focal(x):
    return sigmoid_focal_loss(x, torch.ones_like(x), reduction="sum")


def torch_loss(x):
    return F.cross_entropy(x, torch.tensor([1, 0, 6, -100, 3], device=DEVICE), label_smoothing=0.1)


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-6)


def check_losses():
    """Values, gradients of both modes with upstreams, kept calls, torch.func, forward mode and a second derivative."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(5, 7, generator=generator).to(DEVICE) for _ in range(2))
    wide = x.double().requires_grad_()
    expected = torch_loss(wide)
    (exact,) = torch.autograd.grad(expected, wide, create_graph=True)
    (second,) = torch.autograd.grad(exact.square().sum(), wide)
    for mode, factor in itertools.product(("forward", "backward", "forward"), (-2.0, 0.5)):
        leaf = x.clone().requires_grad_()
        value = loss(leaf, gradient=mode)
        close(value.detach(), expected)
        close(torch.autograd.grad(value, leaf, torch.tensor(factor, device=DEVICE))[0], factor * exact)
    close(torch.func.grad(loss)(x), exact)
    close(torch.func.jvp(loss, (x,), (v,))[1], (exact * v).sum())
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(loss(forward_ad.make_dual(x, v))).tangent, (exact * v).sum())
    close(torch.vmap(focal)(x), torch.stack([focal(row) for row in x.double()]))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    close(torch.autograd.grad(gradient.square().sum(), leaf)[0], second)


@pytest.mark.parametrize("name", used())
def test_a_private_name_can_go(name, monkeypatch):
    module = loaded_without(name, monkeypatch)
    assert state.plain(torch.zeros(1, device=DEVICE))
    put_in_place(module, monkeypatch)
    of_dispatcher = name.startswith(("torch._C._dispatch", "torch._C._len", "torch._C.Dispatch", "forward_ad"))
    assert state.plain(torch.zeros(1, device=DEVICE)) != of_dispatcher
    check_losses()


OF_AUTOGRAD = ("_AutoDispatchBelowAutograd", "_after_autograd_keyset", "_any_requires_grad")


@pytest.mark.parametrize("name", [None, *OF_AUTOGRAD])
def test_autograd_is_registered_without_a_private_name(name, monkeypatch):
    """Of x ↦ 3 x, as the losses' operators are registered."""
    made = torch.library.Library(f"lossforge_test_{name}", "DEF")
    made.define("thrice(Tensor x) -> Tensor")
    made.impl("thrice", lambda x: 3 * x, "CPU")
    with monkeypatch.context() as patch:
        if name:
            patch.delattr(torch._C, name)
        torch_internals.register_autograd(made, "thrice", lambda ctx, inputs, output: None, lambda ctx, upstream: (3 * upstream,))
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    thrice = getattr(torch.ops, made.ns).thrice(x)
    assert thrice.tolist() == [3.0, -6.0]
    assert torch.autograd.grad(thrice, x, torch.tensor([1.0, 0.5]))[0].tolist() == [3.0, 1.5]


WITHOUT_ALL = """
import importlib.util, torch
names = {names!r}
kept = [(name, getattr(torch._C, name)) for name in names if hasattr(torch._C, name)]
for name, _ in kept:
    delattr(torch._C, name)
import lossforge.losses.engine.operators
for name, value in kept:
    setattr(torch._C, name, value)
spec = importlib.util.spec_from_file_location("checks", {file!r})
checks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)
assert not checks.state.plain(torch.zeros(1, device=checks.DEVICE))
checks.check_losses()
"""


@pytest.mark.slow
def test_all_private_names_can_go():
    names = sorted({name.removeprefix("torch._C.") for name in used() if name.startswith("torch._C._")})  # torch.library needs the rest
    assert {*OF_AUTOGRAD, "_dispatch_keys"} <= {*names}
    script = WITHOUT_ALL.replace("{names!r}", repr(names)).replace("{file!r}", repr(__file__))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_an_old_torch_is_refused():
    script = "import torch; torch.__version__ = '2.8.0+cu128'; import lossforge.losses"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: lossforge needs torch>=2.9,<2.16, found torch 2.8.0+cu128. Install a newer torch." in done.stderr

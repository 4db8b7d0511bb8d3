"""What importing the losses loads, and that they work where numpy or Triton is not installed: each in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

ABSENT = """
import sys

class Without:
    '''A finder of modules that does not find some.'''
    def __init__(self, finder, absent):
        self.finder, self.absent = finder, absent
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder, {absent!r}) for finder in sys.meta_path]
"""


def fresh(code, *absent, **environment):
    """What `code` prints in a new process in which the packages `absent` cannot be found, and kernels are not interpreted."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    start = ABSENT.replace("{absent!r}", repr(set(absent))) if absent else ""
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)], env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


IMPORT = """
import sys, torch
before = set(sys.modules)
import lossforge.losses
print(*sorted(set(sys.modules) - before))
"""


def test_import_loads_nothing_that_can_wait():
    loaded = fresh(IMPORT).split()
    assert "lossforge.losses.definitions.classes.classification" in loaded
    waits = ("triton", "numpy", "sympy", "torch._dynamo", "torch._inductor", "torch._functorch", "functorch", "lossforge.kernels.")
    waits += tuple(
        f"lossforge.losses.{name}" for name in ("testing", "check.run", "formulas.source", "formulas.derive", "formulas.translate")
    )
    early = {f"lossforge.kernels.{name}" for name in ("availability", "call", "plans", "product", "torch_internals")}
    rooms = {name.removesuffix(".calls") for name in loaded if name.endswith(".calls")}  # with the records of calls, which need torch alone
    early |= rooms | {f"{name}.calls" for name in rooms}
    assert not [name for name in loaded if name.startswith(tuple(waits)) and name not in early]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "environment"),
    [("from lossforge.losses import check", {"TRITON_INTERPRET": "1"}), ("import lossforge.losses.check.formula, triton", {})],
)
def test_names_and_backend_do_not_depend_on_what_is_imported_first(first, environment):
    """lossforge.losses.check is a function and a package. Triton, asked or imported before, says itself whether it interprets."""
    code = f"""
    {first}
    import sys, torch, lossforge.losses as l
    print(callable(l.check), callable(l.elementwise), callable(l.rowwise), callable(l.boxes))
    print(l.backend(torch.zeros(1)), "triton" in sys.modules)
    """
    backend = "triton-interpreted" if environment else "torch"
    assert fresh(code, **environment).splitlines() == ["True True True True", f"{backend} True"]


WITHOUT_NUMPY = """
import importlib.util, pathlib, sys
assert importlib.util.find_spec("numpy") is None
import torch, lossforge.losses
from lossforge.losses import cross_entropy
spec = importlib.util.spec_from_file_location("mine", MINE)
mine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mine)
x = torch.tensor([[1.0, 2.0], [0.0, -1.0]], requires_grad=True)
mine.squared(x, torch.ones(2, 2)).backward()
print(x.grad.tolist(), mine.squared.gradient, float(cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1]))))
print("triton.runtime.interpreter" in sys.modules)
"""


@pytest.mark.slow
def test_without_numpy(tmp_path):
    """A formula of one's own is read, differentiated and computed."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import triton\nimport triton.language as tl\nfrom lossforge.losses import elementwise\n\n"
        "@elementwise\n@triton.jit\ndef squared(x, y):\n    return (x - y) * (x - y)\n"
    )
    printed = fresh(f"MINE = {str(file)!r}\n{WITHOUT_NUMPY}", "numpy").splitlines()
    assert printed == ["[[0.0, 0.5], [-0.5, -1.0]] derived 1.3862943649291992", "False"]


WITHOUT_TRITON = """
import importlib.util
assert importlib.util.find_spec("triton") is None
import sys, torch, lossforge.losses
from lossforge.losses import backend, boxes, check, elementwise, rowwise
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import error, plain_sample, run

assert backend(torch.zeros(1)) == "torch"
for loss in LOSSES.values():
    sample, reduction = plain_sample(loss), loss.reductions[0]
    ours = run(loss.function, sample, reduction=reduction)
    exact = run(loss.function, sample, dtype=torch.float64, reduction=reduction)
    assert error(ours.value, exact.value) < 3e-6, loss.name
    assert error(ours.gradient, exact.gradient) < 3e-6, loss.name
    if not sample.kwargs:
        assert torch.isfinite(loss.module()(sample.x, sample.target)).all(), loss.name
    print(loss.name)
logps = torch.tensor([-1.0, -2.0], requires_grad=True)
lossforge.losses.dpo_loss(logps, logps.detach() - 1, logps.detach(), logps.detach()).backward()
print(logps.grad.tolist(), float(lossforge.losses.clip_loss(torch.zeros(3, 3))))
assert not [name for name in sys.modules if name.startswith(("triton", "lossforge.kernels.engine"))]

def refused(make):
    try:
        make()
    except ModuleNotFoundError as error:
        print(error.name, error)

refused(lambda: __import__("lossforge.kernels.math"))
refused(lambda: elementwise(lambda x, y: x - y))
refused(lambda: rowwise(hyper={"q": 1.0})(lambda z, q: z))
refused(lambda: boxes(lambda *corners: 0.0))
refused(lambda: check("focal"))
"""


def test_without_triton_torch_computes_and_what_needs_triton_says_so():
    from lossforge.losses.registry import LOSSES

    printed = fresh(WITHOUT_TRITON, "triton").splitlines()
    names, computed, refusals = printed[: len(LOSSES)], printed[len(LOSSES)], printed[len(LOSSES) + 1 :]
    assert names == list(LOSSES)
    gradient, clip = computed.rsplit(" ", 1)
    # DPO where both log-ratios are 1 apart: -β σ(-β) / 2 each, β = 0.1
    assert [float(v) for v in gradient.strip("[]").split(", ")] == pytest.approx([-0.0237510] * 2, rel=1e-5)
    assert float(clip) == pytest.approx(1.0986123)
    says = "triton kernels and custom formulas need Triton, which is not installed. Install it on Linux: pip install triton."
    assert len(refusals) == 5
    assert all(line.startswith(says) for line in refusals)


README_AND_TESTS = """
import runpy, sys
from pathlib import Path
import pytest
assert runpy.run_path("tools/smoke.py")["run_examples"](Path("README.md")) >= 1
tests = "packages/losses/tests"
of_linear = [f"{tests}/functional", "--ignore-glob=*/functional/test_[!l]*.py"]  # a folder, of which the default tier runs
others = [f"{tests}/{name}" for name in ("preference/test_from_hidden_states.py", "test_docstrings.py", "test_modules.py")]
compiled = f"{tests}/functional/test_linear.py::test_ignored_rows_are_skipped_under_compile"
around = [f"--deselect={compiled}[{name}]" for name in ("module", "teacher's module")]  # which call two of the others
status = pytest.main(["-q", "-p", "no:cacheprovider", *of_linear, *others, *around])
assert "triton" not in sys.modules
sys.exit(status)
"""


@pytest.mark.slow
def test_without_triton_readme_runs_and_the_public_api_passes_its_tests(monkeypatch):
    """Every example of a docstring, every module, and every loss fused with a linear layer."""
    monkeypatch.chdir(ROOT)
    printed = fresh(
        README_AND_TESTS, "triton", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0", PYTEST_ADDOPTS="", PYTEST_XDIST_AUTO_NUM_WORKERS="0"
    )
    assert int(printed.split(" passed")[0].split()[-1]) > 250, printed[-3000:]

"""The kernel for the Hugging Face hub: laid out from the sources, and loaded in processes that cannot import lossforge."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import hub_kernel
import pytest

ROOT = Path(__file__).resolve().parents[1]

LOAD = """
import importlib.util, json, sys
from pathlib import Path
import torch
import torch.nn.functional as F
import torchvision

class Without:
    '''A finder of modules that does not find some.'''
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)

def load(variant, file="__init__.py", name=None):
    '''Import a kernel as the hub's loader does: by its file, under the name that its metadata has.'''
    name = name or json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def same(ours, theirs, *inputs):
    '''The values are the same, and the gradients of these inputs under an upstream gradient of 1.7.'''
    torch.testing.assert_close(ours, theirs)
    got, wanted = (torch.autograd.grad(1.7 * value, inputs) for value in (ours, theirs))
    torch.testing.assert_close(got, wanted)

torch.manual_seed(0)
x, target = torch.randn(6, 9, requires_grad=True), torch.tensor([0, 3, -100, 8, 2, 5])
"""

LOSSES = """
kernel = load(VARIANT)
assert kernel.backend(x) == BACKEND, kernel.backend(x)
same(kernel.cross_entropy(x, target, label_smoothing=0.1), F.cross_entropy(x, target, label_smoothing=0.1), x)
y = torch.rand(6, 9).round()
p = x.sigmoid()
focal = ((y * (1 - p) ** 2 * 0.25 + (1 - y) * p**2 * 0.75) * F.binary_cross_entropy_with_logits(x, y, reduction="none")).mean()
same(kernel.sigmoid_focal_loss(x, y, reduction="mean"), focal, x)
logs, teacher = x.detach().log_softmax(1).requires_grad_(), y.softmax(1)
same(kernel.KLDivLoss(reduction="batchmean")(logs, teacher), F.kl_div(logs, teacher, reduction="batchmean"), logs)
weight = torch.randn(7, 9, requires_grad=True)
labels = target.clamp(max=6)
same(kernel.linear_cross_entropy(x, weight, labels), F.cross_entropy(x @ weight.T, labels), x, weight)
same(kernel.fuse_linear(kernel.cross_entropy)(x, weight, labels), F.cross_entropy(x @ weight.T, labels), x, weight)
same(kernel.FusedLinear(kernel.CrossEntropyLoss(), head := torch.nn.Linear(9, 7))(x, labels), F.cross_entropy(head(x), labels), x)
boxes, others = (torch.rand(5, 2, 2).sort(1).values.reshape(5, 4).requires_grad_() for _ in range(2))
ours = kernel.generalized_box_iou_loss(boxes, others, reduction="mean")
same(ours, torchvision.ops.generalized_box_iou_loss(boxes, others, reduction="mean"), boxes, others)
compiled = torch.compile(kernel.cross_entropy, backend="aot_eager", fullgraph=True)
same(compiled(x, target), F.cross_entropy(x, target), x)
assert hasattr(getattr(torch.ops, kernel.__name__), "rowwise")
assert not hasattr(torch.ops.lossforge, "rowwise")
assert not [name for name in sys.modules if name.partition(".")[0] == "lossforge"]
"""

SEVERAL = """
import lossforge.losses
first, second = load(VARIANT), load(VARIANT, name="_lossforge_cuda_another")
for each in (lossforge.losses, first, second):
    same(each.cross_entropy(x, target), F.cross_entropy(x, target), x)
    assert each.cross_entropy.__module__.startswith(each.__name__)
    assert hasattr(getattr(torch.ops, each.__name__.partition(".")[0]), "rowwise")
former = load(VARIANT, "lossforge/__init__.py", "lossforge_former")
assert former.cross_entropy is first.cross_entropy
assert former.__all__ == first.__all__ == lossforge.losses.__all__
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    hub_kernel.write(ROOT, folder)
    return folder / "build" / "torch-universal"


def run(variant: Path, code: str, *absent: str, interpret: bool = False, backend: str = "torch") -> None:
    names = f"VARIANT, ABSENT, BACKEND = __import__('pathlib').Path({str(variant)!r}), {absent!r}, {backend!r}\n"
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
    argv = [sys.executable, "-W", "ignore", "-c", names + LOAD + textwrap.dedent(code)]
    done = subprocess.run(argv, env=environment, cwd=variant.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_losses_without_triton(variant):
    run(variant, LOSSES, "lossforge", "triton")


def test_losses_in_kernels(variant):
    run(variant, LOSSES, "lossforge", interpret=True, backend="triton-interpreted")


@pytest.mark.slow
def test_several_versions_in_one_process(variant):
    """Two copies beside the installed package, each with operators of its own."""
    run(variant, SEVERAL, interpret=True)


def test_metadata_names_every_file_by_its_digest(variant):
    described = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    files = {path.relative_to(variant).as_posix(): path.read_bytes() for path in variant.rglob("*.py")}
    digests = {file: base64.b64encode(hashlib.sha256(content).digest()).decode() for file, content in files.items()}
    assert described["digest"] == {"algorithm": "sha256", "files": digests}
    assert described["id"].isidentifier()
    assert {name: described[name] for name in ("name", "license", "python-depends")} == {
        "name": "lossforge",
        "license": "Apache-2.0",
        "python-depends": [],
    }


def test_other_sources_have_another_name():
    files = {"a.py": "x = 1\n"}
    project = {"version": "1.2.3", "license": "Apache-2.0", "urls": {"Repository": "https://example.org"}}
    one, other = (hub_kernel.metadata({**files, "b.py": text}, "cuda", project) for text in ("", "y = 2\n"))
    assert one["id"] != other["id"]
    assert one["version"] == 1


def test_imports_become_relative():
    text = "from {0} import kernels\nfrom {0}{1}losses.base import (\n    a,\n)\ndef f():\n    from {0}{1}losses import b  # from\n"
    expected = text.format("...", "")
    assert hub_kernel.relative(text.format("lossforge", "."), Path("losses/base/c.py")) == expected
    with pytest.raises(ValueError, match=r"losses/c\.py:1: write `from lossforge"):
        hub_kernel.relative("import lossforge.losses\n", Path("losses/c.py"))


def test_a_folder_with_a_build_is_refused(variant):
    with pytest.raises(FileExistsError):
        hub_kernel.write(ROOT, variant.parents[1])

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
    got, wanted = (torch.autograd.grad(1.7 * value, inputs, retain_graph=True) for value in (ours, theirs))
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


OF_LANGUAGE = """
kernel = load(VARIANT)
assert kernel.backend(x) == BACKEND, kernel.backend(x)
same(kernel.cross_entropy(x, target, label_smoothing=0.1), F.cross_entropy(x, target, label_smoothing=0.1), x)
y = torch.rand(6, 9).round()
p = x.sigmoid()
focal = ((y * (1 - p) ** 2 * 0.25 + (1 - y) * p**2 * 0.75) * F.binary_cross_entropy_with_logits(x, y, reduction="none")).mean()
same(kernel.sigmoid_focal_loss(x, y, reduction="mean"), focal, x)
other = torch.randn(6, 9)
kl = F.kl_div(x.log_softmax(1), other.softmax(1), reduction="batchmean")
same(kernel.kl_div_with_logits(x, other), kl, x)
hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)
logits, index = hidden @ weight.T, target.clamp(min=0)
same(kernel.linear_cross_entropy(hidden, weight, target), F.cross_entropy(logits, target), hidden, weight)
teacher = kernel.LinearTeacher(torch.randn(6, 4), torch.randn(9, 4))
kl = F.kl_div(logits.log_softmax(1), (teacher.input @ teacher.weight.T).softmax(1), reduction="batchmean")
same(kernel.linear_kl_div(hidden, weight, teacher), kl, hidden, weight)
logps = logits.log_softmax(1).gather(1, index[:, None])[:, 0]
ours = kernel.linear_selective_log_softmax(hidden, weight, index)
same(ours.square().mean(), logps.square().mean(), hidden, weight)
same(kernel.selective_log_softmax(logits, index).square().mean(), logps.square().mean(), hidden, weight)
reference = torch.randn(6)
dpo = -F.logsigmoid(0.1 * (logps[:3] - logps[3:] - reference[:3] + reference[3:])).mean()
same(kernel.dpo_loss(*ours.chunk(2), *reference.chunk(2)), dpo, hidden, weight)
advantages, old = torch.randn(2), ours.detach().view(2, 3) + 0.05
ratio = (logps.view(2, 3) - old).exp()
same(kernel.grpo_loss(ours.view(2, 3), advantages, old), -(ratio * advantages[:, None]).mean(), hidden, weight)
assert set(kernel.__all__) - {"LinearTeacher", "TopKTeacher", "backend", "plain_torch", "layers"} == {*NAMES}
assert not hasattr(kernel, "dice_loss")
layers, module = kernel.layers, torch.nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)
for name in ("CrossEntropyLoss", "ForCausalLMLoss", "KLDivWithLogitsLoss", "LinearCrossEntropyLoss"):  # what kernelize asks of a layer
    layer = getattr(layers, name)
    assert layer.__init__ is torch.nn.Module.__init__
    assert set(dir(layer)) == set(dir(torch.nn.Module))
same(layers.CrossEntropyLoss.forward(module, x, index), F.cross_entropy(x, index, label_smoothing=0.1, ignore_index=3), x)
module.temperature, module.reduction = 1.0, "batchmean"
same(layers.KLDivWithLogitsLoss.forward(module, x, other), kernel.kl_div_with_logits(x, other), x)
module.reduction = "sum"
ours = layers.LinearCrossEntropyLoss.forward(module, hidden, weight, index)
same(ours, F.cross_entropy(logits, index, ignore_index=3, reduction="sum"), hidden, weight)
"""

KERNELIZED = """
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer import replace_kernel_forward_from_hub

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.loss = torch.nn.Linear(5, 9), torch.nn.CrossEntropyLoss(ignore_index=3)
    def forward(self, hidden, target):
        return self.loss(self.head(hidden), target)

model, hidden = Model(), torch.randn(6, 5)
expected = model(hidden, target.clamp(min=0))
replace_kernel_forward_from_hub(torch.nn.CrossEntropyLoss, "CrossEntropyLoss")
layer = LocalLayerRepository(VARIANT.parent, layer_name="CrossEntropyLoss")
with use_kernel_mapping({"CrossEntropyLoss": {"cpu": layer}}):
    model = kernelize(model, mode=Mode.TRAINING, device="cpu")
assert ".layers" in model.loss.forward.__func__.__module__
same(model(hidden, target.clamp(min=0)), expected, *model.parameters())
assert [name for name in sys.modules if name.startswith("_lossforge_small_cuda_")]
"""

OF_TRANSFORMERS = """
from kernels import LocalLayerRepository, use_kernel_mapping
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import use_kernel_forward_from_hub
from transformers.integrations.hub_kernels import kernelize, register_kernel_mapping_transformers
from transformers.loss.loss_utils import ForCausalLMLoss

@use_kernel_forward_from_hub("ForCausalLMLoss")
class Loss(torch.nn.Module):
    def forward(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)

model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=60))
tokens = torch.randint(60, (2, 9))
labels = tokens.masked_fill(torch.rand(2, 9) < 0.3, -100)
divisors = {}, {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 5}
expected = [model(tokens, labels=labels, **each).loss for each in divisors]
model._loss_function = Loss()  # what the property of that name gives; a module set as loss_function itself would not be called
model.train()
register_kernel_mapping_transformers()
with use_kernel_mapping({"ForCausalLMLoss": {"cpu": LocalLayerRepository(VARIANT.parent, layer_name="ForCausalLMLoss")}}):
    kernelize(model)  # what model.set_use_kernels(True) calls, whose own mappings have no CPU
assert ".layers" in model.loss_function.forward.__func__.__module__
for each, right in zip(divisors, expected):
    same(model(tokens, labels=labels, **each).loss, right, *model.parameters())
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    hub_kernel.write(ROOT, folder, small=True)
    return folder / "build" / "torch-universal"


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


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kernels", "torch"])
def test_the_small_kernel_has_losses_of_language_models(small, interpret):
    names = f"NAMES = {[name for each in hub_kernel.SMALL.values() for name in each]!r}\n"
    backend = "triton-interpreted" if interpret else "torch"
    run(small, names + textwrap.dedent(OF_LANGUAGE), "lossforge", interpret=interpret, backend=backend)


def test_the_small_kernel_is_a_part_of_the_whole(small, variant):
    """Its files are the whole one's, but for those that name what it has."""
    files = {path.relative_to(small).as_posix(): path.read_bytes() for path in small.rglob("*.py")}
    own = {"__init__.py", "layers.py", hub_kernel.TEMPLATES, "losses/__init__.py"}
    own |= {f"losses/definitions/{folder}__init__.py" for folder in ("", "language/", "preference/")}
    assert {file for file, content in files.items() if file in own or content == (variant / file).read_bytes()} == {*files}
    lines = sum(content.count(b"\n") for content in files.values())
    assert lines < 0.6 * sum(path.read_bytes().count(b"\n") for path in variant.rglob("*.py"))


@pytest.mark.slow
def test_a_model_is_kernelized(small):
    """By the library of Hugging Face, from a local path."""
    pytest.importorskip("kernels", reason="needs pip install kernels")
    run(small, KERNELIZED, "lossforge")


@pytest.mark.slow
def test_a_model_of_transformers_is_kernelized(small):
    """By transformers' own mapping, from a local path."""
    hub = pytest.importorskip("transformers.utils.import_utils", reason="needs pip install transformers kernels")
    if not hub.is_kernels_available():
        pytest.skip(f"needs kernels from {hub.KERNELS_MIN_VERSION} to below {hub.KERNELS_MAX_VERSION}")
    run(small, OF_TRANSFORMERS, "lossforge")


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

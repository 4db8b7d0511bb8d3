"""timm's losses and tasks, patched, against timm's own: value, gradient, attributes, and a script that runs unedited."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from timm import loss as theirs  # noqa: E402

from lossforge.integrations import timm as ours  # noqa: E402
from lossforge.patch.patching import _SAID  # noqa: E402

FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
newest = pytest.mark.skipif(importlib.util.find_spec("timm.task") is None, reason="this timm has no tasks")


def inputs(kind):
    """Return logits (6, 5) and targets of a kind."""
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(6, 5, generator=draw)
    targets = {
        "classes": torch.randint(5, (6,), generator=draw),
        "soft": torch.rand(6, 5, generator=draw).softmax(-1),
        "many": torch.rand(6, 5, generator=draw).round(),
        "whole": torch.rand(6, 5, generator=draw).round().long(),
    }
    return x, targets[kind]


def graded(module, x, target):
    """Return loss and gradient under an upstream gradient other than 1."""
    x = x.clone().requires_grad_()
    loss = module(x, target)
    (gradient,) = torch.autograd.grad(loss, x, 1.7 + 0.1 * torch.arange(loss.numel(), dtype=loss.dtype).view(loss.shape))
    return loss.detach(), gradient


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0])
CASES = [
    ("LabelSmoothingCrossEntropy", {}, "classes"),
    ("LabelSmoothingCrossEntropy", {"smoothing": 0.0}, "classes"),
    ("SoftTargetCrossEntropy", {}, "soft"),
    ("BinaryCrossEntropy", {}, "classes"),
    ("BinaryCrossEntropy", {"target_threshold": 0.2, "sum_classes": True}, "soft"),
    ("BinaryCrossEntropy", {"smoothing": 0.3, "weight": WEIGHT, "pos_weight": 2.5, "reduction": "none"}, "many"),
    ("BinaryCrossEntropy", {"pos_weight": WEIGHT, "reduction": "sum"}, "classes"),
    ("AsymmetricLossMultiLabel", {}, "many"),
    ("AsymmetricLossMultiLabel", {"gamma_neg": 2, "gamma_pos": 0, "clip": None, "disable_torch_grad_focal_loss": True}, "whole"),
    ("AsymmetricLossSingleLabel", {}, "classes"),
    ("AsymmetricLossSingleLabel", {"eps": 0.0, "reduction": "sum"}, "classes"),
    ("JsdCrossEntropy", {}, "classes"),
    ("JsdCrossEntropy", {"num_splits": 2, "alpha": 3, "smoothing": 0}, "classes"),
]
NEWER = [
    ("BinaryCrossEntropy", {"smoothing": 0.3, "smooth_dense": True}, "many"),
    ("AsymmetricLossMultiLabel", {"smoothing": 0.2, "reduction": "none", "weight": WEIGHT, "pos_weight": 3.0}, "many"),
    ("PolyCrossEntropy", {"smoothing": 0.1}, "classes"),
    ("PolyCrossEntropy", {"epsilon": -1.0, "reduction": "none"}, "classes"),
    ("PolyBinaryCrossEntropy", {"gamma": 2.0, "alpha": 0.25, "smoothing": 0.1, "reduction": "batchmean"}, "many"),
    ("TwoWayLoss", {"tp": 2.0}, "many"),
    ("ZlprLoss", {}, "many"),
]


@pytest.mark.parametrize(("name", "options", "kind"), [*CASES, *(pytest.param(*each, marks=newest) for each in NEWER)], ids=str)
def test_losses_are_timms(name, options, kind):
    module = getattr(theirs, name)(**options)
    before = dict(vars(module)), dict(module.state_dict())
    x, target = inputs(kind)
    expected, gradient = graded(module, x, target)
    _SAID.clear()
    with ours.patch():
        found, ours_gradient = graded(module, x, target)
        made_after = graded(getattr(theirs, name)(**options), x, target)
        assert type(getattr(theirs, name)(**options)) is type(module)
    assert not _SAID
    torch.testing.assert_close(found, expected, **FLOAT32)
    torch.testing.assert_close(ours_gradient, gradient, **FLOAT32)
    torch.testing.assert_close(made_after, (found, ours_gradient), rtol=0, atol=0)
    changed = {key for key, value in vars(module).items() if value is not before[0].get(key)} - {"targets_classes"}
    assert not changed
    torch.testing.assert_close(graded(module, x, target), (expected, gradient), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "case"),
    [("cross_entropy", 0), ("smoothed_binary_cross_entropy", 3), ("asymmetric_loss_multi_label", 7), ("jsd_cross_entropy", 11)],
)
def test_losses_run_our_code(name, case, monkeypatch):
    calls, own = [], getattr(ours, name)
    monkeypatch.setattr(ours, name, lambda *args, **kwargs: calls.append(name) or own(*args, **kwargs))
    module, options, kind = CASES[case]
    with ours.patch():
        graded(getattr(theirs, module)(**options), *inputs(kind))
    assert calls == [name]


def trained_target():
    x, target = inputs("soft")
    return theirs.BinaryCrossEntropy(), x, target.requires_grad_(), "BinaryCrossEntropy.forward runs: the targets require grad"


def soft_poly():
    return theirs.PolyCrossEntropy(), *inputs("soft"), "PolyCrossEntropy.forward runs: the targets are probabilities"


def images():
    x, target = inputs("soft")
    said = "SoftTargetCrossEntropy.forward runs: the logits are not (N, C)"
    return theirs.SoftTargetCrossEntropy(), x.view(2, 3, 5), target.view(2, 3, 5), said


@pytest.mark.parametrize("case", [trained_target, pytest.param(soft_poly, marks=newest), images])
def test_what_ours_lacks_is_left_to_timm(case, caplog):
    module, x, target, said = case()
    expected = graded(module, x, target)
    _SAID.clear()
    with ours.patch():
        for _ in range(2):
            torch.testing.assert_close(graded(module, x, target), expected, rtol=0, atol=0)
    assert [record.message for record in caplog.records if "own" in record.message] == [f"timm's own {said}"]


def test_an_attribute_that_changes_counts():
    module, (x, target) = theirs.LabelSmoothingCrossEntropy(0.1), inputs("classes")
    module.smoothing, module.confidence = 0.3, 0.7
    expected = graded(module, x, target)
    with ours.patch():
        torch.testing.assert_close(graded(module, x, target), expected, **FLOAT32)
        module.confidence = 0.9  # theirs takes it as it is
        found = graded(module, x, target)
    torch.testing.assert_close(found, graded(module, x, target), rtol=0, atol=0)


@newest
def test_the_factory_makes_ours_of_plain_cross_entropy():
    x, target = inputs("classes")
    plain = theirs.create_classification_loss()
    with ours.patch():
        made = theirs.create_classification_loss()
        assert isinstance(made, nn.CrossEntropyLoss)
        assert type(made) is ours.CrossEntropyLoss
        torch.testing.assert_close(graded(made, x, target), graded(plain, x, target), **FLOAT32)
        made.ignore_index = plain.ignore_index = -1  # which torch does not read beside probabilities
        torch.testing.assert_close(graded(made, x, x.softmax(1)), graded(plain, x, x.softmax(1)), **FLOAT32)
    assert type(theirs.create_classification_loss()) is nn.CrossEntropyLoss


@newest
@pytest.mark.parametrize("distillation", ["logits", "features", "hard tokens", "soft tokens"])
def test_distilling_tasks_are_timms(distillation):
    from timm.task import DistillationTeacher, FeatureDistillationTask, LogitDistillationTask, TokenDistillationTask

    def losses():
        torch.manual_seed(0)
        tokens = "tokens" in distillation
        name = "deit_tiny_distilled_patch16_224" if tokens else "test_resnet.r160_in1k"
        sizes = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2} if tokens else {}
        student = timm.create_model(name, num_classes=4, **sizes)
        teacher = DistillationTeacher(timm.create_model("test_resnet.r160_in1k", num_classes=4), num_classes=4, device=torch.device("cpu"))
        common = {"student_model": student, "teacher_model": teacher, "criterion": theirs.LabelSmoothingCrossEntropy(), "verbose": False}
        task = {
            "logits": lambda: LogitDistillationTask(**common, temperature=4.0, distill_loss_weight=0.7),
            "features": lambda: FeatureDistillationTask(**common),
            "hard tokens": lambda: TokenDistillationTask(**common, distill_type="hard"),
            "soft tokens": lambda: TokenDistillationTask(**common, distill_type="soft", temperature=3.0),
        }[distillation]()
        task.eval() if tokens else task.train()
        student.train()
        found = task(torch.randn(2, 3, 32, 32), torch.tensor([1, 3]))
        found["loss"].backward()
        terms = {key: value.detach() for key, value in found.items() if "loss" in key}
        return terms, {key: p.grad for key, p in student.named_parameters() if p.grad is not None}

    expected = losses()
    with ours.patch():
        torch.testing.assert_close(losses(), expected, rtol=1e-4, atol=1e-6)


SCRIPT = Path(__file__).with_name("timm_script.py")


def trained(tmp_path, patched, processes):
    """Return the losses and the gradients' norms that the script prints, with or without us."""
    before = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    us = ["-m", "lossforge.patch", "timm", "--"] if patched else []
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *before, *us, str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert ("lossforge: timm " in done.stderr) == patched
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return torch.tensor(json.loads(line))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_trains_unedited(tmp_path, processes):
    """With accumulation over 1 and 4 micro-batches, in the script."""
    expected = trained(tmp_path, False, processes)
    found = trained(tmp_path, True, processes)
    assert found.shape == (12, 2)
    assert not torch.equal(found, expected)  # to the last digit it is other code
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)

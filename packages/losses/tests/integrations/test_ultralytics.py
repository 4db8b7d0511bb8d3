"""ultralytics' losses and assignment, patched, against ultralytics' own; and models of its files, which train."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import compared
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("ultralytics")

from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.loss import BboxLoss, DFLoss, RotatedBboxLoss, v8DetectionLoss
from ultralytics.utils.tal import TaskAlignedAssigner

from lossforge.integrations import ultralytics as ours
from lossforge.losses import plain_torch, task_aligned_assign
from lossforge.losses.detection.assignment import AT_ONCE
from lossforge.patch.patching import _SAID

STRIDES = (8, 16, 32)


def anchors():
    """Return the points (A, 2) of an image of 64 × 64, in strides, and the strides (A, 1)."""
    grids = [torch.cartesian_prod(torch.arange(64 // s), torch.arange(64 // s)).flip(1) + 0.5 for s in STRIDES]
    return torch.cat(grids), torch.cat([torch.full((len(grid), 1), float(s)) for grid, s in zip(grids, STRIDES, strict=True)])


def box_inputs(bins, dtype=torch.float32, empty=False):
    """Return the arguments of BboxLoss for two images, of which some anchors are foreground."""
    draw = torch.Generator().manual_seed(0)
    points, stride = anchors()
    count = len(points)
    foreground = torch.zeros(2, count, dtype=torch.bool) if empty else torch.rand(2, count, generator=draw) < 0.3
    target = torch.cat([points - 3 * torch.rand(2, count, 2, generator=draw), points + 20 * torch.rand(2, count, 2, generator=draw)], 2)
    scores = torch.rand(2, count, 4, generator=draw) * foreground[..., None]
    spread = torch.randn(2, count, 4 * bins, generator=draw).to(dtype).requires_grad_()
    reach = 0.2 + 3 * torch.rand(2, count, 4, generator=draw)
    predicted = torch.cat([points - reach[..., :2], points + reach[..., 2:]], 2).to(dtype).requires_grad_()
    size = torch.tensor([64.0, 64.0])
    return spread, predicted, points, target, scores, scores.sum().clamp(min=1), foreground, size, stride


def compare(call, leaves, **how):
    compared.compare(ours.patch, call, leaves, **how)


@pytest.mark.parametrize("bins", [16, 1], ids=["DFL", "L1"])
def test_box_losses(bins):
    """Also without foreground, where the graph is kept, and of half precision."""
    for how, given in (({}, {}), ({"empty": True}, {"differs": False}), ({"dtype": torch.bfloat16}, {"differs": False, "rtol": 2e-2})):
        inputs = box_inputs(bins, **how)
        compare(lambda: BboxLoss(bins)(*inputs), inputs[:2], atol=1e-4 if "dtype" in how else 1e-6, **given)  # noqa: B023


def test_dfl_alone():
    spread, target = torch.randn(24, 16, requires_grad=True), 18 * torch.rand(6, 4) - 1
    compare(lambda: DFLoss(16)(spread, target.clone()), [spread])


def test_the_dfl_of_rotated_boxes():
    points, stride = anchors()
    spread = torch.randn(1, len(points), 64, requires_grad=True)
    boxes = torch.cat([points, 1 + 4 * torch.rand(len(points), 2), torch.rand(len(points), 1)], 1)[None]
    predicted = (boxes + 0.1 * torch.rand_like(boxes)).requires_grad_()
    foreground, scores = torch.rand(1, len(points)) < 0.3, torch.rand(1, len(points), 2)
    given = points, boxes, scores, scores.sum(), foreground, torch.tensor([64.0, 64.0]), stride
    compare(lambda: RotatedBboxLoss(16)(spread, predicted, *given), [spread, predicted])


def criterion_of(**changes):
    """Make a criterion as YOLO's models do. changes: of the model."""
    head = SimpleNamespace(stride=torch.tensor([8.0, 16.0, 32.0]), nc=4, reg_max=16)
    model = nn.Linear(1, 1)
    model.args, model.model = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5), [head]
    for name, value in changes.items():
        setattr(model, name, value)
    return v8DetectionLoss(model)


def batch(sides=(24.0, 40.0), images=2):
    """Return predictions, with a graph, and targets of two boxes an image. sides: of the boxes, in pixels."""
    draw = torch.Generator().manual_seed(0)
    count = len(anchors()[0])
    predictions = {
        "boxes": (2 * torch.randn(images, 64, count, generator=draw)).requires_grad_(),
        "scores": torch.randn(images, 4, count, generator=draw).requires_grad_(),
        "feats": [torch.zeros(images, 8, 64 // s, 64 // s) for s in STRIDES],
    }
    boxes = torch.stack([torch.tensor([32.0 + 4 * i, 30.0 - 2 * i, side, side + 1]) / 64 for i in range(images) for side in sides])
    index = torch.arange(images).repeat_interleave(len(sides)).float()
    targets = {"batch_idx": index, "cls": torch.arange(len(boxes)) % 4.0, "bboxes": boxes}
    return predictions, targets


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 2.0, 3.0])], ids=["plain", "class weights"])
def test_the_criterion_of_detection(weights):
    predictions, targets = batch()
    leaves = [predictions["boxes"], predictions["scores"]]
    compare(lambda: criterion_of(class_weights=weights)(predictions, targets)[0], leaves)
    with ours.patch():
        criterion = criterion_of()
        assert isinstance(criterion.bce, nn.BCEWithLogitsLoss)
        assert criterion.assigner.topk == 10


def test_a_batch_without_boxes():
    predictions, targets = batch()
    targets = {name: each[:0] for name, each in targets.items()}
    compare(lambda: criterion_of()(predictions, targets)[0], [predictions["boxes"], predictions["scores"]], said=True, differs=False)


def assigned(assigner, seed=0, small=False):
    draw = torch.Generator().manual_seed(seed)
    points, stride = anchors()
    centers = 16 + 32 * torch.rand(2, 3, 2, generator=draw)
    half = (1 if small else 10) + 12 * torch.rand(2, 3, 2, generator=draw)
    boxes = torch.cat([centers - half, centers + half], 2)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])[..., None]
    at = points * stride
    reach = 8 + 16 * torch.rand(2, len(at), 4, generator=draw)
    predicted = torch.cat([at - reach[..., :2], at + reach[..., 2:]], 2)
    scores, labels = torch.rand(2, len(at), 4, generator=draw), torch.randint(4, (2, 3, 1), generator=draw).float()
    return assigner(scores, predicted, at, labels, boxes * mask, mask)


@pytest.mark.parametrize("small", [False, True], ids=["large boxes", "small boxes"])
@pytest.mark.parametrize("topk2", [None, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_assignment(seed, topk2, small):
    """ultralytics enlarges sides below 16 pixels, and YOLO26's one-to-one head keeps one anchor a box."""
    made = {"num_classes": 4, "topk": 5, "alpha": 0.5, "topk2": topk2}
    labels, boxes, scores, foreground, index = assigned(TaskAlignedAssigner(**made), seed, small)
    _SAID.clear()
    with ours.patch():
        assigner = TaskAlignedAssigner(**made)
        assigner.for_boxes_alone = True
        found = assigned(assigner, seed, small)
    assert not _SAID
    counts = scores.sum(2) > 0
    torch.testing.assert_close(found[2], scores, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[3], counts)
    assert not (counts & ~foreground).any()
    for ours_of, theirs in zip((found[0], found[1], found[4]), (labels, boxes, index), strict=True):
        assert torch.equal(ours_of[counts], theirs[counts])


def test_assignments_that_are_left_to_ultralytics(caplog):
    made = {"num_classes": 4, "topk": 5}
    expected = assigned(TaskAlignedAssigner(**made))
    _SAID.clear()
    with ours.patch():
        assigner = TaskAlignedAssigner(**made)
        assigner.for_boxes_alone = False
        found = assigned(assigner)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    said = "ultralytics' own TaskAlignedAssigner.forward runs: masks and keypoints count anchors of alignment 0, which ours never assigns"
    assert [each.message for each in caplog.records] == [said]


def drawn(seed):
    """Two images of up to six boxes, some of few pixels, and predictions at 80 anchors, in float64."""
    draw = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.rand, generator=draw, dtype=torch.float64)
    found = []
    for stride in (8, 16):
        at = torch.arange(stride / 2, 64, stride, dtype=torch.float64)
        found.append(torch.cartesian_prod(at, at).flip(1))
    points = torch.cat(found)
    low, reach = rand(2, 6, 2) * 40, rand(2, len(points), 4) * 16 + 2
    boxes = torch.cat([low, low + 4 + 28 * rand(2, 6, 2)], 2)
    predicted = torch.cat([points - reach[..., :2], points + reach[..., 2:]], 2)
    labels, counts = torch.randint(5, (2, 6), generator=draw), torch.randint(1, 7, (2, 1), generator=draw)
    return rand(2, len(points), 5), predicted, points, labels, boxes, torch.arange(6) < counts


@pytest.mark.parametrize("batches", [range(40), pytest.param(range(40, 1040), marks=pytest.mark.slow)], ids=["some", "many"])
def test_every_index_of_random_batches(batches):
    """As ultralytics' own assigner has it, for both heads of YOLO26, wherever it gives an anchor a target that is not 0."""
    positives = 0
    for seed in batches:
        scores, predicted, points, labels, boxes, mask = drawn(seed)
        topk, topk2 = ((7, 1), (10, None), (10, 3), (4, 6))[seed % 4]
        theirs = TaskAlignedAssigner(topk=topk, num_classes=5, alpha=0.5, topk2=topk2)
        _, _, targets, _, index = theirs(scores, predicted, points, labels[..., None], boxes, mask[..., None].double())
        found = task_aligned_assign(scores, predicted, points, labels, boxes, mask, topk=topk, topk2=topk2, min_side=16)
        counts = targets.sum(2) > 0
        assert torch.equal(found.box_index, torch.where(counts, index, -1)), seed
        torch.testing.assert_close(found.scores, targets, rtol=1e-5, atol=1e-9)
        positives += int(counts.sum())
    assert positives > 5 * len(batches)


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that a call makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(each.numel() for each in tree_leaves(found) if isinstance(each, torch.Tensor))])
        return found


@pytest.mark.parametrize(("topk", "topk2"), [(10, None), (7, 1)], ids=["dense", "one-to-one"])
def test_a_crowd_in_bounded_memory(topk, topk2):
    """Of 4,096 anchors and 300 boxes ours keeps no matrix of all pairs, and ultralytics does; the indices are the same."""
    draw, classes = torch.Generator().manual_seed(0), 4
    points = torch.cartesian_prod(torch.arange(64.0), torch.arange(64.0)).flip(1) * 8 + 4
    center, half = 512 * torch.rand(2, 300, 2, generator=draw), 6 + 20 * torch.rand(2, 300, 2, generator=draw)
    targets = torch.randint(classes, (2, 300, 1), generator=draw), torch.cat([center - half, center + half], -1), torch.ones(2, 300, 1)
    predicted = torch.cat([points - 16, points + 16], -1) + 8 * torch.randn(2, 4096, 4, generator=draw)
    given = torch.rand(2, 4096, classes, generator=draw), predicted, points, *targets
    assigner = TaskAlignedAssigner(topk=topk, num_classes=classes, alpha=0.5, beta=6.0, topk2=topk2)
    with Largest() as theirs:
        _, _, scores, _, index = assigner(*given[:-1], given[-1].bool())
    with plain_torch(), Largest() as own:
        found = task_aligned_assign(*given, topk=topk, topk2=topk2, min_side=assigner.stride_val)
    assert theirs.elements >= 2 * 300 * 4096
    assert own.elements <= 2 * AT_ONCE
    assert torch.equal(found.box_index, torch.where(scores.sum(-1) > 0, index, -1))


def trained(folder, *models):
    """Return what a run prints that compares models of ultralytics' files, task=file, and what it logs."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
    command = [sys.executable, str(Path(__file__).with_name("ultralytics_runs.py")), *models]
    done = subprocess.run(command, cwd=folder, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("are ultralytics' numbers") == len(models)
    return done.stderr


def gradients_of_a_training(name, steps):
    """Return losses and gradients of all parameters of each step of a model of ultralytics' file, in float64."""
    torch.manual_seed(0)
    model = DetectionModel(name, nc=4, verbose=False).double().train()
    model.args, found = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, epochs=20), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-4 if name == "yolov8n.yaml" else 1e-5)
    _, targets = batch()
    given = {"img": torch.rand(2, 3, 64, 64), **{key: each.double() for key, each in targets.items()}}
    for _ in range(steps):
        model.zero_grad()
        loss, parts = model(given)
        loss.sum().backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), {key: each.detach() for key, each in parts.items()}, gradients))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return found


@pytest.fixture
def float64():
    """Compute in float64, also what ultralytics makes itself, such as padded targets."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolo26n.yaml"])
def test_a_training_of_20_steps(name, float64):
    """Every step's losses and gradients are ultralytics' own, but for what it adds to each height, 1e-7; after undo, to the bit."""
    expected = gradients_of_a_training(name, 20)
    _SAID.clear()
    with ours.patch():
        found = gradients_of_a_training(name, 20)
    assert not _SAID
    assert abs(float((expected[-1][0] - expected[0][0]).sum())) > 1e-3
    assert any(not torch.equal(gradient, found[0][2][key]) for key, gradient in expected[0][2].items())
    for right, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other[:2], right[:2], rtol=1e-6, atol=1e-9)
        largest = max(gradient.abs().max().item() for gradient in right[2].values())
        for key, gradient in right[2].items():
            torch.testing.assert_close(other[2][key], gradient, rtol=1e-6, atol=1e-6 * largest)
    torch.testing.assert_close(gradients_of_a_training(name, 1), expected[:1], rtol=0, atol=0)


@pytest.mark.slow
def test_detectors_train_to_ultralytics_numbers(tmp_path):
    assert "own" not in trained(tmp_path, "detect=yolov8n.yaml", "detect=yolo11n.yaml", "detect=yolo26n.yaml")


@pytest.mark.slow
def test_other_tasks_train_to_ultralytics_numbers(tmp_path):
    """Their box, class and DFL losses are ours, their assignment is not."""
    said = trained(tmp_path, "segment=yolov8n-seg.yaml", "segment=yolo26n-seg.yaml", "obb=yolo11n-obb.yaml", "pose=yolov8n-pose.yaml")
    assert "own BboxLoss" not in said
    assert "Assigner.forward runs: masks and keypoints count" in said

"""DETR's criterion against those of transformers, values and gradients, for layers, groups and denoising queries at once."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lossforge.kernels import launch_counts
from lossforge.losses import DenoisingQueries, DetrCriterion, backend, plain_torch, sigmoid_focal_loss
from lossforge.losses.testing import error

NAN = float("nan")
CLASSES = 4
COUNTS = [3, 0, 2]


def problem(device="cpu", layers=3, queries=8, classes=CLASSES, counts=COUNTS, dtype=torch.float64, seed=0):
    """Logits and boxes of layers, which require grad; labels and boxes of the targets."""
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(layers, len(counts), queries, classes, generator=make, dtype=torch.float64)
    boxes = 0.2 + 0.5 * torch.rand(layers, len(counts), queries, 4, generator=make, dtype=torch.float64)
    targets = 0.2 + 0.5 * torch.rand(sum(counts), 4, generator=make, dtype=torch.float64)
    labels = torch.randint(CLASSES, (sum(counts),), generator=make).to(device)
    predicted = [t.to(device, dtype).requires_grad_() for t in (logits, boxes)]
    return *predicted, labels, targets.to(device, dtype)


def gradients(losses: dict[str, Tensor], *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(1.7 * sum(losses.values()), leaves, retain_graph=True))


def dictionaries(logits, boxes, labels, targets, counts=COUNTS):
    """Outputs and targets as transformers has them; the last layer is the one that is not auxiliary."""
    *earlier, last = [{"logits": x, "pred_boxes": b} for x, b in zip(logits, boxes, strict=True)]
    parts = zip(labels.split(counts), targets.split(counts), strict=True)
    return {**last, "auxiliary_outputs": earlier}, [{"class_labels": label, "boxes": box} for label, box in parts]


def total(found: dict[str, Tensor], coefficients: dict[str, float]) -> dict[str, Tensor]:
    """The losses of all layers with their coefficients."""
    return {name: factor * sum(v for key, v in found.items() if key.startswith(name)) for name, factor in coefficients.items()}


def theirs_deformable(matcher_class=2.0):
    module = pytest.importorskip("transformers.loss.loss_deformable_detr")
    matcher = module.DeformableDetrHungarianMatcher(matcher_class, 5.0, 2.0)
    return module.DeformableDetrImageLoss(matcher, CLASSES, 0.25, ["labels", "boxes"])


def theirs_detr():
    module = pytest.importorskip("transformers.loss.loss_for_object_detection")
    return module.ImageLoss(module.HungarianMatcher(1.0, 5.0, 2.0), CLASSES, 0.1, ["labels", "boxes"]).double()


def theirs_real_time(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "mal":
        from transformers.loss.loss_deimv2 import Deimv2Loss

        found = Deimv2Loss(transformers.Deimv2Config(num_labels=CLASSES, use_dense_one_to_one=False))
        found.losses = ["mal", "boxes"]
        return found
    from transformers.loss.loss_rt_detr import RTDetrLoss

    return RTDetrLoss(transformers.RTDetrConfig(num_labels=CLASSES))


def theirs_of_groups():
    module = pytest.importorskip("transformers.loss.loss_lw_detr")
    return module.LwDetrImageLoss(module.LwDetrHungarianMatcher(2.0, 5.0, 2.0), CLASSES, 0.25, ["labels", "boxes"], 2)


CRITERIA = {
    "Deformable DETR": (theirs_deformable, "loss_ce", lambda: DetrCriterion(class_coef=1.5)),
    "DETR": (theirs_detr, "loss_ce", lambda: DetrCriterion("cross_entropy", class_coef=1.5, cost_class=1.0)),
    "RT-DETR": (lambda: theirs_real_time("varifocal"), "loss_vfl", lambda: DetrCriterion("varifocal")),
    "DEIMv2": (lambda: theirs_real_time("mal"), "loss_mal", lambda: DetrCriterion("mal")),
    "LW-DETR": (theirs_of_groups, "loss_ce", lambda: DetrCriterion("ia_bce", class_coef=1.5, num_groups=2)),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_as_transformers(name, device):
    make, of_class, ours = CRITERIA[name]
    own, criterion = make(), ours()
    logits, boxes, labels, targets = problem(classes=CLASSES + (name == "DETR"))
    weighted = hasattr(own, "weight_dict")
    coefficients = {of_class: 1.0 if weighted else 1.5, "loss_bbox": 1.0 if weighted else 5.0, "loss_giou": 1.0 if weighted else 2.0}
    if name == "DEIMv2":
        criterion.gamma, criterion.alpha = own.gamma, 1.0 if own.mal_alpha is None else own.mal_alpha
        of_theirs = {key: own.matcher.__dict__[key] for key in ("class_cost", "bbox_cost", "giou_cost")}
        criterion.cost_class, criterion.cost_bbox, criterion.cost_giou = of_theirs.values()
        criterion.class_coef, criterion.bbox_coef, criterion.giou_coef = (
            own.weight_dict[key] for key in ("loss_mal", "loss_bbox", "loss_giou")
        )
    expected = total(own(*dictionaries(logits, boxes, labels, targets)), coefficients)
    of_theirs = gradients(expected, logits, boxes)
    for dtype, limit in ((torch.float64, 1e-6), (torch.float32, 3e-6)):
        given = [t.detach().to(device, dtype).requires_grad_() for t in (logits, boxes)]
        found = criterion(*given, labels.to(device), targets.to(device, dtype), COUNTS)
        for ours_of, theirs_of in zip(found.values(), expected.values(), strict=True):
            assert error(ours_of.cpu(), theirs_of.detach()) < limit
        for ours_of, theirs_of in zip(gradients(found, *given), of_theirs, strict=True):
            assert error(ours_of.cpu(), theirs_of) < limit


def test_denoising_as_rt_detr(device):
    """An image without boxes, background among the denoising queries, and a layer more for the others: the selected queries'."""
    own = theirs_real_time("varifocal")
    logits, boxes, labels, targets = problem()
    x, b, *_ = problem(layers=2, queries=12, seed=1)
    outputs, wanted = dictionaries(logits, boxes, labels, targets)
    places = [torch.tensor([0, 1, 2, 6, 7, 8]), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 1, 6, 7])]
    outputs["dn_auxiliary_outputs"] = [{"logits": x[i], "pred_boxes": b[i]} for i in range(2)]
    outputs["denoising_meta_values"] = {"dn_positive_idx": places, "dn_num_group": 2}
    expected = {"all": sum(own(outputs, wanted).values())}
    of_theirs = gradients(expected, logits, boxes, x, b)
    box = torch.full((3, 12), -1)
    box[0, places[0]], box[2, places[2]] = torch.tensor([0, 1, 2] * 2), torch.tensor([3, 4] * 2)
    for dtype, limit in ((torch.float64, 1e-6), (torch.float32, 3e-6)):
        given = [t.detach().to(device, dtype).requires_grad_() for t in (logits, boxes, x, b)]
        denoising = DenoisingQueries(*given[2:], box.to(device), 2)
        found = DetrCriterion("varifocal")(*given[:2], labels.to(device), targets.to(device, dtype), COUNTS, denoising=denoising)
        assert error(sum(found.values()).cpu(), expected["all"].detach()) < limit
        for ours_of, theirs_of in zip(gradients(found, *given), of_theirs, strict=True):
            assert error(ours_of.cpu(), theirs_of) < limit


@pytest.mark.parametrize("class_loss", ["focal", "cross_entropy"])
def test_factors(class_loss, device):
    """Of layers, of which one is left out; a divisor, a number and a tensor; coefficients of 0; counts as a tensor; one layer alone."""
    given = problem(device, classes=CLASSES + 1, dtype=torch.float32)
    logits, boxes, *rest = given
    alone = [DetrCriterion(class_loss)(logits[i], boxes[i], *rest, COUNTS) for i in range(3)]
    factors = (0.5, 0.0, 2.0)
    counts = torch.tensor(COUNTS, device=device)
    found = DetrCriterion(class_loss, layer_weights=factors).to(device)(*given, counts, normalizer=5 * 1.5)
    twice = DetrCriterion(class_loss, layer_weights=factors).to(device)(*given, counts, normalizer=torch.tensor(7.5, device=device))
    for name, value in found.items():
        expected = sum(w * each[name] for w, each in zip(factors, alone, strict=True))
        expected = expected if (name, class_loss) == ("loss_class", "cross_entropy") else expected / 1.5
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(twice[name], value)
    torch.testing.assert_close(gradients(found, logits, boxes), gradients(twice, logits, boxes))
    assert gradients(found, logits)[0][1].eq(0).all()
    small = DetrCriterion(class_loss)(*given, COUNTS, normalizer=0.2)
    torch.testing.assert_close(small["loss_giou"], DetrCriterion(class_loss)(*given, COUNTS, normalizer=1)["loss_giou"])
    assert list(DetrCriterion(class_loss, class_coef=0.0, giou_coef=0.0)(*given, COUNTS)) == ["loss_bbox"]
    assert list(DetrCriterion(class_loss, bbox_coef=0.0)(*given, COUNTS)) == ["loss_class", "loss_giou"]


def test_factors_of_layers_with_denoising_and_groups(device):
    """The denoising queries have the factors of the last layers, and the divisor of their own groups."""
    given = problem(device, dtype=torch.float32)
    logits, boxes, *rest = given
    x, b, *_ = problem(device, layers=2, queries=6, dtype=torch.float32, seed=1)
    box, factors = torch.randint(-1, 5, (3, 6), device=device), (0.5, 3.0, 2.0)
    found = DetrCriterion(layer_weights=factors, num_groups=2).to(device)(*given, COUNTS, denoising=DenoisingQueries(x, b, box, 3))
    expected = dict.fromkeys(found, 0.0)
    for i, factor in enumerate(factors):
        noisy = DenoisingQueries(x[i - 1 : i], b[i - 1 : i], box, 3) if i else None
        for name, value in DetrCriterion(num_groups=2)(logits[i], boxes[i], *rest, COUNTS, denoising=noisy).items():
            expected[name] += factor * value
    torch.testing.assert_close(found, expected)
    target = torch.cat([rest[1], rest[1][:1]])[box]
    distance = ((b[0] - target).abs().sum(-1) * (box >= 0)).sum() * 5.0 / (5 * 3)
    criterion, denoising = DetrCriterion(num_groups=2), DenoisingQueries(x[:1], b[:1], box, 3)
    without, both = (criterion(logits[0], boxes[0], *rest, COUNTS, denoising=each)["loss_bbox"] for each in (None, denoising))
    torch.testing.assert_close(both - without, distance)


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("class_loss", ["focal", "varifocal", "mal", "ia_bce", "cross_entropy"])
def test_float64_whatever_the_default_dtype(class_loss, default_dtype, device):
    """No count, factor or constant is of float32: with a default of float64 the digits are the same."""
    logits, boxes, labels, targets = problem(device)
    box = torch.tensor([[0, 1, 2] * 2, [-1] * 6, [3, 4, -1] * 2], device=device)
    denoising = None if class_loss == "cross_entropy" else DenoisingQueries(logits[:, :, :6], boxes[:, :, :6], box, 3)
    for counts in (COUNTS, torch.tensor(COUNTS, device=device)):
        found = []
        for dtype in (torch.float32, torch.float64):
            default_dtype(dtype)
            losses = DetrCriterion(class_loss, class_coef=1.5)(logits, boxes, labels, targets, counts, denoising=denoising)
            found.append(torch.cat([t.detach().flatten() for t in (*losses.values(), *gradients(losses, logits, boxes))]))
        torch.testing.assert_close(*found, rtol=1e-14, atol=1e-14)


def test_denoising_places_that_do_not_exist(device):
    """On CPU they raise. Elsewhere, and where the values are not known yet, the loss and gradient of their queries are nan."""
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    box = torch.tensor([[-1, 0, 1], [2, 3, 4], [-2, 5, 14]], device=device)
    criterion, plain = DetrCriterion("varifocal"), torch.compile(DetrCriterion("varifocal"), fullgraph=True, backend="eager")
    counts = torch.tensor(COUNTS, device=device)

    def call(function, box):
        x, b = (t.detach()[:2, :, :3].clone().requires_grad_() for t in (logits, boxes))
        losses = function(logits, boxes, labels, targets, counts, denoising=DenoisingQueries(x, b, box, 2))
        return losses, gradients(losses, x, b)

    torch._dynamo.reset()  # which counts the compiled functions of all tests before
    wrong, found = call(plain, box)
    assert all(value.isnan() for value in wrong.values())
    _, expected = call(criterion, box.where((box >= -1) & (box < 5), -1))
    for ours, right in zip(found, expected, strict=True):
        assert ours[:, 2].isnan().all()
        torch.testing.assert_close(ours[:, :2], right[:, :2])
    if device == "cpu":
        for place, given in ((-2, box), (5, box.clamp(min=-1)), (14, box.where((box != -2) & (box != 5), 0).int())):
            with pytest.raises(IndexError, match=rf"denoising.box must hold -1 to 4, got {place} at row \(2, "):
                call(criterion, given)
        one = DenoisingQueries(logits[:, :1], boxes[:, :1], torch.tensor([[0, -1, 1, 0, 0, 0, 0, 0]]), 1)
        with pytest.raises(IndexError, match=r"denoising.box must hold -1 to 0, got 1 at row \(0, 2\)$"):
            criterion(logits[:, :1], boxes[:, :1], labels[:1], targets[:1], [1], denoising=one)


def test_groups_are_of_training(device):
    given = problem(device, dtype=torch.float32)
    criterion, plain = DetrCriterion(num_groups=2), DetrCriterion()
    expected = plain(*given, COUNTS)
    assert not torch.equal(criterion(*given, COUNTS)["loss_bbox"], expected["loss_bbox"])
    torch.testing.assert_close(criterion.eval()(*given, COUNTS), expected)


@pytest.mark.parametrize("class_loss", ["focal", "varifocal", "cross_entropy"])
def test_a_batch_without_boxes(class_loss, device):
    logits, boxes, labels, targets = problem(device, classes=CLASSES + 1, counts=[0, 0], dtype=torch.float32)
    found = DetrCriterion(class_loss)(logits, boxes, labels, targets, [0, 0])
    assert found["loss_class"] > 0
    assert found["loss_bbox"] == found["loss_giou"] == 0
    assert all(g.isfinite().all() for g in gradients(found, logits, boxes))


@pytest.mark.parametrize("class_loss", ["focal", "varifocal", "mal", "ia_bce", "cross_entropy"])
def test_a_batch_without_images(class_loss, device):
    logits, boxes, labels, targets = problem(device, counts=[1], dtype=torch.float32)
    empty = [t.detach()[:, :0].requires_grad_() for t in (logits, boxes)]
    found = DetrCriterion(class_loss)(*empty, labels[:0], targets[:0], [])
    assert [value.item() for value in found.values()] == [0, 0, 0]
    assert [g.shape for g in gradients(found, *empty)] == [t.shape for t in empty]


def test_half_precision_beside_boxes_in_float32(device):
    """As under autocast; predictions that are nan end no step."""
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    half = logits.detach().bfloat16().requires_grad_()
    found = DetrCriterion("varifocal")(half, boxes, labels, targets, COUNTS)
    wide = half.detach().float().requires_grad_()
    expected = DetrCriterion("varifocal")(wide, boxes, labels, targets, COUNTS)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, half)[0].float(), gradients(expected, wide)[0], rtol=2**-6, atol=1e-4)
    small = [t.detach().bfloat16().requires_grad_() for t in (logits, boxes)]
    gradients(DetrCriterion("varifocal")(*small, labels, targets, COUNTS), *small)
    with torch.no_grad():
        logits[1, 0, :5], boxes[1, 2, 3] = NAN, float("inf")
    for name in ("focal", "varifocal"):
        gradients(DetrCriterion(name)(logits, boxes, labels, targets, COUNTS), logits, boxes)


def test_what_is_not_matched_adds_no_nan(device):
    """Boxes of queries that are background; classes are of any integer dtype."""
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    with torch.no_grad():
        boxes[:, :, 4:] = NAN
    for name in ("focal", "varifocal", "mal", "ia_bce"):
        found = DetrCriterion(name)(logits, boxes, labels.byte(), targets, COUNTS)
        assert all(value.isfinite() for value in found.values())
        assert all(g.isfinite().all() for g in gradients(found, logits, boxes))


INTERPRETER = ("aten.set_", "aten.new_empty", "aten.empty", "aten.copy_")
"""Operations by which Triton's interpreter moves the arguments of a launch."""


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, views too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("class_loss", ["focal", "varifocal", "cross_entropy"])
def test_one_launch_for_all_layers(class_loss, device):
    """Of the costs, the assignment, and each loss; few operations with those of backward, as many for all numbers of layers."""
    of_layers = []
    for layers in (2, 6):
        logits, boxes, labels, targets = problem(device, layers=layers, classes=CLASSES + 1, dtype=torch.float32)
        criterion, counts = DetrCriterion(class_loss), torch.tensor(COUNTS, device=device)
        before = launch_counts()
        with Operations() as operations:
            sum(criterion(logits, boxes, labels, targets, counts).values()).backward()
        names = [name for name in operations.names if not name.startswith(INTERPRETER)]
        of_layers.append(len(names))
        launched = {name: n - before.get(name, 0) for name, n in launch_counts().items() if n != before.get(name, 0)}
        if backend(logits) != "torch":
            assert launched["matching_kernel"] == launched["hungarian_kernel"] == 1
            assert len(names) <= (60 if logits.is_cuda else 79), names  # on a CPU 19 of them check labels and divisors
    assert of_layers[0] == of_layers[1]


def test_compile(device):
    given = problem(device, dtype=torch.float32)
    counts = torch.tensor(COUNTS, device=device)
    criterion = DetrCriterion("varifocal")
    expected = criterion(*given, counts)
    torch._dynamo.reset()  # which counts the compiled functions of all tests before
    compiled = torch.compile(criterion, fullgraph=True, dynamic=True, backend="eager")
    found = compiled(*given, counts)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, *given[:2]), gradients(expected, *given[:2]))
    with plain_torch():
        torch.testing.assert_close(criterion(*given, counts), expected, rtol=1e-5, atol=1e-6)


def test_mistakes(device):
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    good = {"logits": logits, "boxes": boxes, "labels": labels, "target_boxes": targets, "counts": COUNTS}
    box = torch.zeros(3, 8, dtype=torch.int64, device=device)
    denoising = DenoisingQueries(logits, boxes, box, 2)
    for options, changed, kind, message in (
        ({}, {"logits": logits[0, 0]}, ValueError, r"logits must have shape \(L, B, Q, C\) or \(B, Q, C\), got \(8, 4\)"),
        ({}, {"boxes": boxes[0]}, ValueError, r"boxes must have shape \(3, 3, 8, 4\), got \(3, 8, 4\)"),
        ({}, {"counts": [3, 2]}, ValueError, r"counts must hold 3 numbers of at least 0 with the sum 5, got \[3, 2\]"),
        ({}, {"labels": labels[:, None]}, ValueError, r"labels must have shape \(T,\), got \(5, 1\)"),
        ({}, {"labels": labels.tolist()}, TypeError, "labels must be a tensor, got list"),
        ({}, {"labels": labels.float()}, TypeError, "labels must be of an integer dtype, got torch.float32"),
        ({}, {"counts": 3}, TypeError, "counts must be a sequence of numbers, got int"),
        ({}, {"labels": labels[:1], "target_boxes": targets[0]}, ValueError, r"target_boxes must have shape \(1, 4\), got \(4,\)"),
        ({}, {"target_boxes": targets[:4]}, ValueError, r"target_boxes must have shape \(5, 4\), got \(4, 4\)"),
        ({}, {"target_boxes": targets.int()}, TypeError, "target_boxes must be of a floating dtype, got torch.int32"),
        ({"cost_alpha": 2}, {}, ValueError, "cost_alpha must be finite and at least 0 and at most 1, got 2"),
        ({"cost_gamma": -1}, {}, ValueError, "cost_gamma must be finite and at least 0, got -1"),
        ({"cost_giou": "2"}, {}, TypeError, "cost_giou must be a number, got str"),
        ({"layer_weights": 1.0}, {}, TypeError, "layer_weights must be a sequence of numbers, got float"),
        ({"num_groups": 3}, {}, ValueError, r"logits must have queries in num_groups=3 groups of equal size, got \(3, 3, 8, 4\)"),
        ({"layer_weights": [1, 2]}, {}, ValueError, r"layer_weights must have one number for each of 3 layers, got \(2,\)"),
        (
            {},
            {"denoising": denoising._replace(logits=logits[0])},
            ValueError,
            r"denoising.logits must have shape \(at most 3, 3, D, 4\), got",
        ),
        ({}, {"denoising": denoising._replace(boxes=boxes[:1])}, ValueError, r"denoising.boxes must have shape \(3, 3, 8, 4\), got \(1, 3"),
        ({}, {"denoising": denoising._replace(box=box[:1])}, ValueError, r"denoising.box must have shape \(3, 8\), got \(1, 8\)"),
        ({}, {"denoising": denoising._replace(box=box.float())}, TypeError, "denoising.box must be of an integer dtype, got torch.float32"),
        ({}, {"denoising": denoising._replace(groups=0)}, ValueError, "denoising.groups must be at least 1, got 0"),
        (
            {"class_loss": "cross_entropy"},
            {"denoising": denoising},
            ValueError,
            "denoising goes with the losses of a sigmoid, got class_loss=",
        ),
        (
            {"class_loss": "bce"},
            {},
            ValueError,
            "class_loss must be one of 'focal', 'varifocal', 'mal', 'ia_bce', 'cross_entropy', got 'bce'",
        ),
        ({"class_loss": "cross_entropy", "gamma": 2.0}, {}, ValueError, "alpha and gamma belong to the other losses, got one with"),
        ({"num_groups": 0}, {}, ValueError, "num_groups must be at least 1, got 0"),
        ({"giou_coef": -1}, {}, ValueError, "giou_coef must be finite and at least 0, got -1"),
        ({"background_weight": 0}, {}, ValueError, "background_weight must be finite and above 0, got 0"),
    ):
        with pytest.raises(kind, match=message):
            DetrCriterion(**options).to(device)(**{**good, **changed})
    assert repr(DetrCriterion("mal", num_groups=3)) == "DetrCriterion('mal', num_groups=3)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("class_loss", ["focal", "varifocal", "cross_entropy"])
def test_nothing_waits(class_loss, device):
    counts = [30 - i % 5 for i in range(16)]
    logits, boxes, labels, targets = problem(device, 7, 300, 80, counts, torch.float32)
    x, b, *_ = problem(device, 6, 60, 80, counts, torch.float32)
    box = torch.randint(-1, len(labels), (16, 60), device=device)
    more = {} if class_loss == "cross_entropy" else {"denoising": DenoisingQueries(x, b, box, 2)}
    criterion = DetrCriterion(class_loss, layer_weights=[1.0] * 7).to(device)
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            sum(criterion(logits, boxes, labels, targets, counts, **more).values()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0]])
def test_boxes_after_the_sum_of_the_counts_are_padding(counts, device):
    """Of all layers, with denoising queries, in value and gradient: as without the padding."""
    logits, boxes, labels, targets = problem(device, counts=counts, dtype=torch.float32)
    x, b, *_ = problem(device, layers=2, queries=6, counts=counts, dtype=torch.float32, seed=1)
    box = torch.tensor([[0, 1, 2, -1, 0, 2], [-1] * 6, [3, 4, -1, 4, -1, 3]], device=device)
    box = box.where(torch.tensor(sum(counts) > 0, device=device), -1)
    more = torch.cat([labels, labels.new_tensor([3, 0])]), torch.cat([targets, torch.full_like(targets.new_empty(2, 4), 0.5)])
    criterion, results = DetrCriterion("mal"), []
    for given in ((labels, targets), more):
        found = criterion(logits, boxes, *given, torch.tensor(counts, device=device), denoising=DenoisingQueries(x, b, box, 2))
        results.append((found, gradients(found, logits, boxes, x, b)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_targets_for_losses_of_ones_own(device):
    """The focal loss of the rows that match returns is forward's, and each layer's queries of an image have its boxes once."""
    logits, boxes, labels, targets = problem(device, dtype=torch.float32)
    criterion = DetrCriterion(class_coef=1.0)
    found = criterion.match(logits, boxes, labels, targets, COUNTS)
    loss = sigmoid_focal_loss(logits.flatten(0, 2), found.labels, reduction="sum", normalizer=sum(COUNTS))
    torch.testing.assert_close(loss, criterion(logits, boxes, labels, targets, COUNTS)["loss_class"], rtol=0, atol=0)
    rows = found.labels.view(3, 3, 8)
    assert found.weight is None
    assert found.matched.equal(found.labels >= 0)
    for image, wanted in enumerate(labels.split(COUNTS)):
        for layer in range(3):
            assert sorted(rows[layer, image][rows[layer, image] >= 0].tolist()) == sorted(wanted.tolist())
    nearest = (found.boxes[found.matched][:, None] == targets).all(-1)
    assert nearest.sum(1).eq(1).all()
    assert labels[nearest.float().argmax(1)].equal(found.labels[found.matched])

"""Plans: that a launch started directly is the one Triton would start, whatever the tensors' memory and the arguments."""

import itertools

import pytest
import torch
import torchvision.ops
import triton
from triton.runtime.jit import compute_cache_key

from lossforge.kernels import launch_counts, scale_
from lossforge.kernels.box import launch as box
from lossforge.kernels.call import BoxCall, ElementCall, Formulas, RowCall
from lossforge.kernels.element import launch as element
from lossforge.kernels.engine import launch
from lossforge.kernels.engine.launch import Plan, Recording, Slot, filler, workspace
from lossforge.kernels.engine.reduce import Counting, count
from lossforge.kernels.formulas.box import giou
from lossforge.kernels.formulas.focal import focal
from lossforge.kernels.formulas.l1 import l1
from lossforge.kernels.formulas.softmax import cross_entropy
from lossforge.kernels.row import launch as row
from lossforge.kernels.tiles import backward_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_filler():
    fixed = torch.float32, "name"
    arguments = (Slot(1), (Slot(0), 7, None), fixed, (Slot(2),), (), 2**40, True)
    assert filler(arguments)(("a", "b", 0.5)) == ("b", ("a", 7, None), fixed, (0.5,), (), 2**40, True)


@pytest.mark.parametrize("classes", [1, 64, 50257, 4_194_305, 2**28 + 1, 2**30])
def test_backward_grid_fits_its_second_axis(classes):
    for shift, adjacent in ((1, False), (8, False), (1, True)):
        assert triton.cdiv(classes + shift - 1, backward_tiles(classes, shift, adjacent).classes) <= 65535


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


def offset(t, elements):
    """A copy of `t` that begins `elements` after an aligned address."""
    memory = torch.empty(t.numel() + elements, dtype=t.dtype, device=t.device)
    return memory[elements:].view(t.shape).copy_(t)


CROSS_ENTROPY = Formulas(cross_entropy)


def l1_sum(x, y):
    """A sum by the element-wise template."""
    return element.forward(ElementCall("l1", x, y), Formulas(l1), [None], False)[0]


SIZES = (1, 2, 15, 16, 17, 32, 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rowwise_over_sizes_and_alignment(launches, dtype, shift):
    """Each twice: first through Triton, then directly; rows, classes, strides, target dtype, weights and hyper-parameters vary."""
    torch.manual_seed(0)
    for rows, classes in [(1, 16), (16, 1), (17, 17), (16, 16)]:
        x = torch.randn(rows, classes, device=DEVICE).to(dtype)
        index = torch.randint(0, classes, (rows,), device=DEVICE)
        weight = torch.rand(classes, device=DEVICE)
        layouts = (
            x,
            torch.randn(rows, 2 * classes, device=DEVICE).to(dtype)[:, ::2],
            torch.randn(classes, rows, device=DEVICE).to(dtype).t(),
        )
        for turn, logits in [*enumerate((*layouts, *layouts))] * 2:
            a = offset(logits, shift) if logits.is_contiguous() else logits
            target = offset(index if turn % 2 else index.int(), shift)
            w = offset(weight, shift) if turn % 3 else None
            smoothing = 0.1 + turn / 100 if turn % 2 else 0.0
            call = RowCall("ce", a, target, weight=w, label_smoothing=smoothing, ignore_index=-100 - turn % 2)
            gradient = torch.full_like(a, float("nan"))
            value, *_, stats = row.forward(call, CROSS_ENTROPY, [gradient], True)
            wide = logits.double().requires_grad_()
            expected = torch.nn.functional.cross_entropy(
                wide, index, None if w is None else weight.double(), reduction="sum", label_smoothing=smoothing
            )
            expected.backward()
            torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
            back = torch.full_like(a, float("nan"))
            one = torch.full((), 1.0, device=DEVICE)
            row.backward(call, CROSS_ENTROPY, (None, stats, None), (one, None, None, None), [back])
            torch.testing.assert_close(back, gradient, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-5)
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_elementwise_over_sizes_and_alignment(launches, shift):
    torch.manual_seed(0)
    for n in SIZES:
        x, y = torch.randn(n, device=DEVICE), torch.rand(n, device=DEVICE)
        for gamma in (2.0, 1.0, 0.5, 2.0):
            a, b, g = offset(x, shift), offset(y, shift if n % 2 else 0), offset(x, shift)
            value, _ = element.forward(ElementCall("focal", a, b, hyper=[gamma, 0.25]), Formulas(focal), [g], False)
            p = x.double().sigmoid()
            p_t = p * y + (1 - p) * (1 - y)
            entropy = torch.nn.functional.binary_cross_entropy_with_logits(x.double(), y.double(), reduction="none")
            expected = ((0.25 * y + 0.75 * (1 - y)) * (1 - p_t) ** gamma * entropy).sum()
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
            assert g.isfinite().all()
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_boxes_over_sizes_and_alignment(launches, shift):
    """Whole tiles, the rest of one, and vectors of four that begin anywhere; in half precision a lane has two pairs."""
    torch.manual_seed(0)
    for n, dtype in itertools.product((1, 2, 127, 128, 129, 300), (torch.float32, torch.bfloat16)):
        low = torch.rand(2, n, 2, device=DEVICE) * 8
        sides = torch.rand(2, n, 2, device=DEVICE) * 8 + 1
        a, b = torch.cat([low, low + sides], 2).to(dtype)
        g1, g2 = (offset(torch.full((4 * n,), float("nan"), device=DEVICE, dtype=dtype), shift).view(n, 4) for _ in range(2))
        wide = [t.double().requires_grad_() for t in (a, b)]
        expected = torchvision.ops.generalized_box_iou_loss(*wide, reduction="sum", eps=0.0)
        expected.backward()
        a, b = (offset(t.reshape(-1), shift).view(n, 4) for t in (a, b))
        for _ in range(2):
            (value,) = box.forward(BoxCall("giou", a, b, hyper=[1e-7]), Formulas(giou), [g1, g2], False)
            torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            for g, leaf in zip((g1, g2), wide, strict=True):
                torch.testing.assert_close(g.double(), leaf.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)


def test_elementwise_over_strides_and_dtypes(launches):
    """The second operand takes other strides and dtypes under one formula; each pair twice."""
    base = torch.arange(48.0, device=DEVICE).view(6, 8)
    x = torch.zeros(6, 8, device=DEVICE)
    for _ in range(2):
        for y in (base, base.t().contiguous().t(), base[:, :1].expand(6, 8), base.bfloat16(), base.half(), base.flip(0)):
            assert l1_sum(x, y) == y.float().sum()
        for index in (torch.arange(6, device=DEVICE), torch.arange(6, device=DEVICE).int(), torch.arange(12, device=DEVICE)[::2] // 2):
            assert l1_sum(base, index) == (base - torch.nn.functional.one_hot(index.long(), 8)).abs().sum()


def test_count_and_scale(launches):
    for n in (1, 16, 17, 4096, 5000):
        for dtype in (torch.int64, torch.int32):
            for shift in (0, 1):
                target = offset(torch.zeros(n, dtype=dtype, device=DEVICE), shift)
                assert count(Counting(target, None, None, None, 3, -100, 1.0)) == n
                assert count(Counting(target, None, None, None, 3, 0, 1.0)) == 0
        for factor in (torch.full((), 3.0, device=DEVICE), torch.full((), 3.0, device=DEVICE).bfloat16()):
            x = torch.ones(n, device=DEVICE)
            scale_(x, factor)
            assert (x == 3).all()


def test_plans_are_bounded(monkeypatch):
    """Shapes may vary without end; the first made go first."""
    monkeypatch.setattr(launch, "PLANS", 3)
    monkeypatch.setattr(launch, "_plans", {})
    for n in (1, 2, 3, 4, 5, 4, 3):
        assert l1_sum(torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE)) == n
        assert len(launch._plans) <= 3
    assert [plan.arguments[10] for plan in launch._plans.values()] == [3, 4, 5]


def test_a_call_that_repeats_looks_nothing_up(monkeypatch):
    x, y = torch.ones(7, device=DEVICE), torch.zeros(7, device=DEVICE)
    for reduction, exact in (("sum", 14.0), ("none", 2.0)):
        known, gradient = {}, torch.empty_like(x)
        call = ElementCall("l1", x, y, reduction=reduction)
        with Recording(known, "forward", (*call[1:10], gradient)) as recording:
            recording.results = element.forward(call, Formulas(l1), [gradient], False)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "planned", None)
            again = torch.empty_like(x)
            value, divisor = known["forward"]((2 * x, *call[2:10], again))
        assert (value == exact).all()
        assert divisor is None
        assert (again == 1).all()


def test_a_call_that_is_more_than_launches_is_not_replayed():
    """Here copies, whose place no later call could fill."""
    x = torch.ones(3, 4, 5, 6, 8, device=DEVICE)[::2, ::2, ::2, ::2, ::2]
    known, call = {}, ElementCall("l1", x, torch.zeros_like(x).contiguous())
    with Recording(known, "forward", (*call[1:10], None)) as recording:
        recording.results = element.forward(call, Formulas(l1), [None], False)
    assert recording.results[0] == x.numel()
    assert known == {"forward": None}


@GPU
def test_launch_hooks_are_called():
    """A profiler that hooks Triton's launches sees every one of ours, those of a plan already started too."""
    x = torch.ones(2**21, device="cuda")
    factor = torch.full((), 2.0, device="cuda")
    scale_(x, factor)
    scale_(x, factor)
    names = []
    hook = triton.knobs.runtime.launch_enter_hook
    see = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    hook.add(see)
    try:
        scale_(x, factor)
    finally:
        hook.remove(see)
    scale_(x, factor)
    assert names == ["scale_kernel"]
    assert (x == 16).all()


@GPU
def test_nothing_is_compiled_twice():
    """Over row counts and hyper-parameters new plans find Triton's compiled kernels."""
    from lossforge.kernels.element.kernel import elementwise_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in elementwise_kernel.device_caches.values())

    def step(n: int, gamma: float) -> None:
        x = torch.randn(n, 48, device="cuda")
        element.forward(ElementCall("focal", x, x, hyper=[gamma, 0.25]), Formulas(focal), [None], False)

    step(64, 2.0)
    before = compiled()
    for i in range(5):
        step(80 + 16 * i, 1.0 + i / 3)
    assert compiled() == before


@GPU
def test_streams_have_their_own_workspace():
    device = torch.device("cuda", torch.cuda.current_device())
    here = workspace(4, device)
    assert workspace(7, device) is here
    assert workspace(4, device, second=True) is not here
    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace(4, device) is not here


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_two_devices(launches, current):
    """One plan a device, and the kernel of that device, whichever is current."""
    for _ in range(2):
        for device in ("cuda:0", "cuda:1"):
            with torch.cuda.device(current):
                x = torch.full((64,), 2.0, device=device)
                scale_(x, torch.full((), 3.0, device=device))
                assert l1_sum(x, torch.zeros_like(x)) == 6 * 64
    assert {device for device, _ in launches} == {0, 1}


def test_launches_are_counted_whichever_way_they_start():
    before = launch_counts().get("scale_kernel", 0)
    x = torch.ones(2**20 + 3, device=DEVICE)
    for _ in range(3):
        scale_(x, torch.ones((), device=DEVICE))
    assert launch_counts()["scale_kernel"] == before + 3


@GPU
def test_a_factor_on_another_device_is_refused():
    with pytest.raises(ValueError, match="factor must be on the device of x"):
        scale_(torch.ones(3, device="cuda"), torch.ones(()))

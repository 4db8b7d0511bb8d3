"""Plans: that a launch started directly is the one Triton would start, whatever the tensors' memory and the arguments."""

import weakref

import pytest
import torch
import triton

from lossforge.kernels import launch_counts, plans, scale_
from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.kernels.elements.elementwise import launch as element
from lossforge.kernels.engine.launch import Slot, filler, workspace
from lossforge.kernels.engine.reduce import count
from lossforge.kernels.formulas.binary.focal import focal
from lossforge.kernels.formulas.regression import l1
from lossforge.kernels.plans import PLANS, applied, by_plan, call_key, computed, layouts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_filler():
    fixed = torch.float32, "name"
    arguments = (Slot(1), (Slot(0), 7, None), fixed, (Slot(2),), (), 2**40, True, Formulas(l1))
    for named in (False, True):
        found = filler(arguments, named)(("a", "b", 0.5))
        assert found == ("b", ("a", 7, None), fixed, (0.5,), (), 2**40, True, Formulas(l1))
        assert isinstance(found[-1], Formulas) == named


def scale(x, factor):
    by_plan(("scale", *layouts((factor, x))), (factor, x), scale_, lambda: (factor, x))


def l1_call(x, y, gradient=None, **others):
    """The element-wise template's results, by a plan."""
    call = ElementwiseCall("l1", x, y, **others)
    key = call_key("elementwise", "l1", call[1:10], call[10:])
    return by_plan(key, (*call[1:10], gradient), element.forward, lambda: (call, Formulas(l1), [gradient], False))


def l1_sum(x, y):
    return l1_call(x, y)[0]


def test_count_and_scale(launches, offset):
    for n in (1, 16, 17, 4096, 5000):
        for dtype in (torch.int64, torch.int32):
            for shift in (0, 1):
                target = offset(torch.zeros(n, dtype=dtype, device=DEVICE), shift)
                assert count(target, 3, -100) == n
                assert count(target, 3, 0) == 0
        for factor in (torch.full((), 3.0, device=DEVICE), torch.full((), 3.0, device=DEVICE).bfloat16()):
            x = torch.ones(n, device=DEVICE)
            scale(x, factor)
            assert (x == 3).all()


def test_a_key_says_what_triton_specialises_on():
    """Of a tensor its alignment, too, but not its address."""
    memory = torch.zeros(64, device=DEVICE)
    x = memory[:16]
    assert call_key("mse", "f", [x], [1.0]) == call_key("mse", "f", [memory[32:48]], [1.0])
    others = (memory[1:17], memory[:15], memory[:32:2], x.to(torch.float16), x.view(4, 4), None)
    keys = {call_key("mse", "f", [each], [1.0]) for each in (x, *others)}
    keys |= {call_key("mse", "f", [x], [2.0]), call_key("mse", "g", [x], [1.0]), call_key("l1", "f", [x], [1.0])}
    assert len(keys) == 10


def test_plans_are_bounded(monkeypatch):
    """Shapes may vary without end; the first made go first."""
    monkeypatch.setattr(plans, "MOST_PLANS", 3)
    PLANS.clear()
    for n in (1, 2, 3, 4, 5, 4, 3):
        assert l1_sum(torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE)) == n
        assert len(PLANS) <= 3
    assert [key[2][0] for key in PLANS] == [(3,), (4,), (5,)]


def test_an_equal_call_makes_its_launches_again(monkeypatch):
    x, y = torch.ones(7, device=DEVICE), torch.zeros(7, device=DEVICE)
    for reduction, exact in (("sum", 14.0), ("none", 2.0)):
        PLANS.clear()
        l1_call(x, y, torch.empty_like(x), reduction=reduction)
        with monkeypatch.context() as patch:
            patch.setattr(element, "forward", None)
            again = torch.empty_like(x)
            value, divisor = l1_call(2 * x, y, again, reduction=reduction)
        assert (value == exact).all()
        assert divisor is None
        assert (again == 1).all()


def test_a_call_that_is_more_than_launches_is_not_replayed():
    """Here copies, whose place no later call could fill."""
    x = torch.ones(3, 4, 5, 6, 8, device=DEVICE)[::2, ::2, ::2, ::2, ::2]
    PLANS.clear()
    for _ in range(2):
        assert l1_sum(x, torch.zeros_like(x).contiguous()) == x.numel()
    assert [*PLANS.values()] == [None]


def test_a_plan_forgets_a_tensor_after_the_last_step_that_takes_it():
    made, alive = [], []

    def doubled(t):
        found = 2 * t
        made.append(weakref.ref(found))
        return found

    def function(t):
        found = computed(doubled, computed(doubled, t))
        applied(lambda _: alive.append([each() is not None for each in made[-2:]]), found)
        return (found,)

    for x in (torch.ones(3), torch.full((3,), 2.0)):
        (found,) = by_plan(("forgets",), (x,), function, lambda x=x: (x,))
        assert found.equal(4 * x)
    assert alive[-1] == [False, True]


def test_launches_of_a_plan_are_a_part_of_the_one_around_it():
    """Also where the inner ones have a plan already: those of the outer one make them again."""
    PLANS.clear()

    def doubled_twice(x, factor):
        scale(x, factor)
        scale(x, factor)

    factor = torch.full((), 2.0, device=DEVICE)
    scale(torch.ones(7, device=DEVICE), factor)
    for _ in range(3):
        x = torch.ones(7, device=DEVICE)
        by_plan(("twice", *layouts((x, factor))), (x, factor), doubled_twice, lambda x=x: (x, factor))
        assert (x == 4).all()


def test_one_tensor_as_two_is_not_replayed():
    """Which of them a launch takes would follow from their being the same."""
    x = torch.ones(7, device=DEVICE)
    PLANS.clear()
    assert l1_sum(x, x) == 0
    assert l1_sum(x, 3 * x) == 14


@GPU
def test_launch_hooks_are_called():
    """A profiler that hooks Triton's launches sees every one of ours, those of a plan already started too."""
    x = torch.ones(2**21, device="cuda")
    factor = torch.full((), 2.0, device="cuda")
    scale(x, factor)
    scale(x, factor)
    names = []
    hook = triton.knobs.runtime.launch_enter_hook
    see = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    hook.add(see)
    try:
        scale(x, factor)
    finally:
        hook.remove(see)
    scale(x, factor)
    assert names == ["scale_kernel"]
    assert (x == 16).all()


@GPU
def test_nothing_is_compiled_twice():
    """Over row counts and hyper-parameters new plans find Triton's compiled kernels."""
    from lossforge.kernels.elements.elementwise.kernel import elementwise_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in elementwise_kernel.device_caches.values())

    def step(n: int, gamma: float) -> None:
        x = torch.randn(n, 48, device="cuda")
        element.forward(ElementwiseCall("focal", x, x, hyper=[gamma, 0.25]), Formulas(focal), [None], False)

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
                scale(x, torch.full((), 3.0, device=device))
                assert l1_sum(x, torch.zeros_like(x)) == 6 * 64
    assert {device for device, _ in launches} == {0, 1}


def test_launches_are_counted_whichever_way_they_start():
    before = launch_counts().get("scale_kernel", 0)
    x = torch.ones(2**20 + 3, device=DEVICE)
    for _ in range(3):
        scale(x, torch.ones((), device=DEVICE))
    assert launch_counts()["scale_kernel"] == before + 3


@GPU
def test_a_factor_on_another_device_is_refused():
    with pytest.raises(ValueError, match="factor must be on the device of the tensors"):
        scale_(torch.ones(()), torch.ones(3, device="cuda"))

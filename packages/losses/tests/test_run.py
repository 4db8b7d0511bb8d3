"""Plain calls pass by the dispatcher, and repeated ones by their checks: each case in which they must not, after calls that were kept."""

import contextlib

import pytest
import torch
from loss_calls import Operators
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from lossforge import losses as L
from lossforge.kernels import INTERPRETED, plans
from lossforge.kernels.plans import PLANS
from lossforge.losses.base import checks, state
from lossforge.losses.engine import calls as run
from lossforge.losses.testing import error


def focal(x, y):
    return L.sigmoid_focal_loss(x, y, reduction="mean")


def giou(x, y):
    return L.generalized_box_iou_loss(x, y, "mean")


KEPT = (focal, L.cross_entropy, L.l1_loss, L.binary_cross_entropy_with_logits, L.dice_loss, L.kl_div_with_logits, giou)
OPERATORS = {L.cross_entropy: "rowwise", L.dice_loss: "overlap", L.kl_div_with_logits: "divergence", giou: "boxes"}
LOSSES = pytest.mark.parametrize("loss", KEPT, ids=lambda f: f.__name__)


def tensors(loss, device):
    """Return logits and dense targets, or pairs of boxes."""
    if loss is giou:
        low, sides = torch.rand(2, 6, 2, device=device), torch.rand(2, 6, 2, device=device) + 0.1
        return torch.cat([low, low + sides], 2).unbind()
    return torch.randn(6, 5, device=device), torch.rand(6, 5, device=device).softmax(1)


@pytest.fixture
def pair(device, request):
    """Tensors of a shape of which the test's loss, or every loss of logits here, has kept a call, with gradient and without."""
    case = getattr(request.node, "callspec", None)
    losses = [case.params["loss"]] if case else KEPT[:-1]
    x, y = tensors(losses[0], device)
    x.requires_grad_()
    for loss in losses:
        for _ in range(2):
            loss(x, y).backward()
            loss(x.detach(), y)
            with torch.no_grad():
                loss(x, y)
    x.grad = None
    return x, y


def kept_calls():
    return [plan for plan in PLANS.values() if isinstance(plan, run.CallPlan)]


def expected(loss, x, y, upstream=1.0):
    wide = x.detach().double().requires_grad_()
    with L.plain_torch():
        value = loss(wide, y.double())
    (gradient,) = torch.autograd.grad(value * upstream, wide)
    return value.detach(), gradient


@LOSSES
def test_kept_calls_are_right(loss, pair, paths):
    """New values, any upstream, a retained graph, no grad, and twice differentiated."""
    _, y = pair
    for upstream in (1.0, 3.0):
        logits = tensors(loss, y.device)[0].requires_grad_()
        value = loss(logits, y)
        exact, gradient = expected(loss, logits, y, upstream)
        assert error(value, exact) < 3e-6
        for _ in range(3):
            (g,) = torch.autograd.grad(value, logits, torch.full_like(value, upstream), retain_graph=True)
            assert error(g, gradient) < 3e-6
            g.zero_()
        with torch.no_grad():
            assert torch.equal(loss(logits, y), value)
        (g,) = torch.autograd.grad(loss(logits, y), logits, create_graph=True)
        (twice,) = torch.autograd.grad(g.square().sum(), logits)
        wide = logits.detach().double().requires_grad_()
        with L.plain_torch():
            (g,) = torch.autograd.grad(loss(wide, y.double()), wide, create_graph=True)
        (exact_twice,) = torch.autograd.grad(g.square().sum(), wide)
        assert error(twice, exact_twice) < 1e-5
    assert set(paths) == {"kept"}


def test_indices_are_kept_only_where_their_values_are_not_checked(device, paths):
    PLANS.clear()
    x = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 4, 0], device=device)
    for _ in range(2):
        L.cross_entropy(x, target)
    assert paths == ["direct", "kept" if device == "cuda" else "direct"]
    with pytest.raises(IndexError, match="target must hold 0 to 4"):
        L.cross_entropy(x, target + 1, validate=True)


@LOSSES
def test_tensors_and_arguments_that_change(loss, pair, device):
    """Of the same call: alignment, strides, dtype, requires_grad, shape; what fits no kept call is computed anew."""
    x, y = (t.detach() for t in pair)
    padded = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    for logits in (padded, x.t().contiguous().t(), x.bfloat16(), x.repeat_interleave(2, 1)[:, ::2]):
        for target in (y, y.t().contiguous().t()):
            for _ in range(2):
                leaf = logits.detach().requires_grad_()
                value = loss(leaf, target)
                value.backward()
                exact, gradient = expected(loss, leaf, target)
                assert error(value, exact) < 3e-6
                assert error(leaf.grad, gradient) < (2.0**-7 if leaf.dtype == torch.bfloat16 else 3e-6)
    assert not loss(x, y).requires_grad
    with pytest.raises((ValueError, RuntimeError)):
        loss(x, y[:, :-1])


def test_layouts_that_no_kernel_addresses(device):
    """Four dimensions that none of can be joined: copied at each call, the gradient copied back, a weight that broadcasts as well."""
    weight = torch.rand(3, 1, 3, 1, device=device)
    for _ in range(3):
        x, y = (torch.rand(6, 6, 6, 6, device=device)[::2, ::2, ::2, ::2] for _ in range(2))
        x.requires_grad_()
        value = L.binary_cross_entropy_with_logits(x, y, weight)
        wide = x.detach().double().requires_grad_()
        exact = torch.nn.functional.binary_cross_entropy_with_logits(wide, y.double(), weight.double())
        assert error(value, exact) < 3e-6
        assert error(*(torch.autograd.grad(2 * v, t)[0] for v, t in ((value, x), (exact, wide)))) < 3e-6


def test_one_tensor_as_two_arguments(device, paths):
    """Which argument a tensor is follows from its place, not from being the same."""
    x = torch.randn(6, 7, device=device)
    for _ in range(2):
        assert L.l1_loss(x, x) == 0
    assert L.l1_loss(x, x + 1) > 0.99
    assert paths == ["direct"] * 3


def test_hyper_parameters_and_their_types(pair):
    x, y = pair
    values = {L.cross_entropy(x, y, label_smoothing=s).item() for s in (0.0, 0.1, 0.2, 0.1, 1)}
    assert len(values) == 4
    for one in (1, True, torch.tensor(1), 1.0):
        assert L.cross_entropy(x, y, label_smoothing=one).item() == L.cross_entropy(x, y, label_smoothing=1).item()
    for _ in range(2):
        with pytest.raises(TypeError, match="label_smoothing must be a number, got str"):
            L.cross_entropy(x, y, label_smoothing="1")


def test_a_refused_type_is_refused_after_equal_values_were_kept(pair):
    x, y = pair
    for _ in range(2):
        L.cross_entropy(x, y, inplace=False)
    with pytest.raises(TypeError, match="inplace must be True or False, got int"):
        L.cross_entropy(x, y, inplace=0)


def test_changed_logits_are_noticed(pair):
    x, y = pair
    logits = x * 1
    value = focal(logits, y)
    value.backward(retain_graph=True)
    logits.detach_().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_plans_are_bounded(device, monkeypatch):
    """Of calls and their launches; the first made go first."""
    monkeypatch.setattr(plans, "MOST_PLANS", 4)
    PLANS.clear()
    for n in range(1, 12):
        x = torch.randn(n, device=device)
        for _ in range(2):
            assert error(L.l1_loss(x, x + 2), torch.tensor(2.0, device=device)) < 1e-6
        assert len(PLANS) <= 4


@LOSSES
def test_modes_see_the_operator(loss, pair, paths):
    """Backward too: a graph made outside the mode launches on plain tensors; one made inside shows what its second backward launches."""
    x, y = pair
    name = OPERATORS.get(loss, "elementwise")
    with Operators() as operators:
        value = loss(x, y)
        torch.autograd.grad(value, x, retain_graph=True)
        torch.autograd.grad(value, x)
    assert operators.names == [name, name]
    assert not paths

    class Functions(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen += "lossforge" in str(function)
            return function(*args, **(kwargs or {}))

    with Functions() as functions:
        loss(x, y)
    assert functions.seen == 1
    assert not paths


@LOSSES
def test_fake_tensors(loss, pair, paths):
    x, y = pair
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        a, b = mode.from_tensor(x), mode.from_tensor(y)
        value = loss(a, b)
        assert isinstance(value, FakeTensor)
        value.backward()
        assert isinstance(loss(x.detach(), y), FakeTensor)
    assert a.grad.shape == x.shape
    assert isinstance(loss(a.detach(), b), FakeTensor)
    assert not paths


@LOSSES
def test_subclasses(loss, pair, paths):
    """A subclass is asked, and a parameter is not one."""

    class Asked(Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen += "lossforge" in str(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    x, y = pair
    assert type(loss(x.detach().as_subclass(Asked), y)) is Asked
    assert Asked.seen == 1
    assert not paths
    loss(torch.nn.Parameter(x.detach()), y).backward()
    assert paths == ["kept"]


@LOSSES
def test_transforms(loss, pair, paths):
    x, y = pair
    x = x.detach()
    exact, gradient = expected(loss, x, y)
    assert error(torch.func.grad(loss)(x, y), gradient) < 3e-6
    stacked = torch.stack([x, 2 * x])
    values = torch.func.vmap(loss, in_dims=(0, None))(stacked, y)
    assert error(values[0], exact) < 3e-6
    direction = torch.rand_like(x)
    _, slope = torch.func.jvp(lambda x: loss(x, y), (x,), (direction,))
    assert error(slope, (gradient * direction).sum()) < 1e-5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual, y)).tangent
    assert error(tangent, (gradient * direction).sum()) < 1e-5
    assert not paths
    upstreams, leaf = torch.tensor([1.0, -2.0, 0.5], device=x.device), x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(leaf, y), leaf, upstreams, is_grads_batched=True)
    assert error(g, upstreams.double().view(3, 1, 1) * gradient) < 3e-6


@LOSSES
def test_tracers(loss, pair, paths):
    x, y = pair
    x = x.detach()
    name = OPERATORS.get(loss, "elementwise")
    assert f"lossforge.{name}" in make_fx(lambda x, y: loss(x, y))(x, y).code
    if name not in ("rowwise", "divergence"):  # torch.jit.trace takes no list of bool, which these have
        assert f"lossforge::{name}" in str(torch.jit.trace(lambda x, y: loss(x, y), (x, y), check_trace=False).graph)
    graphs = []
    torch._dynamo.reset()
    torch.compile(loss, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph)(x, y)
    assert f"lossforge.{name}" in graphs[0]

    class Model(torch.nn.Module):
        def forward(self, x, y):
            return loss(x, y)

    assert f"lossforge.{name}" in torch.export.export(Model(), (x, y)).graph_module.code
    assert not paths


@LOSSES
def test_lazy_negation(loss, pair):
    """The memory of such a view holds the values with the other sign."""
    x, y = pair
    view = torch.complex(torch.zeros_like(x), x.detach()).conj().imag
    assert view.is_neg()
    exact, _ = expected(loss, -x, y)
    for _ in range(2):
        assert error(loss(view, y), exact) < 3e-6
    one = torch.complex(torch.zeros((), device=x.device), torch.ones((), device=x.device)).conj().imag
    (g,) = torch.autograd.grad(loss(x, y), x, one)
    assert error(g, expected(loss, x, y, -1.0)[1]) < 3e-6


@LOSSES
def test_inference_mode_autocast_and_plain_torch(loss, pair, paths, device):
    x, y = pair
    exact, gradient = expected(loss, x, y)
    with torch.inference_mode():
        assert error(loss(x, y), exact) < 3e-6
    with L.plain_torch():
        assert error(loss(x, y), exact) < 3e-6
    assert not paths
    with torch.autocast(device, torch.bfloat16):
        value = loss(x, y)
    assert value.dtype == torch.float32
    assert error(torch.autograd.grad(value, x)[0], gradient) < 3e-6
    assert paths == ["kept"]


def test_below_autograd(pair, paths):
    """Inside an operator's implementation nothing is differentiated."""
    x, y = pair
    with torch._C._AutoDispatchBelowAutograd():
        assert not state.plain(x)
        assert not focal(x, y).requires_grad
    assert not paths


def test_distributed_tensors_raise(pair):
    if torch.distributed.is_initialized():
        pytest.skip("a process group exists already")
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, y = (distribute_tensor(t.detach(), mesh, [Replicate()]) for t in pair)
        with pytest.raises(TypeError, match="got a DTensor"):
            focal(x, y)
    finally:
        torch.distributed.destroy_process_group()


def test_validation_from_the_environment_keeps_nothing(pair, paths, monkeypatch):
    monkeypatch.setattr(checks, "VALIDATE", True)
    focal(*pair)
    assert paths == ["direct"]


def test_a_half_gradient_is_multiplied_by_a_scalers_factor(device):
    """65536, at which a gradient scaler starts, is inf in float16: the factor must not be rounded to it."""
    x = torch.randn(64, 10, device=device, dtype=torch.float16, requires_grad=True)
    target = torch.arange(64, device=device) % 10
    (L.cross_entropy(x, target, gradient="forward") * 65536).backward()
    wide = x.detach().double().requires_grad_()
    (torch.nn.functional.cross_entropy(wide, target) * 65536).backward()
    assert error(x.grad, wide.grad) < 2e-3


def test_weighted_means_repeat_bitwise_without_a_gradient(device):
    x, weight = torch.randn(1000, 20, device=device), torch.rand(20, device=device)
    target = torch.arange(1000, device=device) % 20
    with torch.no_grad():
        first, *others = (L.cross_entropy(x, target, weight) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


MODES = {
    "none": {"reduction": "none"},
    "backward": {"gradient": "backward"},
    "in place": {"inplace": True},
    "in place, backward": {"inplace": True, "gradient": "backward"},
    "outputs": {"outputs": ("z_loss", "lse", "entropy"), "z_loss": 0.1},
}


@pytest.mark.parametrize("summed", [False, True], ids=("each", "summed"))
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_every_mode_is_replayed(options, summed, paths, device):
    """From the third call on, with other values and what arrives at all results, from a sum too, whose gradient is one number for all."""
    if L.backend(torch.zeros(1, device=device)) == "torch":
        pytest.skip("the reference keeps no calls")
    PLANS.clear()
    for i in range(4):
        leaf = torch.randn(6 + summed, 5, device=device, requires_grad=True)
        y = torch.rand(6 + summed, 5, device=device).softmax(1)
        x = leaf * 1.0
        found = L.cross_entropy(x, y, **options)
        found = (found,) if isinstance(found, Tensor) else [t for t in found if t is not None]
        arriving = [torch.rand((), device=device).expand(t.shape) if summed and k < 1 else torch.rand_like(t) for k, t in enumerate(found)]
        (gradient,) = torch.autograd.grad(found, leaf, arriving)
        exact = leaf.detach().double().requires_grad_()
        with L.plain_torch():
            expected = L.cross_entropy(exact, y.double(), **{**options, "inplace": False})
        expected = (expected,) if isinstance(expected, Tensor) else [t for t in expected if t is not None]
        (expected_gradient,) = torch.autograd.grad(expected, exact, [t.double() for t in arriving])
        for a, b in zip(found, expected, strict=True):
            assert error(a, b) < 3e-6
        assert error(gradient, expected_gradient) < 5e-6, i
    assert paths == ["direct", "kept", "kept", "kept"]


@pytest.fixture
def recordings(monkeypatch):
    """The keys under which launches are recorded, in order."""
    if L.backend(torch.zeros(1)) == "torch" and not torch.cuda.is_available():
        pytest.skip("the reference launches nothing")
    seen, keep = [], type(PLANS).keep

    def watched(self, key, plan):
        seen.append(key)
        keep(self, key, plan)

    monkeypatch.setattr(type(PLANS), "keep", watched)
    PLANS.clear()
    return seen


@LOSSES
@pytest.mark.parametrize("grad", [False, True])
def test_a_second_call_records_nothing(loss, grad, recordings, device):
    """The first one's launches are those of all equal calls, whether its plan was found under the call or under what is kept of it."""
    for repeat in range(3):
        x, y = tensors(loss, device)
        value = loss(x.clone().requires_grad_(grad), y.clone())
        if grad:
            value.backward()
        assert bool(recordings) == (repeat == 0)
        recordings.clear()


def test_calls_on_the_cpu_are_kept_where_more_than_the_reference_computes_them(monkeypatch):
    """A layer's logits are computed by chunks there, too."""
    PLANS.clear()
    x, y, weight = torch.randn(6, 5), torch.rand(6, 7), torch.randn(7, 5)
    for interpreted, kept in ((True, INTERPRETED), (False, False)):
        monkeypatch.setattr(run, "INTERPRETED", interpreted)
        L.cross_entropy(x, y[:, :5])
        assert len(kept_calls()) == kept
        L.linear_cross_entropy(x, weight, y)
        assert len(kept_calls()) == kept + 1
        PLANS.clear()


def test_a_call_that_is_not_kept_records_once(recordings, device):
    """A sum of two losses, of which none is what the function returns."""
    for repeat in range(3):
        x = torch.randn(6, 5, device=device, requires_grad=True)
        L.jsd_cross_entropy(x, torch.arange(2, device=device)).backward()
        assert bool(recordings) == (repeat == 0)
        recordings.clear()
    assert not kept_calls()


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"gradient": "backward"}], ids=str)
def test_saved_tensors_of_another_layout(options, device):
    """save_on_cpu and other hooks may give them back so: the launches of a kept call's backward are then others."""
    y, x = torch.rand(8, 5, device=device), torch.randn(5, 8, device=device).t().requires_grad_()
    exact = x.detach().double().requires_grad_()
    L.cross_entropy(exact, y.double(), **options).sum().backward()

    def contiguous(t):
        return t.clone(memory_format=torch.contiguous_format)

    for hooks in (False, False, True, False, True):
        x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(contiguous, contiguous) if hooks else contextlib.nullcontext():
            value = L.cross_entropy(x, y, **options)
        value.sum().backward()
        assert error(x.grad, exact.grad) < 3e-6


def test_gradients_written_again_of_another_layout(device):
    """The second backward of a retained graph, whose first took the gradient that forward had written."""
    y, x = torch.rand(8, 5, device=device), torch.randn(5, 8, device=device).t().requires_grad_()
    exact = x.detach().double().requires_grad_()
    L.cross_entropy(exact, y.double()).backward()
    for hooks in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.Tensor.contiguous) if hooks else contextlib.nullcontext():
            value = L.cross_entropy(x, y, gradient="forward")
        for _ in range(2):
            (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
            assert error(gradient, exact.grad) < 3e-6


@pytest.mark.parametrize("first", ["operator", "function"])
def test_a_backward_takes_what_its_own_forward_kept(first, device):
    """An operator's forward keeps the divisor of a mean, a plain one counts in its own launch: their backward launches differ."""
    PLANS.clear()
    x = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.tensor([0, 1, -100, 3, 4, 0], device=device)
    exact = x.detach().double().requires_grad_()
    L.cross_entropy(exact, target).backward()
    for way in (first, "operator", "function"):
        with Operators() if way == "operator" else contextlib.nullcontext():
            value = L.cross_entropy(x, target, gradient="backward")
        (gradient,) = torch.autograd.grad(value, x)
        assert error(gradient, exact.grad) < 3e-6, way


class Wrapped(torch.Tensor):
    """A tensor without memory: operators run on the one inside."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        opened = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*opened[0], **opened[1]))


def test_a_gradient_without_memory_is_multiplied_by_a_plain_one(device):
    logits, target = torch.randn(4, 10, device=device), torch.randint(10, (4,), device=device)
    x = Wrapped(logits).requires_grad_()
    (found,) = torch.autograd.grad(L.cross_entropy(x, target, gradient="forward"), x, torch.tensor(3.0, device=device))
    plain = logits.clone().requires_grad_()
    torch.testing.assert_close(found.inner, 3 * torch.autograd.grad(torch.nn.functional.cross_entropy(plain, target), plain)[0])

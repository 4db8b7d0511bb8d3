"""Decoupled, channel-wise and relational distillation against their papers' formulas: values, gradients, layouts, edges, messages,
operators."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.kernels import launch_counts
from lossforge.kernels.plans import PLANS
from lossforge.losses import (
    ChannelWiseKLDivLoss,
    backend,
    channel_wise_kl_div,
    dist_loss,
    dkd_loss,
    kl_div_with_logits,
    plain_torch,
)

INF = float("inf")
DTYPES = pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2.0**-6), (torch.float16, 2.0**-9)],
    ids=lambda t: str(t).removeprefix("torch."),
)


def drawn(*shape, device="cpu", spread=3.0):
    generator = torch.Generator().manual_seed(len(shape))
    student, teacher = (torch.randn(*shape, generator=generator) * spread for _ in range(2))
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    return student.to(device), teacher.to(device), target.to(device)


def close(found, exact, bound):
    """Compare a value, and a gradient by its norm."""
    (value, gradient), (exact_value, exact_gradient) = found, exact
    torch.testing.assert_close(value.double(), exact_value, rtol=max(bound, 3e-6) if bound < 1e-4 else 3e-6, atol=3e-6)
    assert (gradient.double() - exact_gradient).norm() <= bound * exact_gradient.norm() + 1e-12


def decoupled(x, teacher, target, alpha=1.0, beta=8.0, temperature=4.0):
    """Compute both parts from probabilities, a row each."""
    x, teacher = (t.movedim(1, -1).flatten(0, -2) / temperature for t in (x, teacher))
    own = F.one_hot(target.flatten(), x.shape[1]).bool()

    def parts(t):
        log_p = t.log_softmax(1)
        pair = torch.stack([log_p[own], log_p.masked_fill(own, -torch.inf).logsumexp(1)], 1)
        return pair, t[~own].view(len(t), -1).log_softmax(1)

    (pair_p, rest_p), (pair_q, rest_q) = parts(x), parts(teacher)
    kl = [F.kl_div(p, q, reduction="none", log_target=True).sum(1) for p, q in ((pair_p, pair_q), (rest_p, rest_q))]
    return (temperature**2 * (alpha * kl[0] + beta * kl[1])).view(target.shape)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 2), (7, 7), (3, 1000), (2, 5000), (2, 7, 3, 2)], ids=str)
def test_decoupled_gradients_of_both_sides(shape, dtype, bound, device):
    """With an upstream gradient of each row, of logits with strides, which are not written to; in two launches."""
    *given, target = drawn(*shape, device=device)
    given = [torch.stack([t, -t], -1).to(dtype)[..., 0] for t in given]
    upstream = torch.rand(target.shape, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    for options in ({}, {"alpha": 0.0, "temperature": 2.0}, {"alpha": 0.7, "beta": 0.0}):
        leaves, exact = [t.detach().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
        assert not leaves[0].is_contiguous()
        before = launch_counts()
        value = dkd_loss(*leaves, target, reduction="none", **options)
        found = torch.autograd.grad(value, leaves, upstream.to(value.dtype))
        if backend(given[0]) != "torch":
            launched = {name: n - before.get(name, 0) for name, n in launch_counts().items() if n > before.get(name, 0)}
            assert launched == {"decoupled_kernel": 1, "decoupled_gradient_kernel": 1}
        wanted = decoupled(*exact, target, **options)
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=2e-5)
        for reduction in ("mean", "sum"):
            torch.testing.assert_close(dkd_loss(*given, target, **options, reduction=reduction), getattr(value, reduction)())
        for g, t, exact_g in zip(found, leaves, torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
            assert g.dtype == t.dtype
            assert (g.double() - exact_g).norm() <= bound * exact_g.norm() + 1e-12


def test_decoupled_of_a_teacher_in_another_dtype(device):
    x, teacher, target = drawn(4, 9, device=device)
    leaves = [x.bfloat16().requires_grad_(), teacher.requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found = torch.autograd.grad(2 * dkd_loss(*leaves, target), leaves)
    wanted = torch.autograd.grad(2 * decoupled(*exact, target).mean(), exact)
    for g, t, exact_g, bound in zip(found, leaves, wanted, (2.0**-7, 1e-5), strict=True):
        assert g.dtype == t.dtype
        assert (g.double() - exact_g).norm() <= bound * exact_g.norm()


@pytest.mark.parametrize("lead", [-60.0, 40.0, 60.0])
def test_a_teacher_that_is_sure_keeps_its_digits(lead, device):
    """At a probability of 1 - 1e-17 too, and with an offset of all logits."""
    x, teacher, target = drawn(6, 9, device=device, spread=1.0)
    own = F.one_hot(target, 9).bool()
    teacher, x = teacher + lead * own + 256, x + 0.9 * lead * own
    both = (x.double(), teacher.double())
    value, gradient = gradient_of(dkd_loss, x, teacher, target, 1.0, 1.0, 1.0, "sum")
    exact, g_exact = gradient_of(lambda x: decoupled(x, both[1], target, 1.0, 1.0, 1.0).sum(), both[0])
    torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient.double(), g_exact, rtol=1e-4, atol=1e-6)


def test_both_parts_add_up_to_the_divergence(device):
    x, teacher, target = (t.to(device) for t in drawn(8, 6))
    against, among = (dkd_loss(x, teacher, target, *weights, 2.0, "none") for weights in ((1, 0), (0, 1)))
    share = (teacher / 2).softmax(1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(against + (1 - share) * among, kl_div_with_logits(x, teacher, 2.0, "none"), rtol=1e-5, atol=1e-5)
    assert dkd_loss(x, x, target).abs() < 1e-5


def test_no_rows(device):
    none = (
        torch.zeros(0, 4, device=device, requires_grad=True),
        torch.zeros(0, 4, device=device),
        torch.zeros(0, dtype=torch.long, device=device),
    )
    assert dkd_loss(*none).isnan()
    assert dkd_loss(*none, reduction="none").shape == (0,)
    (gradient,) = torch.autograd.grad(dkd_loss(*none, empty="zero"), none[0])
    assert (dkd_loss(*none, empty="zero"), gradient.shape) == (0, (0, 4))


@DTYPES
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=lambda m: str(m).removeprefix("torch."))
def test_channel_wise_against_float64(memory, dtype, bound, device):
    x, teacher, _ = drawn(2, 5, 6, 7, device=device)
    x, teacher = (t.to(dtype).to(memory_format=memory) for t in (x, teacher))

    def exactly(x):
        p, q = ((t.flatten(2) / 4).log_softmax(2) for t in (x, teacher.double()))
        return F.kl_div(p, q, reduction="none", log_target=True).sum(2) * 16

    for reduction, exact in (("mean", lambda x: exactly(x).mean()), ("batchmean", lambda x: exactly(x).sum() / 2)):
        before = launch_counts()
        found = gradient_of(lambda x, reduction=reduction: 1.5 * channel_wise_kl_div(x, teacher, 4.0, reduction), x)
        if backend(x) != "torch":
            assert sum(launch_counts().values()) - sum(before.values()) <= 2, "the loss with its gradient, and at most its scaling"
        close(found, gradient_of(lambda x, exact=exact: 1.5 * exact(x), x.double()), bound)
    torch.testing.assert_close(channel_wise_kl_div(x, teacher, 4.0, "none").double(), exactly(x.double()), rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(ChannelWiseKLDivLoss(4.0)(x, teacher), channel_wise_kl_div(x, teacher, 4.0))


def related(x, teacher, beta=1.0, gamma=1.0, temperature=1.0):
    """Compute as the authors' code does: the lengths' product + 1e-8, which is 2e-4 of it for 1,000 softened classes."""
    p, q = ((t.movedim(1, -1).flatten(0, -2) / temperature).softmax(1) for t in (x, teacher))

    def correlation(a, b):
        a, b = (t - t.mean(1, keepdim=True) for t in (a, b))
        return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-8)).mean()

    return temperature**2 * (beta * (1 - correlation(p, q)) + gamma * (1 - correlation(p.T, q.T)))


@DTYPES
@pytest.mark.parametrize("shape", [(9, 7), (3, 4, 2, 3), (300, 10), (12, 1000), (3, 4097)], ids=str)
def test_relations_as_the_authors_compute(shape, dtype, bound, device, monkeypatch):
    """Of few rows, of an image, in several tiles a program, in long rows, and in plain torch of too many classes."""
    if backend(torch.zeros(1, device=device)) != "torch" and shape[1] == 10:
        monkeypatch.setattr("lossforge.kernels.classes.relations.IN_FLIGHT", 2048)  # lanes: two programs
        PLANS.clear()
    x, teacher, _ = drawn(*shape, device=device, spread=1.0)
    x, teacher, before = x.to(dtype), teacher.to(dtype), launch_counts()
    found = gradient_of(lambda x: 1.5 * dist_loss(x, teacher, 0.7, 1.3, 4.0), x)
    close(found, gradient_of(lambda x: 1.5 * related(x, teacher.double(), 0.7, 1.3, 4.0), x.double()), bound / 4)
    started = {name for name, n in launch_counts().items() if n > before.get(name, 0)}
    fused = backend(x) != "torch" and shape[1] <= 4096
    assert started == ({"relations_kernel", "relations_join_kernel", "relations_gradient_kernel"} if fused else set())


def test_relations_of_more_programs_than_are_joined_at_once(device):
    x, teacher, _ = drawn(8900, 8, device=device, spread=1.0)
    close(gradient_of(dist_loss, x, teacher), gradient_of(related, x.double(), teacher.double()), 1e-6)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)], ids=["rows", "classes"])
@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x[:1],
        lambda x: x + 1e4,
        lambda x: torch.where(x.abs() > 1, -INF, x),
        lambda x: torch.cat([x, x - 12, x + 12]),
        lambda x: x.new_full(x.shape, 0.3),
    ],
    ids=["one row", "an offset", "-inf", "rare classes", "equal logits"],
)
def test_relations_keep_their_digits(moved, weights, device):
    x, teacher, _ = drawn(30, 6, device=device, spread=1.0)
    x = moved(torch.where(torch.arange(6, device=device) == 3, x - 9, x))
    teacher = teacher[: len(x)].repeat(len(x) // len(teacher[: len(x)]), 1)
    found = gradient_of(lambda x: dist_loss(x, teacher, *weights), x)
    close(found, gradient_of(lambda x: dist_loss(x, teacher.double(), *weights), x.double()), 3e-6)


def test_equal_rows_have_no_relations_of_classes(device):
    x, teacher, _ = drawn(1, 6, device=device)
    value, gradient = gradient_of(lambda x: dist_loss(x, teacher.expand(700, 6), 0.0, 1.5), x.expand(700, 6))
    torch.testing.assert_close(value, torch.full_like(value, 1.5), rtol=0, atol=1e-6)
    assert gradient.abs().max() < 1e-6
    value, gradient = gradient_of(dist_loss, x[:, :1].expand(5, 1), teacher[:, :1].expand(5, 1))
    assert value == 2
    assert not gradient.any()


@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
def test_relations_of_rows_without_a_softmax(value, device):
    """The sums of the classes have such a row, so that all is nan."""
    x, teacher, _ = drawn(3, 4, device=device)
    x[1] = value
    for path in (contextlib.nullcontext, plain_torch):
        with path():
            found, gradient = gradient_of(dist_loss, x, teacher)
        assert found.isnan()
        assert gradient.isnan().all()


X, ONE = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dkd_loss(X[0], X[0], ONE[0]), r"input must have shape \(N, C\) or \(N, C, d…\) with at least two classes, got \(4,\)"),
        (lambda: dkd_loss(X[:, :1], X[:, :1], ONE), r"at least two classes, got \(3, 1\)"),
        (lambda: dkd_loss(X, X[:2], ONE), r"target_logits must have the shape of input, \(3, 4\), got \(2, 4\)"),
        (lambda: dkd_loss(X, X, ONE[:2]), r"target must have shape \(3,\), got \(2,\)"),
        (lambda: dkd_loss(X, X, ONE, temperature=1e25), "temperature² must be at most"),
        (lambda: channel_wise_kl_div(X, X), r"input must have shape \(N, C, d…\) with at least one dimension of pixels, got \(3, 4\)"),
        (lambda: channel_wise_kl_div(*[X.new_zeros(2, 3, 0, 5)] * 2), r"input must have at least one pixel, .* got \(2, 3, 0, 5\)"),
        (lambda: channel_wise_kl_div(X[None], X), r"target_logits must have the shape of input, \(1, 3, 4\), got \(3, 4\)"),
        (lambda: dist_loss(X[0], X[0]), r"input must have shape \(N, C\) or \(N, C, d…\) with at least one class, got \(4,\)"),
        (lambda: dist_loss(X, X[:2]), r"target_logits must have the shape of input"),
    ],
)
def test_refused_arguments(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(
    ("student", "teacher", "options", "value", "gradient"),
    [
        ([1, -INF], [1, 2], {}, INF, [0.7310586, 0]),  # the teacher's share of the other class; a logit of -inf gets none
        ([1, -INF], [1, -INF], {}, 0.0, [0, 0]),
        ([1, -INF, 0], [1, 2, 1], {"beta": 0.0}, 0.5848025, [0.5191171, 0, -0.5191171]),
        ([-INF, 1, 0], [1, 0, 1], {"alpha": 0.0, "beta": 1.0}, 0.4621172, [0, 0.4621172, -0.4621172]),
    ],
    ids=str,
)
def test_decoupled_of_infinite_logits(student, teacher, options, value, gradient, device):
    student, teacher = (torch.tensor([t], device=device, dtype=torch.float32) for t in (student, teacher))
    target = torch.tensor([0], device=device)
    for path in (contextlib.nullcontext, plain_torch):
        with path():
            found, g = gradient_of(dkd_loss, student, teacher, target, temperature=1.0, **options)
        torch.testing.assert_close(found, torch.tensor(value, device=device), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(g, torch.tensor([gradient], device=device, dtype=torch.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"alpha": 0.0}, {"beta": 0.0}, {"alpha": 0.0, "beta": 0.0}], ids=str)
def test_decoupled_kernels_and_plain_torch_agree_at_the_edges(options, device, monkeypatch):
    """Value and both gradients, which may be infinite or nan: every set of classes with -inf on each side, +inf, nan, unknown targets."""
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    student, teacher = torch.tensor([1.0, 0.5, -0.3]), torch.tensor([0.2, 1.5, 0.7])
    masks = [torch.tensor(mask) for mask in itertools.product((False, True), repeat=3)]
    rows = [(student.masked_fill(a, -INF), teacher.masked_fill(b, -INF), 0) for a in masks for b in masks]
    for bad, mask in itertools.product((INF, torch.nan), masks[1:]):
        rows += [(student.masked_fill(mask, bad), teacher, 0), (student, teacher.masked_fill(mask, bad), 0)]
    rows += [(student, teacher, target) for target in (3, -1, 2**32)]
    x, t, target = (torch.stack([torch.as_tensor(row[k]) for row in rows]).to(device) for k in range(3))
    upstream, found = torch.linspace(0.5, 2.0, len(rows), device=device), []
    for path in (contextlib.nullcontext, plain_torch):
        leaves = [each.clone().requires_grad_() for each in (x, t)]
        with path():
            value = dkd_loss(*leaves, target, temperature=2.0, reduction="none", **options)
            found.append((value, *torch.autograd.grad(value, leaves, upstream)))
    for kernels, plain in zip(*found, strict=True):
        torch.testing.assert_close(kernels, plain, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[0][0][-3:].isnan().all()
    assert all(g[-3:].isnan().all() for g in found[0][1:])


def test_decoupled_of_the_lowest_logits(device):
    """A student masked with the lowest number, not with -inf, has a softmax over the other classes."""
    x = torch.tensor([[1.0, *2 * [torch.finfo(torch.float32).min]]], device=device)
    teacher, target = torch.tensor([[0.2, 1.5, 0.7]], device=device), torch.tensor([0], device=device)
    v, q = (teacher / 4).softmax(1)[:, :1], (teacher[:, 1:] / 4).softmax(1)
    exact = torch.cat([4 * (1 - v), 4 * 8 * (0.5 - q) - 4 * (1 - v) * 0.5], 1)
    for path in (contextlib.nullcontext, plain_torch):
        with path():
            _, gradient = gradient_of(dkd_loss, x, teacher, target)
        torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"beta": 0.0}, {"gamma": 0.0}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_relations_that_do_not_vary_have_derivatives(rows, options, device):
    """Of one row, and of rows of equal probabilities: of the first and the second order, finite."""
    x = torch.zeros(rows, 4, device=device, dtype=torch.float64, requires_grad=True)
    teacher = drawn(rows, 4, device=device)[1].double()
    loss = dist_loss(x, teacher, **options)
    torch.testing.assert_close(loss, torch.full_like(loss, sum({"beta": 1.0, "gamma": 1.0, **options}.values())))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum() + first.sum(), x)
    assert first.isfinite().all()
    assert second.isfinite().all()

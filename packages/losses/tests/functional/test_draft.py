"""Losses of draft models against the formulas of speculators and SpecForge, written here again, in float64."""

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import (
    DraftVocabulary,
    LinearTeacher,
    TopKTeacher,
    draft_confidence_weights,
    draft_decay_weights,
    draft_loss_with_logits,
    linear_draft_loss,
)

KINDS = ("lk", "log_tv", "tv", "kl", "ce")


def speculators(kind, logits, targets, eta=3.0):
    """Compute speculators' lk_hybrid, nla, tv and kl_div of rows (…, V), its clamp of the acceptance at 1e-5 left out."""
    draft, target = logits.softmax(-1), targets.softmax(-1)
    overlap = torch.minimum(draft, target).sum(-1)
    kl = F.kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1)
    weight = torch.exp(-eta * overlap.detach())
    return {"lk": weight * kl + (1 - weight) * (1 - overlap), "log_tv": -overlap.log(), "tv": 1 - overlap, "kl": kl}[kind]


def specforge(kind, logits, target, draft_has, mask, kl_scale=1.0, kl_decay=3.0):
    """Compute SpecForge's EAGLE-3 terms of rows (…, V) with a λ a token, weighted by its position mask, and the acceptance.

    target: the teacher's logits over all its classes. draft_has: which of these the draft has.
    """
    position = mask * draft_has[target.argmax(-1)]
    own = target[..., draft_has]
    over_draft, over_all = own.softmax(-1), torch.exp(own - target.logsumexp(-1, keepdim=True))
    acceptance = torch.minimum(logits.softmax(-1), over_all).sum(-1)
    cross_entropy = -(over_draft * logits.log_softmax(-1)).sum(-1)
    kl = cross_entropy + (over_draft * over_draft.log()).sum(-1)
    weight = kl_scale * torch.exp(-kl_decay * acceptance.detach())
    each = {
        "lk": weight * kl + (1 - weight) * (1 - acceptance),
        "log_tv": -acceptance.log(),
        "tv": 1 - acceptance,
        "kl": kl,
        "ce": cross_entropy,
    }[kind]
    return each * position, position, acceptance


def error(found, expected):
    return float((found.double() - expected).abs().max() / expected.abs().max())


BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", ["lk", "log_tv", "tv", "kl"])
def test_as_speculators(kind, dtype, device):
    """Every position of (1, T, V), with a loss a position and the acceptance beside it."""
    logits, targets = (2 * torch.randn(2, 1, 9, 23, device=device)).to(dtype)
    x, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    eta = {"eta": 1.7} if kind == "lk" else {}
    expected = speculators(kind, exact, targets.double(), **eta)
    upstream = torch.rand_like(expected)
    rows = x.movedim(-1, 1), targets.movedim(-1, 1)
    loss, acceptance = draft_loss_with_logits(*rows, kind, reduction="none", outputs=("acceptance",), **eta)
    alone = draft_loss_with_logits(*rows, kind, reduction="none", **eta)
    (right,) = torch.autograd.grad(expected, exact, upstream)
    for each in (loss, alone):
        assert error(each, expected.detach()) < BOUNDS[dtype]
        assert error(torch.autograd.grad(each, x, upstream.to(dtype))[0], right) < BOUNDS[dtype]
    assert error(acceptance, 1 - speculators("tv", exact, targets.double()).detach()) < BOUNDS[dtype]
    assert not acceptance.requires_grad


@pytest.mark.parametrize("kind", ["lk", "tv"])
def test_as_the_losses_of_dspark(kind, device):
    """0.1 cross entropy of the teacher's most likely class + 0.9 TV, weighted by position over the number of positions that count."""
    logits, targets = torch.randn(2, 1, 12, 23, dtype=torch.float64, device=device)
    mask = torch.rand(1, 12, device=device) > 0.3
    mask[0, :2] = True
    decay = draft_decay_weights(torch.arange(12, device=device) % 4, 4.0)
    assert torch.equal(decay[:4], torch.exp(-torch.arange(4.0, device=device) / 4))
    x = logits.clone().requires_grad_()
    hard = F.cross_entropy(x.flatten(0, 1), targets.argmax(-1).flatten(), reduction="none").view(1, 12)
    expected = ((0.1 * hard + 0.9 * speculators(kind, x, targets)) * mask * decay).sum() / mask.sum()
    given = {"labels": targets.argmax(-1).flatten(), "hard_weight": 0.1, "weight": (mask * decay).flatten().double()}
    found = draft_loss_with_logits(x[0], targets[0], kind, normalizer=mask.sum().double(), **given)
    assert error(found, expected.detach()) < 1e-12
    assert error(torch.autograd.grad(3 * found, x)[0], torch.autograd.grad(3 * expected, x)[0]) < 1e-12


def drafted(dtype, device):
    """Return hidden states and heads of teacher and draft, which classes the draft has, and which tokens count."""
    draft_has = torch.zeros(60, dtype=torch.bool, device=device)
    draft_has[torch.randperm(60)[:23]] = True
    teacher, head = torch.randn(2, 11, 12, device=device), torch.randn(60, 12, device=device)
    x, weight = torch.randn(2, 11, 16, device=device), torch.randn(23, 16, device=device)
    mask = torch.rand(2, 11, device=device) > 0.2
    return *(t.to(dtype) for t in (teacher, head, x, weight)), draft_has, mask


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_specforge_with_a_draft_vocabulary(kind, gradient, dtype, device):
    """From hidden states: the acceptance is of the softmax over all classes, KL and cross entropy of that over the draft's."""
    teacher, head, x, weight, draft_has, mask = drafted(dtype, device)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    target = F.linear(teacher.double(), head.double())
    each, position, acceptance = specforge(kind, F.linear(*exact), target, draft_has, mask, kl_scale=0.9)
    expected = each.sum() / position.sum()
    vocabulary = DraftVocabulary(head, t2d=draft_has)
    lse, known = vocabulary.statistics(teacher)
    assert error(lse, target.logsumexp(-1)) < BOUNDS[dtype]
    assert torch.equal(known & mask, position.bool())
    options = {"teacher_lse": lse, "loss_weight": mask & known, "kl_scale": 0.9, "outputs": ("acceptance",), "chunk": 5}
    leaves = [t.requires_grad_() for t in (x, weight)]
    found = linear_draft_loss(*leaves, vocabulary.teacher(teacher), kind=kind, gradient=gradient, **options)
    assert error(found.loss, expected.detach()) < 2 * BOUNDS[dtype]
    assert error(found.acceptance, acceptance.detach() * position) < BOUNDS[dtype]
    rights = torch.autograd.grad(3 * expected, exact)
    for got, right in zip(torch.autograd.grad(3 * found.loss, leaves), rights, strict=True):
        assert error(got, right) < 3 * BOUNDS[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_as_speculators_with_a_draft_vocabulary(kind, device):
    """speculators gives the teacher a head of the draft's classes alone, and EAGLE-3's mask leaves tokens out beside."""
    teacher, head, x, weight, draft_has, mask = drafted(torch.float64, device)
    vocabulary = DraftVocabulary(head, t2d=draft_has)
    targets = F.linear(teacher, head[draft_has])
    rows = specforge("ce", F.linear(x, weight), F.linear(teacher, head), draft_has, torch.ones_like(mask))[1]
    assert torch.equal(vocabulary.statistics(teacher)[1], rows.bool())
    logits = F.linear(x, weight)
    of_ce = -(targets.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    expected = of_ce if kind == "ce" else speculators(kind, logits, targets)
    found = linear_draft_loss(x, weight, vocabulary.teacher(teacher), kind=kind, reduction="none")
    assert error(found, expected) < 1e-12


def test_a_draft_vocabulary_with_a_bias_cap_and_temperature(device):
    teacher, head, x, weight, draft_has, _ = drafted(torch.float64, device)
    bias = torch.randn(60, dtype=torch.float64, device=device)
    vocabulary = DraftVocabulary(head, bias, t2d=draft_has, scale=1.3, softcap=3.0)
    target = 3 * torch.tanh(1.3 * F.linear(teacher, head, bias) / 3) / 0.7
    lse, known = vocabulary.statistics(teacher, temperature=0.7)
    assert error(lse, target.logsumexp(-1)) < 1e-12
    assert torch.equal(known, draft_has[target.argmax(-1)])
    given = {"kind": "tv", "teacher_lse": lse, "temperature": 0.7, "reduction": "none"}
    found = linear_draft_loss(x, weight, vocabulary.teacher(teacher), **given, outputs=("acceptance",))
    over_all = target.softmax(-1)[..., draft_has]
    acceptance = torch.minimum((F.linear(x, weight) / 0.7).softmax(-1), over_all).sum(-1)
    assert error(found.loss, 1 - acceptance) < 1e-12
    assert error(linear_draft_loss(x, weight, vocabulary.teacher(teacher), **given), 1 - acceptance) < 1e-12
    assert error(found.acceptance, acceptance) < 1e-12


def test_maps_of_a_draft_vocabulary(device):
    """Both maps name the same classes; labels outside of the draft's vocabulary, and ignored ones, are ignored."""
    head = torch.randn(6, 3, device=device)
    t2d = torch.tensor([False, True, False, True, True, False], device=device)
    d2t = torch.tensor([1, 2, 2], device=device)
    for maps in ({"t2d": t2d}, {"d2t": d2t}, {"t2d": t2d, "d2t": d2t}):
        vocabulary = DraftVocabulary(head, **maps)
        assert vocabulary.classes.tolist() == [1, 3, 4]
        assert torch.equal(vocabulary.teacher(torch.zeros(2, 3, device=device)).weight, head[[1, 3, 4]])
    target = torch.tensor([0, 1, 2, 3, 4, 5, -100, 6], device=device)
    assert vocabulary.labels(target).tolist() == [-100, 0, -100, 1, 2, -100, -100, -100]
    assert vocabulary.labels(target.int(), ignore_index=-1).tolist() == [-1, 0, -1, 1, 2, -1, -1, -1]


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({}, "needs d2t or t2d, got neither"),
        ({"t2d": torch.tensor([True, False])}, "one entry a class of the teacher"),
        ({"t2d": torch.zeros(6, dtype=torch.bool)}, "at least one class, got none"),
        ({"d2t": torch.tensor([1, 0])}, "differences of class indices"),
        ({"d2t": torch.tensor([6])}, "differences of class indices"),
        ({"d2t": torch.tensor([1]), "t2d": torch.tensor([True] + [False] * 5)}, "the same classes in the same order"),
    ],
)
def test_wrong_maps_are_refused(maps, message):
    with pytest.raises(ValueError, match=message):
        DraftVocabulary(torch.randn(6, 3), **maps)
    with pytest.raises(TypeError, match=r"t2d must be of bool, got torch.int64"):
        DraftVocabulary(torch.randn(6, 3), t2d=torch.ones(6, dtype=torch.int64))


@pytest.mark.parametrize("classes", [11, 9001])
def test_nothing_accepted_and_all_accepted(classes, device):
    """Disjoint softmaxes have an infinite log loss without gradient; equal ones a loss and a gradient of 0."""
    x = torch.full((2, classes), -torch.inf, device=device)
    x[:, 0] = 0
    teacher = x.clone()
    teacher[0, 0], teacher[0, 3] = -torch.inf, 0
    x.requires_grad_()
    found = draft_loss_with_logits(x, teacher, "log_tv", reduction="none", outputs=("acceptance",))
    assert found.loss.tolist() == [torch.inf, 0.0]
    assert found.acceptance.tolist() == [0.0, 1.0]
    assert torch.equal(torch.autograd.grad(found.loss.sum(), x)[0], torch.zeros_like(x))
    found = draft_loss_with_logits(x, teacher, "tv", reduction="none", outputs=("acceptance",))
    assert found.loss.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["lk", "log_tv", "tv"])
@pytest.mark.parametrize("classes", [11, 9001])
def test_a_log_sum_that_cannot_be(kind, classes, device):
    """Of a log-sum over all classes that is less than that over some, the row is nan and others are not; a row left out stays 0."""
    x, teacher = torch.randn(2, 3, classes, device=device)
    lse = teacher.logsumexp(1) + torch.tensor([0.1, -0.2, -0.2], device=device)
    x.requires_grad_()
    weight = torch.tensor([1.0, 1.0, 0.0], device=device)
    given = {"teacher_lse": lse, "reduction": "none", "weight": weight}
    loss, acceptance = draft_loss_with_logits(x, teacher, kind, outputs=("acceptance",), **given)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().tolist() == acceptance.isnan().tolist() == gradient.isnan().any(1).tolist() == [False, True, False]
    assert loss[2] == acceptance[2] == gradient[2].abs().max() == 0


@pytest.mark.parametrize("outputs", [("acceptance",), ()], ids=["acceptance", "alone"])
@pytest.mark.parametrize("kind", ["log_tv", "tv"])
def test_small_acceptances_keep_their_digits(kind, outputs, device):
    """At an acceptance of 1e-4 the gradient is as near to float64 as elsewhere."""
    x, teacher = torch.randn(2, 6, 40, device=device)
    x[:, 0] += 14
    teacher[:, 1] += 14
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    assert (1 - speculators("tv", exact, teacher.double())).max() < 1e-3
    right = torch.autograd.grad(speculators(kind, exact, teacher.double()).sum(), exact)[0]
    found = draft_loss_with_logits(x, teacher, kind, reduction="sum", outputs=outputs)
    gradient = torch.autograd.grad(found.loss if outputs else found, x)[0]
    assert ((gradient - right).abs().amax(1) / right.abs().amax(1)).max() < 1e-5


def test_gradients_of_second_order(device):
    """Those of the kinds that are functions of the logits throughout."""
    x, teacher = torch.randn(2, 3, 7, dtype=torch.float64, device=device)
    lse = teacher.logsumexp(1) + 0.3
    for kind in ("log_tv", "tv", "kl", "ce"):

        def call(x, kind=kind):
            return draft_loss_with_logits(x, teacher, kind, teacher_lse=lse, reduction="none", outputs=("acceptance",)).loss

        assert torch.autograd.gradcheck(call, x.clone().requires_grad_())
        assert torch.autograd.gradgradcheck(call, x.clone().requires_grad_())


def test_weights_of_positions():
    """As speculators' three decays and SpecForge's DFlash weights, worked out by hand."""
    k = torch.tensor([[0, 1, 2, 3]])
    torch.testing.assert_close(draft_decay_weights(k, 2.0, first=1), torch.tensor([[0.0, 1.0, 0.6065307, 0.3678794]]))
    torch.testing.assert_close(draft_decay_weights(k, 2.0), torch.tensor([[1.0, 0.6065307, 0.3678794, 0.2231302]]))
    torch.testing.assert_close(draft_decay_weights(k, 0.8, form="power"), torch.tensor([[1.0, 0.8, 0.64, 0.512]]))
    with pytest.raises(ValueError, match="form must be one of"):
        draft_decay_weights(k, 0.8, form="linear")
    with pytest.raises(ValueError, match="gamma must be"):
        draft_decay_weights(k, 0.0)


def test_weights_of_confidence():
    """D-PACE: a block's confidences 0.5, 0.5 and 0.25 smooth to 0.75, 0.75 and 0.625, and a token that does not count is no factor."""
    nll = -torch.tensor([[0.5, 0.5, 0.25], [0.5, 0.5, 0.25]]).log()
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    prefix = [0.75, 0.5625, 0.3515625]
    expected = torch.tensor([[sum(prefix), sum(prefix[1:]), prefix[2]], [0.75 + 0.46875, 0.0, 0.46875]])
    torch.testing.assert_close(draft_confidence_weights(nll.requires_grad_(), mask), expected)
    assert not draft_confidence_weights(nll).requires_grad
    torch.testing.assert_close(draft_confidence_weights(nll.detach(), alpha=1.0)[0], torch.tensor([3.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match="mask must have the shape of nll"):
        draft_confidence_weights(nll, mask[0])


def test_what_a_draft_loss_refuses():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    teacher = LinearTeacher(x, weight)
    with pytest.raises(ValueError, match="kind must be one of"):
        linear_draft_loss(x, weight, teacher, kind="reverse")
    with pytest.raises(ValueError, match="eta must be finite and at least 0"):
        linear_draft_loss(x, weight, teacher, eta=-1.0)
    with pytest.raises(ValueError, match=r"teacher_lse must have one entry a row, shape \(3,\)"):
        draft_loss_with_logits(x, x, teacher_lse=torch.zeros(4))
    with pytest.raises(TypeError, match="teacher_lse must be"):
        draft_loss_with_logits(x, x, teacher_lse=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="needs all of the teacher's logits"):
        linear_draft_loss(x, weight, TopKTeacher(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)))

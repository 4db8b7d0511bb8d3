"""Every loss trains a classifier, takes weights, groups and mixup pairs, and agrees with torch's own."""

import functools
import math
import pathlib

import pytest
import torch
import torch.nn.functional as F

from lab.base.errors import UserError
from lab.config.loss_schema import LOSSES
from lab.config.settings import load
from lab.data.batch import Batch
from lab.tasks.classification import SPEC
from lab.tasks.heads import HeadInput, cosine_head
from lab.tasks.losses import Criterion
from lab.tasks.plain_loss import plain_loss

NAMES = sorted(SPEC.losses)
EXAMPLE = f"{pathlib.Path(__file__).parents[1] / 'examples' / 'my_loss.py'}:margin_bce"


def chosen(name: str) -> list[str]:
    return [f"loss={name}", *([f"loss.target={EXAMPLE}", "loss.hyper.margin=0.5"] if name == "custom" else [])]


CPU = torch.device("cpu")


def losses_of(trainer, count):
    values = []
    for group in trainer.groups():
        trainer.update(group)
        values.append(trainer.window[0].item())
        trainer._clear_window()
        if len(values) == count:
            return values
    return values


@pytest.mark.each("function")
@pytest.mark.parametrize("name", NAMES)
def test_loss_falls(make_trainer, name):
    words = [*chosen(name), "data.image_size=16", "optim.schedule.warmup_epochs=0", "optim.lr=3e-3", "data.augment=false"]
    values = losses_of(make_trainer(*words, "trainer.epochs=4"), 23)
    assert sum(values[-4:]) < 0.8 * sum(values[:4]), values


def example(classes=5, rows=7, *, weight=False, group=False, pair=False):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator) * 3
    target, other = torch.randint(0, classes, (2, rows), generator=generator)
    batch = Batch(torch.zeros(rows, 1, 2, 2), target, torch.arange(rows))
    if weight:
        batch.weight = torch.rand(rows, generator=generator) * 2
    if group:
        batch.group = torch.randint(0, 3, (rows,), generator=generator)
    if pair:
        batch.target_b, batch.lam = other, 0.3
    return logits, batch


@functools.cache
def config_of(*words):
    """The settings of these words, which no test changes: to compose them takes longer than most tests."""
    return load([*words]).config


def criterion(name, implementation, *words, groups=0):
    config = config_of(*chosen(name), f"loss.implementation={implementation}", *words)
    return Criterion(config.loss, config.data, 5, groups, CPU, torch.tensor([3, 0, 1, 5, 2]))


def value_and_gradient(criterion, logits, batch, upstream=1.5):
    leaf = logits.clone().requires_grad_()
    loss = criterion(leaf, batch, criterion.normalizer(batch))
    (upstream * loss).backward()
    return loss.detach(), leaf.grad


CASES = [
    (name, words, kind)
    for name in NAMES
    for words, kind in [
        ([], {}),
        ([], {"weight": True}),
        ([], {"pair": True}),
        ([], {"pair": True, "weight": True}),
        *([(["loss.group_weight=[1,2,0.5]"], {"group": True, "weight": True})] if name.startswith("preference") else []),
        *([(["loss.pos_weight=[1,2,3,1,0.5]"], {"pair": True})] if name == "bce" else []),
        *([(["loss.class_weight=[1,2,3,0,0.5]", "loss.label_smoothing=0.1"], {"pair": True})] if name == "ce" else []),
        *([(["loss.class_weight=[1,2,3,0,0.5]"], {"weight": True})] if name == "ce" else []),
        *([(["loss.smoothing=0.3", "loss.target_threshold=0.2"], {})] if name == "bce_smoothed" else []),
        *([(["loss.beta=1.5"], {"pair": True})] if name == "quality_focal" else []),
        *([(["loss.alpha=0.5", "loss.gamma=1.5"], {})] if name == "varifocal" else []),
        *([(["loss.gamma=0.5"], {"pair": True})] if name == "softmax_focal" else []),
        *([(["loss.epsilon=-0.5", "loss.label_smoothing=0.1"], {"weight": True})] if name == "poly_ce" else []),
        *([(["loss.q=0.3"], {"pair": True})] if name == "generalized_ce" else []),
        *([(["loss.tau=0.5", "loss.label_smoothing=0.1"], {})] if name == "logit_adjusted_ce" else []),
        *([(["loss.gamma_neg=2", "loss.eps=0.2"], {"pair": True})] if name == "asymmetric_single_label" else []),
        *([(["loss.hyper.margin=-0.25"], {"pair": True, "weight": True})] if name == "custom" else []),
        *([(["loss.gamma=1.5", "loss.alpha=-1"], {})] if name == "focal" else []),
        *([(["loss.delta=0.25"], {})] if name == "huber" else []),
        *([(["loss.beta=0.25"], {}), (["loss.beta=0"], {})] if name == "smooth_l1" else []),
        *([(["loss.gamma_neg=2", "loss.clip=null"], {})] if name == "asymmetric" else []),
        *([(["loss.gamma=1.5", "loss.alpha=0.3", "loss.epsilon=-1"], {})] if name == "poly_bce" else []),
    ]
]


OF_KERNELS = [case for case in CASES if LOSSES[case[0]].kernels]


@pytest.mark.parametrize(("name", "words", "kind"), OF_KERNELS, ids=str)
def test_lossforge_and_torch_agree(name, words, kind):
    logits, batch = example(**kind)
    groups = 3 if "group" in kind else 0
    ours, our_gradient = value_and_gradient(criterion(name, "lossforge", *words, groups=groups), logits, batch)
    theirs, their_gradient = value_and_gradient(criterion(name, "torch", *words, groups=groups), logits, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "words", "kind"), [case for case in OF_KERNELS if LOSSES[case[0]].takes == "logits" and LOSSES[case[0]].fused], ids=str
)
def test_a_head_that_is_fused_with_the_loss(name, words, kind):
    """Value and gradients of features, weight and bias, beside those through the logits."""
    _, batch = example(**kind)
    made = criterion(name, "lossforge", *words, groups=3 if "group" in kind else 0)
    generator = torch.Generator().manual_seed(1)
    head = HeadInput(*(torch.randn(shape, generator=generator).requires_grad_() for shape in ((7, 3), (5, 3), (5,))))
    ours, theirs = made(head, batch, made.normalizer(batch)), made(F.linear(*head), batch, made.normalizer(batch))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for one, other in zip(torch.autograd.grad(1.5 * ours, head), torch.autograd.grad(1.5 * theirs, head), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss.target=nowhere"], r'loss.target=nowhere: an object is named "module:name" or "path/to/file.py:name"'),
        (["loss.target=nowhere.py:loss"], "loss.target=nowhere.py:loss: no file nowhere.py"),
        (["loss.target=no_such_module:loss"], "loss.target=.*: No module named 'no_such_module'"),
        (["loss.target=math:pi"], "loss.target=math:pi: is a float; a loss, a function of"),
        (["loss.hyper.margn=1"], r"loss.hyper.margn: .*\nDid you mean 'margin'"),
    ],
    ids=lambda value: None if isinstance(value, list) else " ",
)
def test_a_wrong_target_is_named(words, message):
    with pytest.raises(UserError, match=message):
        criterion("custom", "lossforge", *words)


@pytest.mark.parametrize("name", NAMES)
def test_a_batchs_loss_is_the_sum_of_its_parts(name):
    words = ["loss.class_weight=[1,2,3,0,0.5]"] if name == "ce" else []
    made = criterion(name, "lossforge", *words)
    logits, batch = example(rows=7, weight=True)
    share = made.normalizer(batch)
    parts = torch.zeros(())
    for rows in (slice(0, 3), slice(3, 7)):
        part = Batch(batch.images[rows], batch.target[rows], batch.index[rows], batch.weight[rows])
        parts = parts + made(logits[rows], part, share)
    torch.testing.assert_close(parts, made(logits, batch, share))


@pytest.mark.parametrize("name", ["ce", "mae", "focal", "preference_bce"])
def test_mixup_and_cutmix_feed_pairs(make_trainer, name):
    trainer = make_trainer(f"loss={name}", "data.mixup=0.4", "data.cutmix=1.0", "data.image_size=16", "data.class_weight={8: 2}")
    pairs = []
    for group in trainer.groups():
        trainer.update(group)
        pairs += [batch for batch in group if batch.target_b is not None]
        if len(pairs) == 6:
            break
    assert all(batch.target.dtype == batch.target_b.dtype == torch.int64 and 0 <= batch.lam <= 1 for batch in pairs)
    assert trainer.guard.total.item() == 0
    assert trainer.window[1].item() == 6


def test_cutmix_share_is_the_area():
    from lab.data.augment import Mix

    images = torch.arange(8.0)[:, None, None, None].expand(8, 1, 16, 16).clone()
    mix = Mix(0.0, 1.0, 1.0, CPU, 3)
    mixed = mix(Batch(images, torch.arange(8), torch.arange(8)))
    kept = (mixed.images == images).float().mean(dim=(1, 2, 3))
    moved = mixed.target != mixed.target_b
    torch.testing.assert_close(kept[moved], torch.full_like(kept[moved], mixed.lam))


def test_groups_and_mixup_are_refused_together(make_trainer):
    with pytest.raises(UserError, match="different groups"):
        make_trainer("experiment=fair_digits", "data.mixup=0.2", "model=tiny_resnet")


def test_prior_bias_starts_every_class_at_one_in_c(make_trainer):
    trainer = make_trainer("loss=focal", "data.image_size=16")
    bias = trainer.model.get_classifier().bias
    torch.testing.assert_close(bias.sigmoid(), torch.full_like(bias, 0.1))
    unset = make_trainer("loss=focal", "loss.prior_bias=false", "data.image_size=16").model.get_classifier().bias
    assert not torch.equal(unset, bias)
    asymmetric = make_trainer("loss=asymmetric", "data.image_size=16").model.get_classifier().bias
    assert (asymmetric.sigmoid() - 0.5).abs().max() < 0.1


def test_the_table_says_whether_groups_count_in_the_loss(make_trainer):
    groups = "data.class_group={0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0, 7: 1, 8: 0, 9: 1}"
    said = {}
    for words in (["loss=ce"], ["loss=preference_bce"], ["loss=preference_bce", "loss.group_weight=[1,2]"]):
        trainer = make_trainer(groups, "data.image_size=16", *words)
        said[words[-1]] = trainer.task.rows(trainer.evaluate(trainer.model, trainer.data.val).values)["top-1 by group"]
    assert "measured only" in said["loss=ce"]
    assert "measured only" in said["loss=preference_bce"]
    assert "loss weights [1.0, 2.0]" in said["loss.group_weight=[1,2]"]


def test_a_plain_loss_that_trains_nothing_is_refused():
    """One that was detached ended in autograd's words; the arguments for the batch are no hyper-parameters."""

    def detached(logits, target, amount=0.1):
        return F.cross_entropy(logits.detach(), target, label_smoothing=amount)

    made, logits = plain_loss("loss.target=x.py:detached", detached, {"amount": 0.2}, CPU), torch.randn(3, 4)
    target = torch.tensor([0, 1, 2])
    assert made.of(logits, target).ndim == 0
    with pytest.raises(UserError, match=r"^loss\.target=x\.py:detached: its value has no gradient"):
        made.of(logits.requires_grad_(), target)
    with pytest.raises(UserError, match=r"loss\.hyper\.logits.*\n.*amount") as caught:
        plain_loss("loss.target=x.py:detached", detached, {"logits": 3}, CPU)
    assert "target" not in str(caught.value).splitlines()[-1]
    free = plain_loss("loss.target=x.py:free", lambda *batch, scale=1.0: scale * F.cross_entropy(*batch), {"scale": 2.0}, CPU)
    torch.testing.assert_close(free.of(logits, target), 2 * F.cross_entropy(logits, target))


@pytest.mark.parametrize("name", ["arcface", "ldam"])
def test_losses_of_cosines_have_a_head_of_them(make_trainer, name):
    """Evaluation and export have the head of training; the probabilities are the softmax of cosines times the scale."""
    from lab.data.sets import Norm
    from lab.tasks.inference import classifier, export
    from lossforge.losses import LDAMLoss, arcface_loss

    words = [f"loss={name}", "loss.scale=16", "data.image_size=16", "data.imbalance=5"]
    trainer = make_trainer(*words)
    head, batch = trainer.model.get_classifier(), next(iter(trainer.data.val))
    assert head.bias is None
    features = torch.randn(len(batch), head.in_features)
    cosines = F.cosine_similarity(features[:, None], head.weight[None], dim=2)
    torch.testing.assert_close(head(features), 16 * cosines, rtol=1e-4, atol=1e-5)
    exact = LDAMLoss(trainer.data.counts, scale=16) if name == "ldam" else lambda x, target: arcface_loss(x, target, scale=16)
    task = trainer.task
    torch.testing.assert_close(task.loss(16 * cosines, batch, task.normalizer(batch)), exact(cosines, batch.target), rtol=1e-4, atol=1e-5)
    config, norm = config_of(*words, "model=tiny_resnet"), Norm([0.5], [0.5])
    again = classifier(config, trainer.data.classes, norm, 16)
    again.load_state_dict(trainer.model.state_dict())
    images = batch.images[:3]
    torch.testing.assert_close(again.eval()(images), trainer.model.eval()(images))
    assert export(config, trainer.data.classes, norm).timm == {}


def test_a_head_that_is_no_linear_layer_has_no_cosines(make_trainer):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 10))
    with pytest.raises(UserError, match=r"^loss=ldam: a model is expected that ends with one torch\.nn\.Linear; Sequential has no head"):
        cosine_head(model, (1, 2, 2), "ldam", 30.0)


def test_values_by_hand():
    """One row, two classes, logits 0 and 0: every probability is one half."""
    batch = Batch(torch.zeros(1, 1, 2, 2), torch.tensor([1]), torch.tensor([0]), weight=torch.tensor([3.0]), group=torch.tensor([1]))
    log2 = 0.6931471805599453
    wanted = {
        "ce": 3 * log2,
        "mae": 3 * 1.0,
        "mse": 3 * (0.25 + 0.25),
        "huber": 3 * (0.125 + 0.125),
        "smooth_l1": 3 * (0.125 + 0.125),
        "bce": 3 * 2 * log2,
        "focal": 3 * 0.25 * log2 * (0.25 + 0.75),
        "asymmetric": 3 * (0.5 * log2 - 0.45**4 * math.log(0.55)),
        "poly_bce": 3 * 2 * (log2 + 2 * 0.5),
        "bce_smoothed": 3 * 2 * log2,
        "quality_focal": 3 * 2 * 0.25 * log2,
        "varifocal": 3 * (log2 + 0.75 * 0.25 * log2),
        "softmax_focal": 3 * 0.25 * log2,
        "poly_ce": 3 * (log2 + 2 * 0.5),
        "generalized_ce": 3 * (1 - 0.5**0.7) / 0.7,
        "logit_adjusted_ce": 3 * log2,
        "asymmetric_single_label": 3 * log2 * (0.95 * 0.5 + 0.05 * 0.5**4),
        "preference_bce": 3 * 2 * log2 * 0.5,
    }
    for name, value in wanted.items():
        words = ["loss.group_weight=[9,0.5]"] if name == "preference_bce" else []
        config = load([f"loss={name}", *words]).config
        made = Criterion(config.loss, config.data, 2, 2, CPU)
        loss = made(torch.zeros(1, 2), batch, made.normalizer(batch))
        torch.testing.assert_close(loss, torch.tensor(value), msg=lambda text, name=name: f"{name}: {text}")

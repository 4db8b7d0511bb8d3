"""A classifier whose head is computed together with its loss trains as one whose head is not."""

import pytest
import torch
from torch import nn
from words import ALONE

from lab.base.errors import UserError
from lab.tasks import heads

FUSED = "loss.fused_head=true"
PLAIN = ["model=tiny_vit", "data.image_size=16", "optim=sgd", "trainer.epochs=2", "optim.schedule.warmup_epochs=0"]
LABELS = [
    *("task=multilabel", "data.train_scenes=16", "data.val_scenes=8", "data.scene_pixels=32", "data.digits=[1,2]"),
    *("data.digit_pixels=[10,16]", "data.workers=0", "data.batch_size=8", *PLAIN[:1], *PLAIN[2:]),
]


def trained(trainer, count=6):
    """The sums of each update, scores included, and what the training and an evaluation leave."""
    windows = []
    for group in list(trainer.groups())[:count]:
        trainer.update(group)
        windows.append(trainer.window.clone())
        trainer._clear_window()
    values = trainer.evaluate(trainer.model, trainer.data.val).values
    averaged = {} if trainer.ema is None else trainer.ema.module.state_dict()
    return torch.stack(windows), values, trainer.model.state_dict(), averaged


@pytest.mark.parametrize(
    "words",
    [
        ["loss=ce", "loss.label_smoothing=0.1", "data.mixup=0.4", "trainer.ema=0.9"],
        ["loss=ce", "loss.class_weight=[1,2,1,1,3,1,1,1,0.5,1]", "data.batch_size=16", "trainer.accumulate=4"],
        ["loss=softmax_focal", "trainer.amp=bf16", "data.class_weight={8: 2.0}"],
        ["loss=focal", "trainer.amp=fp16"],
        ["loss=logit_adjusted_ce"],
        [*LABELS, "loss=asymmetric"],
    ],
    ids=" ".join,
)
def test_curves_metrics_and_weights_are_the_same(make_trainer, tmp_path, words):
    root = [f"data.root={tmp_path}"] if "task=multilabel" in words else []
    given = words if root else [*PLAIN, *words]
    plain, fused = (make_trainer(*given, *root, *more) for more in ([], [FUSED]))
    assert isinstance(fused.model.get_classifier(), heads.OpenHead)
    half = any(word.startswith("trainer.amp=") for word in words)  # a fused head rounds no logits, a plain one does: a sample may be right
    for one, other in zip(trained(fused), trained(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2 if half else 1e-4, atol=1e-3 if half else 1e-5)


def test_scores_of_training_are_counted_some_rows_at_a_time(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    head = heads.HeadInput(*(torch.randn(shape, generator=generator) for shape in ((10, 4), (7, 4), (7,))))
    target, seen = torch.randint(7, (10,), generator=generator), []

    def hits(logits, target):
        seen.append(len(logits))
        return (logits.argmax(1) == target).sum()[None]

    monkeypatch.setattr(heads, "LOGITS_AT_ONCE", 3 * 7)
    logits = nn.functional.linear(*head)
    assert heads.sum_of_rows(hits, head, target).tolist() == heads.sum_of_rows(hits, logits, target).tolist()
    assert seen == [3, 3, 3, 1, 10]


def test_an_evaluation_has_logits(make_trainer):
    trainer = make_trainer(*PLAIN, FUSED, "trainer.ema=0.9")
    images = torch.zeros(3, 1, 16, 16)
    assert isinstance(trainer.model.train()(images), heads.HeadInput)
    for model in (trainer.model.eval(), trainer.ema.module.eval()):
        assert model(images).shape == (3, 10)


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_compiled_model_gives_the_same(make_trainer, amp):
    """One graph, as trainer.compile makes it, but without the compilation of its kernels."""
    trainer = make_trainer(*PLAIN, FUSED, f"trainer.amp={amp}")
    images, found = torch.randn(4, 1, 16, 16), []
    for forward in (trainer.forward, torch.compile(trainer.forward, backend="aot_eager", fullgraph=True)):
        with trainer.autocast():
            output = forward(images)
        assert isinstance(output, heads.HeadInput)
        weights = [torch.linspace(0.5, 1.5, part.numel()).view(part.shape).to(part.dtype) for part in output]
        gradients = torch.autograd.grad(output, list(trainer.model.parameters()), weights)
        found.append([*output, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_run_is_resumed_and_scored(clone):
    """With the head fused, without it after that, and with it again."""
    words = ["model=tiny_vit", "data.image_size=16", "trainer.device=cpu", *ALONE, "trainer.runs=runs"]
    done = clone.run(*words, FUSED, "trainer.max_updates=2")
    assert done.status == 0, done.output
    assert "peak memory" in done.output
    (folder,) = clone.run_folders()
    for number, fused in ((4, "false"), (6, "true")):
        done = clone.run(f"resume={folder}", f"trainer.max_updates={number}", f"loss.fused_head={fused}")
        assert done.status == 0, done.output
        assert f"going on with {folder.relative_to(clone.path)} after update {number - 2}" in done.output
    clone.script = "experiments/evaluate.py"
    done = clone.run(f"checkpoint={folder}/checkpoints/last.pt", "tracking=none")
    assert done.status == 0, done.output
    assert "held-out top-1" in done.output


class Own(nn.Module):
    """A classifier with a head of one's choice, and something after it."""

    def __init__(self, head, after=lambda x: x):
        super().__init__()
        self.body, self.head, self.after = nn.Flatten(), head, after

    def get_classifier(self):
        return self.head

    def forward(self, images):
        return self.after(self.head(self.body(images)))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Own(nn.Linear(48, 5), nn.Dropout(0.5)), "Own does more than take its head's output, once"),
        (Own(nn.Linear(48, 5), lambda x: x / 2), "does more than take its head's output"),
        (Own(nn.utils.parametrizations.weight_norm(nn.Linear(48, 5))), "has a ParametrizedLinear as its head"),
        (Own(None), "has no head"),
        ("deit_tiny_distilled_patch16_224", "VisionTransformerDistilled has 2 heads"),
        ("resnetv2_18", "ResNetV2 has a Conv2d as its head"),
        ("volo_d1_224", "VOLO does more than take its head's output"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ",
)
def test_a_model_without_a_linear_head_is_refused(model, said):
    import timm

    shape = (3, 4, 4)
    if isinstance(model, str):
        with torch.device("meta"):
            model, shape = timm.create_model(model, num_classes=5), (3, 224, 224)
    with pytest.raises(UserError, match=r"loss\.fused_head=true: a model is expected that ends with one") as caught:
        heads.open_head(model, shape)
    assert said in str(caught.value)


def test_a_head_with_dropout_before_it_is_taken_and_nothing_is_computed(make_trainer):
    model = Own(nn.Sequential(), None)
    model.body, model.after = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Dropout(0.5)), lambda x: x
    model.head = nn.Linear(48, 5)
    state, before = torch.get_rng_state(), {name: t.clone() for name, t in model.state_dict().items()}
    heads.open_head(model, (3, 4, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    given = model(torch.randn(4, 3, 4, 4))
    assert given.weight.data_ptr() == model.head.weight.data_ptr()
    assert given.features.shape == (4, 48)

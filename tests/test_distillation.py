"""A student under a teacher: its loss, what it starts from, and teachers that do not fit."""

import pytest
import torch

from lab.base.errors import UserError
from lab.config.settings import load
from lab.run import checkpoint
from lab.tasks.heads import HeadInput
from lossforge import losses

SMALL = ["data.image_size=16", "trainer.epochs=1", "trainer.max_updates=4"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A checkpoint of a few updates."""
    from lab.run.folder import RunFolder
    from lab.training.assemble import assemble
    from lab.training.console import Console

    trainer = assemble(load(["model=tiny_resnet", "trainer.device=cpu", *SMALL, "trainer.ema=0.9"]))
    folder = RunFolder(tmp_path_factory.mktemp("runs"), "teacher", {})
    trainer.fit(folder, Console(1))
    folder.close("FINISHED")
    return folder.path / "checkpoints" / "last.pt"


@pytest.fixture
def make(make_trainer, teacher):
    return lambda *words, **more: make_trainer("task=distillation", f"task.teacher={teacher}", *SMALL, *words, **more)


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
def test_the_loss_is_the_papers(make, implementation):
    """(1 - w) CE + w T² KL(teacher ‖ student), and its gradient, in float64."""
    task = make("task.temperature=3", "task.weight=0.7", f"loss.implementation={implementation}").task
    batch = task.prepare(next(iter(task.data.train)), training=True)
    logits = torch.randn(len(batch), 10, generator=torch.Generator().manual_seed(0)) * 2
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = task.loss(leaf, batch, task.normalizer(batch))
    (1.5 * loss).backward()
    labels = -exact.log_softmax(1)[torch.arange(len(batch)), batch.target].mean()
    known = (batch.teacher.double() / 3).softmax(1)
    divergence = (known * (known.log() - (exact / 3).log_softmax(1))).sum(1).mean()
    wanted = 0.3 * labels + 0.7 * 9 * divergence
    (1.5 * wanted).backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
@pytest.mark.parametrize("divergence", ["dkd", "dist", "js", "total_variation", "cosine_distance"])
def test_other_divergences_are_those_of_the_losses(make, divergence, implementation):
    """Each over its batch's rows, so that two processes or accumulated batches add up."""
    task = make(f"task.divergence={divergence}", "task.weight=0.7", f"loss.implementation={implementation}").task
    batch = task.prepare(next(iter(task.data.train)), training=True)
    leaf = torch.randn(len(batch), 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = task.loss(leaf, batch, 2 * task.normalizer(batch))
    exact = leaf.detach().double().requires_grad_()
    given = (exact, batch.teacher.double()) + ((batch.target,) if divergence == "dkd" else ())
    if divergence in ("dkd", "dist"):
        known = getattr(losses, f"{divergence}_loss")(*given, temperature=4.0)
    else:
        options = {} if divergence == "cosine_distance" else {"temperature": 4.0, "temperature_squared": True}
        known = getattr(losses, f"{divergence}_{'div_' if divergence == 'js' else ''}with_logits")(*given, **options)
    wanted = (0.3 * torch.nn.functional.cross_entropy(exact, batch.target) + 0.7 * known) / 2
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-3, atol=1e-6)


def test_divergences_of_a_fused_head_are_those_of_its_logits(make):
    generator = torch.Generator().manual_seed(0)
    features, weight, bias, teacher = (torch.randn(shape, generator=generator) for shape in ((6, 4), (10, 4), (10,), (6, 10)))
    task = make().task
    for name in ("kl", "js", "total_variation", "cosine_distance"):
        task.distillation.divergence = name
        logits = torch.nn.functional.linear(features, weight, bias)
        whole, fused = (task.divergence(each, teacher, torch.tensor(6.0)) for each in (logits, HeadInput(features, weight, bias)))
        torch.testing.assert_close(fused, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_student_with_a_fused_head_learns_the_same(make, amp):
    """Losses and weights of three updates, mixed images among them; the student's logits are not in memory, and the teacher's are."""
    found = []
    for words in ([], ["loss.fused_head=true"]):
        trainer = make("model=tiny_vit", "optim=sgd", "data.mixup=0.4", f"trainer.amp={amp}", *words)
        losses = []
        for group in list(trainer.groups())[:3]:
            trainer.update(group)
            losses.append(trainer.window[0].clone())
            trainer._clear_window()
        found.append((torch.stack(losses), trainer.model.state_dict()))
    half = amp == "bf16"
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-2 if half else 1e-4, atol=2e-3 if half else 1e-5)


def test_the_teachers_logits_are_those_of_its_averaged_weights(make, make_trainer, teacher):
    task = make("data.mixup=0.4").task
    batch = task.prepare(next(iter(task.data.train)), training=True)
    assert batch.target_b is not None
    model = make_trainer(*SMALL).model
    state = checkpoint.load(teacher)
    model.load_state_dict(state["ema"])
    with torch.no_grad():
        torch.testing.assert_close(batch.teacher, model.eval()(batch.images), rtol=1e-4, atol=1e-5)
        model.load_state_dict(state["model"])
        assert not torch.allclose(batch.teacher, model.eval()(batch.images), atol=1e-3)


def test_images_are_normalised_as_the_teacher_knows_them(make, make_trainer, teacher):
    """A student of a long tail has another mean than its teacher."""
    task = make("data.imbalance=100", "data.augment=false").task
    theirs = make_trainer(*SMALL).data.norm
    assert abs(theirs.mean[0] - task.data.norm.mean[0]) > 1e-4
    batch = task.prepare(next(iter(task.data.train)), training=True)
    pixels = batch.images * task.data.norm.std[0] + task.data.norm.mean[0]
    model = make_trainer(*SMALL).model
    model.load_state_dict(checkpoint.load(teacher)["ema"])
    with torch.no_grad():
        wanted = model.eval()((pixels - theirs.mean[0]) / theirs.std[0])
    torch.testing.assert_close(batch.teacher, wanted, rtol=1e-4, atol=1e-5)


def test_a_student_starts_and_is_scored_as_without_a_teacher(make, make_trainer):
    student, alone = make(), make_trainer(*SMALL)
    for ours, theirs in zip(student.model.state_dict().values(), alone.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    scores = [trainer.evaluate(trainer.model, trainer.data.val).values for trainer in (student, alone)]
    assert scores[0] == scores[1]


def test_a_student_is_scored_as_a_classifier_when_its_teachers_file_is_gone():
    from lab.config.settings import load
    from lab.run.saved import Saved, settings_of
    from lab.run.trust import Origin

    tree = load(["task=distillation", "task.teacher=gone.pt", "task.calibration_bins=7", "model=tiny_resnet"]).tree()
    settings, changed = settings_of(Saved("student.pt", {"config": tree, "origin": Origin.STRANGER}, {}), [])
    assert (settings.config.task.name, settings.config.task.calibration_bins, changed) == ("classification", 7, [])


def test_the_teacher_stays_as_it_is_and_the_student_learns(make, run_folder, quiet):
    trainer = make("trainer.max_updates=3", "trainer.amp=bf16", "trainer.channels_last=true")
    batch = next(iter(trainer.data.val))
    before = trainer.task.prepare(batch, training=True).teacher.clone()
    trainer.fit(run_folder, quiet)
    assert torch.equal(trainer.task.prepare(batch, training=True).teacher, before)
    assert trainer.guard.total.item() == 0
    saved = checkpoint.load(run_folder.path / "checkpoints" / "last.pt")
    assert set(saved["model"]) == set(trainer.model.state_dict())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.teacher=nowhere.pt"], r"task.teacher=.*nowhere.pt: no such file"),
        (["task.divergence=dkd", "data.mixup=0.4"], "task.divergence=dkd: needs one label an image"),
        (["task.divergence=dist", "model=tiny_vit", "loss.fused_head=true"], "task.divergence=dist: takes all logits"),
        (["data.split_seed=1"], "was trained with data.split_seed=0; this run has data.split_seed=1"),
        (["loss.class_weight=[1,1,1,1,1,1,1,1,1,2]"], "loss.class_weight: task=distillation"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(make, words, said):
    with pytest.raises(UserError, match=said):
        make(*words)


def test_a_runs_folder_is_its_best_checkpoint(make_trainer, make, teacher):
    student = make_trainer("task=distillation", f"task.teacher={teacher.parent.parent}", *SMALL)
    named = make_trainer("task=distillation", f"task.teacher={teacher.with_name('best.pt')}", *SMALL)
    images = next(iter(student.data.val)).images
    assert torch.equal(student.task.teacher(images), named.task.teacher(images))
    with pytest.raises(UserError, match=r"task\.teacher=.*: has no checkpoints/best.pt; a run's folder or a checkpoint is expected"):
        make(f"task.teacher={teacher.parent}")


def test_a_teacher_of_another_task_is_refused(make_trainer, run_folder, quiet):
    pairs = ["task=preference", "data.train_pairs=8", "data.val_pairs=8", "data.image_size=16"]
    make_trainer(*pairs, "trainer.max_updates=1").fit(run_folder, quiet)
    with pytest.raises(UserError, match="is a checkpoint of task=preference; a classifier's is expected"):
        make_trainer("task=distillation", f"task.teacher={run_folder.path / 'checkpoints' / 'last.pt'}", *SMALL)

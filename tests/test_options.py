"""Early stopping, the monitored metric, kept checkpoints, frozen parts, own weights and recomputed activations, by small trainings."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from words import ALONE

import train
from lab.base.errors import UserError
from lab.base.process import StoppedError
from lab.config.schema import TrainerConfig
from lab.config.settings import load
from lab.run import checkpoint
from lab.run.folder import RunFolder
from lab.run.resume import named
from lab.training.assemble import Checkpointed, checkpoint_blocks
from lab.training.monitor import Monitor
from lab.training.summary import rows

SMALL = ["data.image_size=16", "data.train_share=0.1", "data.augment=false", "loss.implementation=torch", "trainer.save_minutes=null"]
# nothing is learned
FLAT = [
    "model=tiny_vit",
    *SMALL,
    "data.image_size=32",
    "optim=sgd",
    "optim.lr=1e-30",
    "optim.schedule.warmup_epochs=0",
    "optim.weight_decay=0",
]  # nothing is learned


def monitor(*words: str, default: str = "top1") -> Monitor:
    return Monitor(load(["model=tiny_resnet", *words]).config.trainer, default)


@pytest.fixture
def half():
    """Return a monitor that has seen a score of 0.5 and a loss of 2 in epoch 1."""
    found = Monitor(TrainerConfig(patience=3), "top1")
    assert found.improves({"top1": 0.5, "loss": 2.0}, 1)
    return found


@pytest.mark.parametrize(("loss", "better"), [(2.5, False), (1.0, True), (math.nan, False)])
def test_the_loss_decides_between_epochs_of_the_same_score(half, loss, better):
    assert half.improves({"top1": 0.5, "loss": loss}, 2) is better
    assert half.best.epoch == (2 if better else 1)


def test_a_lower_loss_alone_does_not_renew_the_patience(half):
    for epoch, loss in ((2, 1.5), (3, 1.0)):
        assert half.improves({"top1": 0.5, "loss": loss}, epoch)
        assert not half.gives_up
    assert not half.improves({"top1": 0.5, "loss": math.nan}, 4)
    assert half.gives_up


def test_a_higher_score_renews_the_patience_whatever_its_loss(half):
    for epoch in (2, 3, 4):
        half.improves({"top1": 0.5, "loss": 2.0}, epoch)
    assert half.gives_up
    assert half.improves({"top1": 0.6, "loss": 3.0}, 5)
    assert not half.gives_up


def test_a_score_without_a_loss_is_no_better_than_one_with(half):
    assert not half.improves({"top1": 0.5}, 2)


@pytest.mark.parametrize(
    ("words", "default", "name", "goal"),
    [
        ([], "top1", "top1", "max"),
        (["trainer.monitor=loss"], "top1", "loss", "min"),
        (["trainer.monitor=ece"], "top1", "ece", "min"),
        (["trainer.monitor=mean_error"], "top1", "mean_error", "min"),
        (["trainer.monitor=loss", "trainer.monitor_goal=max"], "top1", "loss", "max"),
        (["trainer.monitor_goal=min"], "top1", "top1", "min"),
        ([], "nll", "nll", "min"),
    ],
    ids=str,
)
def test_direction_follows_the_metrics_name_or_the_setting(words, default, name, goal):
    found = monitor(*words, default=default)
    assert found.tags() == {"monitor": name, "monitor_goal": goal}
    better, worse = ({name: 1.0}, {name: 2.0}) if goal == "min" else ({name: 2.0}, {name: 1.0})
    assert found.improves(worse, 1)
    assert found.improves(better, 2)
    assert not found.improves(worse, 3)
    assert (found.best.epoch, found.best.stale) == (2, 1)


def test_a_metric_without_a_number_ends_no_run():
    found = monitor("trainer.patience=1")
    for epoch in (1, 2, 3):
        found.improves({"top1": math.nan}, epoch)
        assert not found.gives_up
    assert found.improves({"top1": 0.5}, 4)
    found.improves({"top1": math.nan}, 5)
    assert (found.gives_up, found.best.epoch) == (True, 4)


def test_nan_is_never_better_than_a_figure():
    found = monitor()
    assert found.improves({"top1": float("nan")}, 1)
    assert found.improves({"top1": 0.1}, 2)
    assert not found.improves({"top1": float("nan")}, 3)


def test_patience_ends_the_run_and_the_table_says_so(make_trainer, run_folder, quiet):
    trainer = make_trainer(*FLAT, "trainer.epochs=9", "trainer.patience=2")
    trainer.fit(run_folder, quiet)
    assert (trainer.epoch, trainer.best.epoch) == (3, 1)
    table = rows(trainer, trainer.values | trainer.finish())
    assert table["ended early"] == "after epoch 3 of 9: 2 evaluations without a better top1 (trainer.patience)"
    last = checkpoint.load(run_folder.path / "checkpoints" / "last.pt")
    assert (last["epoch"], last["best"]["stale"]) == (3, 2)


def test_a_continued_run_counts_its_patience_on(make_trainer, run_folder, quiet):
    words = [*FLAT, "trainer.epochs=9", "trainer.patience=3"]
    first = make_trainer(*words)

    class Stop:
        wanted = False

    class After2:
        def on_epoch(self, trainer: Any) -> None:
            Stop.wanted = trainer.epoch == 2

    first.callbacks.all.append(After2())
    with pytest.raises(StoppedError):
        first.fit(run_folder, quiet, Stop())
    second = make_trainer(*words)
    second.restore(checkpoint.load(run_folder.path / "checkpoints" / "last.pt"))
    assert second.best.stale == 1
    second.fit(run_folder, quiet)
    assert (second.epoch, second.best.epoch) == (4, 1)


def test_the_monitored_metric_marks_the_best_epoch(make_trainer, run_folder, quiet):
    trainer = make_trainer(*SMALL, "trainer.epochs=4", "trainer.monitor=loss", "optim.lr=5e-2", "trainer.log_every=1000")
    trainer.fit(run_folder, quiet)
    lines = [json.loads(line) for line in (run_folder.path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["values"]["val/loss"] for line in lines if line["kind"] == "metrics" and "val/loss" in line["values"]]
    assert len(losses) == 4
    assert trainer.best.epoch == 1 + losses.index(min(losses))
    assert trainer.best.values["loss"] == min(losses)
    assert checkpoint.load(run_folder.path / "checkpoints" / "best.pt")["epoch"] == trainer.best.epoch


def test_a_metric_that_no_evaluation_has_is_refused_before_training(make_trainer):
    with pytest.raises(UserError, match=r"trainer.monitor=tpo1: 'tpo1' is not known.\nDid you mean 'top1'") as caught:
        make_trainer(*SMALL, "trainer.monitor=tpo1")
    assert {"balanced_accuracy", "ece", "loss", "top1"} < set(str(caught.value).rpartition("Choices: ")[2].split(", "))


def test_checking_the_metric_changes_no_figure(make_trainer):
    plain, checked = make_trainer(*SMALL), make_trainer(*SMALL, "trainer.monitor=top1")
    for trainer in (plain, checked):
        trainer.model.train()
        trainer.update(next(trainer.groups()))
    one, other = plain.model.state_dict(), checked.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_last_epochs_checkpoints_are_kept_and_can_be_used(make_trainer, run_folder, quiet):
    trainer = make_trainer(*SMALL, "trainer.epochs=4", "trainer.keep=2", "trainer.save_every=3")
    trainer.fit(run_folder, quiet)
    folder = run_folder.path / "checkpoints"
    assert {path.name for path in folder.glob("*.pt")} == {"best.pt", "last.pt", "epoch-003.pt", "epoch-004.pt"}
    states = {epoch: checkpoint.load(folder / f"epoch-00{epoch}.pt") for epoch in (3, 4)}
    assert {epoch: state["epoch"] for epoch, state in states.items()} == {3: 3, 4: 4}
    again = make_trainer(*SMALL, "trainer.epochs=4", "trainer.keep=2", "trainer.save_every=3")
    again.restore(states[3])
    again.fit(run_folder, quiet)
    one, other = trainer.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_finished_run_keeps_the_best_checkpoint_alone_and_said_what_it_keeps(tmp_path, capsys):
    small = ["model=tiny_resnet", "trainer.device=cpu", *SMALL, "tracking=none", "trainer.epochs=1"]
    sizes = {}
    for keep in ("0", "best"):
        assert train.main([*small, f"trainer.runs={tmp_path / keep}", f"trainer.keep={keep}"]) == 0
        said = capsys.readouterr().out
        (run,) = (tmp_path / keep).iterdir()
        sizes[keep] = {path.name: path.stat().st_size / 2**20 for path in (run / "checkpoints").iterdir()}
        listed = re.search(r"checkpoints will take about (\S+) MiB: (.+?); (.*)", said)
        expected = {name: float(size) for name, size in re.findall(r"(\S+) (\S+) MiB", listed[2])}
        assert set(sizes[keep]) == set(expected) - ({"last.pt"} if keep == "best" else set())
        for name, size in sizes[keep].items():
            assert expected[name] == pytest.approx(size, abs=0.8)  # the program in best.pt2 takes 0.6 MiB
        assert float(listed[1]) == pytest.approx(sum(expected.values()), abs=0.3)
        assert "trainer.keep=best" in listed[3]
    with pytest.raises(UserError, match="has finished and keeps no last"):
        named(str(run), ["trainer.epochs=2"])
    assert sum(sizes["best"].values()) < 0.7 * sum(sizes["0"].values())


def test_a_run_that_fails_keeps_its_last_checkpoint(tmp_path):
    lines = ["class Fails:", "    def on_epoch(self, trainer):", "        if trainer.epoch == 2:", "            raise ValueError"]
    (tmp_path / "fails.py").write_text("\n".join([*lines, ""]))
    words = ["model=tiny_resnet", "trainer.device=cpu", *SMALL, "tracking=none", "trainer.keep=best", "trainer.epochs=3"]
    assert train.main([*words, f"trainer.runs={tmp_path / 'runs'}", f"trainer.callbacks=[{tmp_path / 'fails.py'}:Fails]"]) == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in (run / "checkpoints").glob("*.pt")} == {"best.pt", "last.pt"}


def test_evaluate_scores_a_kept_checkpoint(monkeypatch, tmp_path, capsys):
    import importlib

    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "experiments")
    train, evaluate = (importlib.import_module(name).main for name in ("train", "evaluate"))
    places = [f"trainer.runs={tmp_path}", *ALONE]
    words = ["model=tiny_resnet", "trainer.device=cpu", *SMALL, *places, "trainer.epochs=2", "trainer.keep=1", "model.freeze=[backbone]"]
    assert train(words) == 0
    said = capsys.readouterr().out
    assert "parameters (model.freeze)" in said
    (run,) = tmp_path.iterdir()
    assert evaluate([f"checkpoint={run / 'checkpoints' / 'epoch-002.pt'}", *places]) == 0
    record = next(path for path in tmp_path.glob("*evaluate*/metrics.jsonl")).read_text()
    trained = next(line for line in reversed((run / "metrics.jsonl").read_text().splitlines()) if "val/top1" in line)
    scored = next(json.loads(line)["values"]["val/top1"] for line in record.splitlines() if "val/top1" in line)
    assert scored == json.loads(trained)["values"]["val/top1"]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def changed(trainer: Any, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    ("words", "frozen"),
    [
        (["model.freeze=[backbone]"], r"(?!fc\.)"),
        (["model.freeze=[layer1,conv1,bn1]"], r"(layer1|conv1|bn1)\."),
        (["model.freeze=['layer*.bn?']", "trainer.ema=0.5"], r".*\.bn"),
        (["model.freeze=[backbone]", "loss.fused_head=true", "loss.implementation=lossforge"], r"(?!fc\.)"),
        (["model.freeze=[backbone]", "optim.weight_decay=0", "optim.clip=1", "optim.clip_mode=agc"], r"(?!fc\.)"),
    ],
    ids=str,
)
def test_frozen_parts_stay_and_the_others_learn(make_trainer, run_folder, quiet, words, frozen):
    trainer = make_trainer(*SMALL, "trainer.epochs=1", *words)
    before = weights_of(trainer)
    trainer.fit(run_folder, quiet)
    moved = changed(trainer, before)
    free = {name: parameter.numel() for name, parameter in trainer.model.named_parameters() if not re.match(frozen, name)}
    assert not [name for name in moved if re.match(frozen, name)]
    assert moved >= free.keys()
    assert trainer.notes[0].startswith(f"trains {sum(free.values()):,} of ")
    if trainer.ema is not None:
        averaged = trainer.ema.module.state_dict()
        assert all(torch.equal(averaged[name], before[name]) for name in before if re.match(frozen, name))


def test_a_detectors_backbone_is_the_part_of_that_name(make_trainer):
    trainer = make_trainer("task=detection", "model=fcos_tiny", "data.train_scenes=8", "data.val_scenes=2", "model.freeze=[backbone]")
    frozen = {name for name, parameter in trainer.model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in trainer.model.named_parameters() if name.startswith("backbone.")}
    trainer.model.train()
    before = weights_of(trainer)
    trainer.update(next(trainer.groups()))
    trainer.update(next(trainer.groups()))
    assert any(name.startswith("head.") for name in changed(trainer, before))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.freeze=[layr1]"], "model.freeze=[layr1]: 'layr1' is not known.\nDid you mean 'layer1'"),
        (["model.freeze=['*']"], "nothing is left to train"),
        (["model.weights=/no/such.pt"], "model.weights=/no/such.pt: no such file"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_refused(make_trainer, words, said):
    with pytest.raises(UserError) as caught:
        make_trainer(*SMALL, *words)
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with averaged weights."""
    from lab.training.assemble import assemble
    from lab.training.console import Console

    folder = RunFolder(tmp_path_factory.mktemp("trained"), "trained", {})
    assemble(load(["model=tiny_resnet", "trainer.device=cpu", *SMALL, "trainer.epochs=1", "trainer.ema=0.9"])).fit(folder, Console(1))
    return folder.path / "checkpoints"


@pytest.mark.parametrize("form", ["best.pt", "last.pt", "best.safetensors", "plain.pt", "plain.safetensors", "prefixed.pt"])
def test_a_run_begins_with_weights_of_any_of_these_forms(make_trainer, trained, tmp_path, form):
    wanted = checkpoint.load(trained / ("last.pt" if form == "last.pt" else "best.pt"))["ema"]
    path = trained / form if (trained / form).is_file() else tmp_path / form
    if form == "plain.pt":
        torch.save(wanted, path)
    elif form == "plain.safetensors":
        save_file(wanted, path)
    elif form == "prefixed.pt":
        torch.save({"state_dict": {f"module.{name}": value for name, value in wanted.items()}}, path)
    trainer = make_trainer(*SMALL, f"model.weights={path}", "trainer.ema=0.9")
    assert not changed(trainer, wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in trainer.ema.module.state_dict().items())
    assert trainer.notes == [f"begins with the weights of {form}"]


def test_a_head_of_another_size_is_left_out_and_said(make_trainer, trained, tmp_path):
    weights = checkpoint.load(trained / "best.pt")["ema"]
    torch.save(weights | {"fc.weight": torch.zeros(7, weights["fc.weight"].shape[1]), "fc.bias": torch.zeros(7)}, tmp_path / "other.pt")
    trainer = make_trainer(*SMALL, f"model.weights={tmp_path / 'other.pt'}")
    assert changed(trainer, weights) == {"fc.weight", "fc.bias"}
    assert trainer.model.fc.weight.shape[0] == 10
    assert trainer.model.fc.weight.abs().max() > 0
    assert "left out, for another number of classes: fc.bias, fc.weight" in trainer.notes[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("layer1.0.conv1.weight"), "it lacks layer1.0.conv1.weight"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "it has, and the model does not, extra"),
        (lambda weights: weights.update({"conv1.0.weight": torch.zeros(1)}), "it has in another shape conv1.0.weight"),
        (lambda weights: (weights.clear(), weights.update(note="none")), "holds no weights"),
    ],
    ids=["lacks", "extra", "shape", "none"],
)
def test_weights_that_do_not_fit_are_refused_by_name(make_trainer, trained, tmp_path, change, said):
    weights = dict(checkpoint.load(trained / "best.pt")["model"])
    change(weights)
    torch.save(weights, tmp_path / "wrong.pt")
    with pytest.raises(UserError) as caught:
        make_trainer(*SMALL, f"model.weights={tmp_path / 'wrong.pt'}")
    assert said in str(caught.value)


def test_a_continued_run_and_an_evaluation_do_not_ask_for_the_weights(trained, tmp_path, monkeypatch):
    import importlib
    import shutil

    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "experiments")
    train, evaluate = (importlib.import_module(name).main for name in ("train", "evaluate"))
    shutil.copy(trained / "best.pt", tmp_path / "mine.pt")
    places = [f"trainer.runs={tmp_path / 'runs'}", *ALONE]
    words = ["model=tiny_resnet", "trainer.device=cpu", *SMALL, *places, f"model.weights={tmp_path / 'mine.pt'}"]
    assert train([*words, "trainer.epochs=1"]) == 0
    (tmp_path / "mine.pt").unlink()
    (run,) = (tmp_path / "runs").iterdir()
    assert train([f"resume={run}", "trainer.epochs=2"]) == 0
    assert evaluate([f"checkpoint={run / 'checkpoints' / 'best.pt'}", *places]) == 0


MODELS = ["resnet10t", "test_vit", "test_convnext", "test_efficientnet", "swin_tiny_patch4_window7_224"]


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_have_the_same_gradients_and_statistics(name):
    import timm

    torch.manual_seed(0)
    size = {"img_size": 64} if "swin" in name else {}
    model = timm.create_model(name, num_classes=5, drop_rate=0.2, drop_path_rate=0.2, **size)
    images = torch.randn(4, 3, *((64, 64) if size or "vit" not in name else model.patch_embed.img_size))
    found = []
    for recompute in (False, True):
        again = timm.create_model(name, num_classes=5, drop_rate=0.2, drop_path_rate=0.2, **size)
        again.load_state_dict(model.state_dict())
        if recompute:
            names = list(again.state_dict())
            checkpoint_blocks(again, "model.checkpoint_activations=true")
            assert list(again.state_dict()) == names
            assert sum(isinstance(module, Checkpointed) for module in again.modules()) >= 2
        torch.manual_seed(1)
        saved = kept_bytes(again, images)
        gradients = {key: parameter.grad for key, parameter in again.named_parameters()}
        found.append((gradients, dict(again.named_buffers()), saved))
    (wanted, statistics, bytes_kept), (gradients, again_statistics, fewer_kept) = found
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(again_statistics, statistics)
    assert fewer_kept < 0.8 * bytes_kept


def kept_bytes(model: nn.Module, images: torch.Tensor) -> int:
    """Run forward and backward; the bytes that forward kept for backward, beside weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(images).square().sum()
    total = sum(kept.values())
    loss.backward()
    return total


@pytest.mark.parametrize(
    "words", [[], ["trainer.ema=0.9", "model.freeze=[layer1]"], ["loss.fused_head=true", "loss.implementation=lossforge"]], ids=str
)
def test_a_training_with_recomputed_activations_is_the_same(make_trainer, words):
    trainers = [make_trainer(*SMALL, *words, f"model.checkpoint_activations={value}") for value in ("false", "true")]
    for trainer in trainers:
        trainer.model.train()
        for group in list(trainer.groups())[:2]:
            trainer.update(group)
    one, other = (weights_of(trainer) for trainer in trainers)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    if words and "ema" in words[0]:
        torch.testing.assert_close(trainers[1].ema.module.state_dict(), trainers[0].ema.module.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_model_without_blocks_is_refused_by_name(make_trainer):
    with pytest.raises(UserError, match=r"model.checkpoint_activations=true with model.name=tiny_resnet: Linear has no blocks"):
        make_trainer(*SMALL, "model.checkpoint_activations=true", model=nn.Linear(4, 4))


def test_sweeps_and_comparisons_take_the_metrics_direction_from_the_run(make_trainer, tmp_path):
    from lab.base.records import read_history
    from lab.comparison.results import _goal
    from lab.comparison.runs import Run

    tags = make_trainer(*SMALL, "trainer.monitor=loss").monitor.tags()
    records = []
    for value in (0.5, 0.2, float("nan")):
        folder = RunFolder(tmp_path, "run", {})
        folder.record("start", app="train", name="run", params={}, tags=tags)
        folder.summary({"best_loss": value})
        folder.close("FINISHED")
        records.append(read_history(folder.path))
    assert max(records, key=lambda run: run.rank) is records[1]
    runs = [Run("1", "0", "run", "FINISHED", 0, {}, {"best_top1": 0.5}, {"monitor": "top1", "monitor_goal": "min"})]
    assert _goal(runs, "best_top1") == "min"
    assert _goal(runs, "best_loss") == "min"
    assert _goal(runs, "best_top5") == "max"


@pytest.mark.parametrize(("words", "goal"), [(["trainer.monitor=loss"], "min"), ([], "min"), ([], "max")], ids=str)
def test_optuna_looks_for_the_better_values(tmp_path, words, goal):
    """Also where only the run says that lower is better, as that of a task of one's own."""
    optuna = pytest.importorskip("optuna", reason="needs uv sync --extra sweeps")
    from lab.base.paths import sqlite_uri
    from lab.base.records import History
    from lab.config.settings import quoted
    from lab.sweep.plan import plan_of
    from lab.sweep.search import DATABASE, search_of

    place = quoted(tmp_path / "100%25 {a}?")
    plan = plan_of(["search=optuna", "search.trials=6", "data.batch_size=choice(16,32)", f"trainer.runs={place}", *words])
    plan.folder.mkdir(parents=True)

    def reached(job: Any) -> History:
        start, last = {"tags": {"monitor": "loss", "monitor_goal": goal}}, {"best_loss": float(job.varied["data.batch_size"])}
        return History(plan.folder, start, "FINISHED", last=last)

    assert sum(len(jobs) for jobs in search_of(plan).batches(reached)) == 6
    study = optuna.load_study(study_name="sweep", storage=sqlite_uri(plan.folder / DATABASE))
    assert int(study.best_params["data.batch_size"]) == (16 if goal == "min" else 32)
    assert (plan.folder / DATABASE).is_file()

"""The trainer's promises: exact accumulation, skipped steps, the same figures from the same seed, no waiting on the GPU."""

import json
import math

import pytest
import torch

from lab.base.errors import NonFiniteError
from lab.tasks.classification.metrics import ClassificationCounts
from lab.training import summary

SMALL = ["data.image_size=16", "data.augment=false"]
PLAIN = ["model=tiny_vit", "data.image_size=32", "data.augment=false", "optim=sgd", "trainer.epochs=1", "optim.schedule.warmup_epochs=0"]


def first_and_last_updates(trainer):
    groups = list(trainer.groups())
    for group in (*groups[:3], groups[-1]):
        trainer.update(group)
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("loss", ["loss=ce", "loss=focal"])
def test_accumulation_gives_the_update_of_one_large_batch(make_trainer, loss):
    words = [loss, *PLAIN, "data.class_weight={3: 2.0}"]
    if loss == "loss=ce":
        words.append("loss.class_weight=[1,2,1,1,3,1,1,1,0.5,1]")
    whole = make_trainer(*words, "data.batch_size=64")
    parts = make_trainer(*words, "data.batch_size=16", "trainer.accumulate=4")
    assert whole.updates == parts.updates == 23  # 1437 samples: the last update has 29, as 16 + 13
    begin = {name: value.clone() for name, value in whole.model.state_dict().items()}
    one, other = first_and_last_updates(whole), first_and_last_updates(parts)
    assert max((one[name] - begin[name]).abs().max() for name in one) > 1e-2
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def snapshot(trainer):
    tensors = {f"model.{name}": value.clone() for name, value in trainer.model.state_dict().items()}
    for i, state in enumerate(trainer.updater.optimizer.state.values()):
        tensors |= {f"state.{i}.{name}": value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    if trainer.ema is not None:
        tensors |= {f"ema.{name}": value.clone() for name, value in trainer.ema.module.state_dict().items()}
    return tensors


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]),
]


@pytest.mark.parametrize("first", [True, False], ids=["the first step", "a later step"])
@pytest.mark.parametrize(
    "words",
    [["optim=adamw"], ["optim=sgd"], ["optim=lamb"], ["trainer.amp=fp16"], ["optim.clip=1.0"], ["optim.clip=1.0", "optim.clip_mode=agc"]],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_non_finite_loss_changes_nothing(make_trainer, device, words, first):
    trainer = make_trainer(*SMALL, *words, f"trainer.device={device}")
    batches = list(trainer.data.train)
    if not first:
        for batch in batches[:2]:
            trainer.update([batch])
    before = snapshot(trainer)
    batches[3].images[5] = torch.nan
    trainer.update([batches[3]])
    after = snapshot(trainer)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert (trainer.guard.total.item(), trainer.guard.streak.item()) == (1, 1)
    assert trainer.window[:4].tolist() == [0, 0, 0, 0] if first else trainer.window[1].item() == 2
    trainer.update([batches[4]])
    assert (trainer.guard.total.item(), trainer.guard.streak.item()) == (1, 0)
    changed = snapshot(trainer)
    if "fp16" not in str(words):
        assert any(not torch.equal(changed[name], value) for name, value in before.items() if name.startswith("model."))
    assert all(value.isfinite().all() for name, value in changed.items())


def test_the_last_bad_batch_of_the_streak_is_kept(make_trainer, run_folder, quiet):
    trainer = make_trainer(*SMALL, "trainer.max_nonfinite=3", "trainer.log_every=20")
    trainer.folder, trainer.console = run_folder, quiet
    batches = list(trainer.data.train)
    for i in (1, 4, 5, 6, 9, 10):
        batches[i].images[0, 0, 0, 0] = 1e30 * torch.inf
    for batch in batches[:12]:
        trainer.update([batch])
    with pytest.raises(NonFiniteError, match=r"3 updates in a row.*nonfinite_batch.pt|3 updates in a row"):
        trainer.report()
    saved = torch.load(run_folder.path / "nonfinite_batch.pt", weights_only=True)
    assert saved["update"] == 6
    assert torch.equal(saved["target"], batches[6].target)
    assert torch.equal(saved["index"], batches[6].index)
    assert not saved["images"].isfinite().all()


def test_a_run_whose_loss_is_never_finite_ends_with_its_batch_saved(clone):
    words = [
        "model=tiny_resnet",
        "data.image_size=16",
        "optim=sgd",
        "optim.lr=1e30",
        "optim.schedule.warmup_epochs=0",
        "trainer.max_nonfinite=4",
    ]
    done = clone.run(*words, "trainer.device=cpu", "loss.implementation=torch")
    assert done.status == 1, done.output
    assert "4 updates in a row" in done.output
    assert "Traceback" not in done.output
    (folder,) = clone.run_folders()
    assert {"images", "target", "index", "update"} <= set(torch.load(folder / "nonfinite_batch.pt", weights_only=True))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["status"] == "FAILED"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{clone.path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("lossforge").experiment_id])
    assert run.info.status == "FAILED"
    assert "nonfinite_batch.pt" in {item.path for item in client.list_artifacts(run.info.run_id)}


def figures(make_trainer, run_folder, quiet, *words):
    trainer = make_trainer(*words)
    trainer.fit(run_folder, quiet)
    lines = [json.loads(line) for line in (run_folder.path / "metrics.jsonl").read_text().splitlines()]
    timed = ("_ms", "_per_second", "_share", "_mib")
    seen = [{k: v for k, v in line["values"].items() if not k.endswith(timed)} for line in lines if line["kind"] == "metrics"]
    return seen, trainer


def test_the_same_seed_gives_bitwise_the_same_metrics(make_trainer, tmp_path, quiet):
    from lab.run.folder import RunFolder

    runs = []
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        folder = RunFolder(tmp_path, name, {})
        words = [
            f"seed={seed}",
            "trainer.max_updates=12",
            "trainer.log_every=1",
            "data.mixup=0.2",
            "loss=focal",
            "data.image_size=16",
        ]
        runs.append(figures(make_trainer, folder, quiet, *words)[0])
        folder.close("FINISHED")
    assert len(runs[0]) == 13
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.amp=bf16"],
        ["trainer.amp=fp16"],
        ["trainer.channels_last=true"],
        ["trainer.ema=0.9"],
        ["optim.clip=0.5", "optim.clip_mode=agc"],
        ["optim=lamb", "optim.layer_decay=0.9"],
        ["optim.schedule.name=step", "optim.schedule.decay_epochs=0.2"],
        ["loss=focal", "trainer.amp=bf16", "data.mixup=0.5", "trainer.accumulate=2"],
    ],
    ids=str,
)
def test_a_setting_trains_and_is_evaluated(make_trainer, run_folder, quiet, words):
    common = ["trainer.max_updates=8", "data.batch_size=32", "data.image_size=16", "optim.lr=5e-3", "trainer.log_every=1"]
    if torch.cuda.is_available():
        common.append("trainer.device=cuda")  # half precision is a GPU's; on one server's CPU it gave steps that were not finite
    seen, trainer = figures(make_trainer, run_folder, quiet, *common, "optim.schedule.warmup_epochs=0", *words)
    losses = [line["train/loss"] for line in seen if "train/loss" in line]
    assert len(losses) == 8
    assert sum(losses[-2:]) < sum(losses[:2])
    assert trainer.guard.total.item() == 0
    assert seen[-1]["val/samples"] == 360
    if "trainer.ema=0.9" in words:
        assert seen[-1]["val_without_ema/top1"] > 0


@pytest.mark.parametrize("lam", [None, 0.7, 0.3])
def test_scores_of_training_batches_are_the_models_own(make_trainer, lam):
    trainer = make_trainer(*SMALL, "trainer.accumulate=2")
    batches = list(trainer.data.train)[:2]
    top1 = top5 = 0
    for batch in batches:
        wanted = batch.target
        if lam is not None:
            batch.target_b, batch.lam = batch.target.roll(1), lam
            wanted = batch.target if lam > 0.5 else batch.target_b
        order = trainer.model(batch.images).argsort(-1, descending=True)
        top1 += (order[:, 0] == wanted).sum().item()
        top5 += (order[:, :5] == wanted[:, None]).sum().item()
    trainer.update(batches)
    assert trainer.window[4:].tolist() == [top1, top5, 128]
    assert 0 < top1 < top5 < 128


def test_schedule_is_stepped_per_update_after_warmup(make_trainer):
    trainer = make_trainer(*SMALL, "trainer.epochs=2", "optim.lr=0.01", "optim.schedule.warmup_epochs=1", "optim.schedule.warmup_lr=0")
    rates = []
    for group in list(trainer.groups()) + list(trainer.groups()):
        rates.append(trainer.updater.lr)
        trainer.update(group)
    assert rates[0] == 0
    assert rates[1] == pytest.approx(0.01 / 23)
    assert max(rates) <= 0.01
    assert rates[23] == pytest.approx(0.01)  # the first of 46 updates after the warm-up of 23
    assert rates[34] == pytest.approx(0.005 * (1 + math.cos(math.pi * 11 / 23)))
    assert trainer.updater.lr == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "range"])
def test_the_recorded_rate_is_that_of_the_update_also_after_a_resume(make_trainer, run_folder, quiet, schedule):
    words = [*SMALL, "trainer.epochs=1", f"optim.schedule.name={schedule}", "optim.lr=0.01", "trainer.log_every=1", "trainer.max_updates=6"]
    trainer, used, recorded = make_trainer(*words), [], []

    def called(event, _trainer, *given):
        if event == "on_before_update":
            used.append(trainer.updater.lr)
        elif event == "on_report":
            recorded.append(given[0]["train/lr"])

    trainer.callbacks = called
    trainer.fit(run_folder, quiet)
    assert len(used) == 6
    assert recorded == used
    other = make_trainer(*words)
    other.updater.load_state(trainer.updater.state())
    assert (other.updater.used_lr, other.updater.lr) == (trainer.updater.used_lr, trainer.updater.lr) == (used[-1], trainer.updater.lr)


def test_the_losss_time_of_a_run_is_the_median_of_its_windows(make_trainer, run_folder, quiet):
    words = [*SMALL, "trainer.epochs=1", "trainer.log_every=1", "trainer.max_updates=5", "trainer.timing_warmup=2"]
    trainer, shown = make_trainer(*words), iter([9.0, 1.0, 2.0, 1.5, 21.4])
    read = trainer.clock.read

    def told(images):
        value = next(shown)
        return read(images) | {"train/loss_ms": value, "train/step_ms": 10 * value}

    trainer.clock.read = told
    trainer.fit(run_folder, quiet)
    other = make_trainer(*words)
    other.clock.load_state(trainer.clock.state())
    for each in (trainer, other):
        assert (each.clock.overall()["loss_ms"], each.clock.overall()["update_ms"]) == (2.0, 20.0)  # the update's after the warm-up
    rows = summary.rows(trainer, trainer.values | trainer.clock.overall())
    assert rows["loss forward + backward"].startswith("2.000 ms by ")
    assert rows["update"] == "20.0 ms, the median"


def test_each_held_out_sample_counts_once():
    counts = ClassificationCounts(4, 10, 2, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(103, 4, generator=generator).softmax(-1)
    target = torch.randint(0, 4, (103,), generator=generator)
    group = torch.arange(103) % 2
    for rows in torch.arange(103).split(20):
        counts.add(probability[rows], target[rows], group[rows], torch.tensor(float(len(rows))), torch.tensor(float(len(rows))))
    result = counts.result()
    guess = probability.argmax(-1)
    assert result.values["samples"] == 103
    assert result.values["top1"] == pytest.approx((guess == target).float().mean().item())
    assert "top5" not in result.values  # of four classes
    assert result.values["loss"] == pytest.approx(1)
    assert result.values["top1_group_1"] == pytest.approx((guess == target)[1::2].float().mean().item())
    assert result.confusion[2][1] == ((target == 2) & (guess == 1)).sum().item()
    confidence = probability.max(-1).values
    wanted = 0.0
    for low in range(10):
        inside = (confidence >= low / 10) & (confidence < (low + 1) / 10)
        if inside.any():
            wanted += abs((guess == target)[inside].float().mean() - confidence[inside].mean()).item() * inside.float().mean().item()
    assert result.values["ece"] == pytest.approx(wanted, abs=1e-6)


def test_the_five_likeliest_and_the_mean_recall_of_classes_that_occur():
    """Ranks of the true class 1, 5, 6, 7 and 2; the last two classes do not occur."""
    counts = ClassificationCounts(7, 10, 0, torch.device("cpu"))
    probability = torch.arange(7.0, 0, -1).expand(5, 7) / 28
    order = torch.tensor(
        [[0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 0, 5, 6], [2, 3, 4, 5, 6, 1, 0], [4, 5, 6, 1, 2, 3, 0], [4, 3, 0, 1, 2, 5, 6]]
    )
    target = torch.tensor([0, 0, 1, 0, 3])
    counts.add(torch.zeros(5, 7).scatter(1, order, probability), target, None, torch.tensor(5.0), torch.tensor(5.0))
    values = counts.result().values
    assert values["top1"] == pytest.approx(1 / 5)
    assert values["top5"] == pytest.approx(3 / 5)
    assert values["balanced_accuracy"] == pytest.approx((1 / 3 + 0 + 0) / 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "words", [[], ["loss=focal", "trainer.amp=fp16"], ["optim=sgd", "data.mixup=0.3", "data.cutmix=1.0"], ["trainer.ema=0.9"]], ids=str
)
def test_no_step_waits_for_the_gpu(make_trainer, words):
    trainer = make_trainer("trainer.device=cuda", "optim.clip=1.0", "data.class_weight={3: 2}", "trainer.accumulate=2", *words)
    groups = trainer.groups()
    for _ in range(3):
        trainer.update(next(groups))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            trainer.update(next(groups))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.window[1].item() == 8


def test_the_final_tables_held_out_figures_are_of_one_epoch(make_trainer, run_folder, quiet):
    """The best epoch is not the last one: between the two the weights are spoilt."""

    words = [*SMALL, "loss.implementation=torch", "trainer.epochs=2", "data.train_share=0.2", "optim=sgd", "optim.lr=0.05"]
    trainer = make_trainer(*words, "optim.schedule.warmup_epochs=0", "trainer.save_minutes=null")
    trainer.begin_epoch()
    trainer.folder, trainer.console = run_folder, quiet
    trainer.train_epoch()
    trainer.end_epoch()
    first = dict(trainer.values)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(-1)
    trainer.fit(run_folder, quiet)
    assert (trainer.best.epoch, trainer.epoch) == (1, 2)
    assert trainer.values["val/loss"] != first["val/loss"]
    table = summary.rows(trainer, trainer.values | trainer.finish())
    assert table["best epoch"] == "1 of 2: that of the held-out figures"
    assert table["held-out top-1"] == f"{first['val/top1']:.2%}"
    assert table["calibration error"] == f"{first['val/ece']:.4f}"
    assert table["held-out loss"] == f"{first['val/loss']:.4f}"
    assert table["training loss"] == f"{trainer.values['train/loss']:.4f}, the mean of the last updates"

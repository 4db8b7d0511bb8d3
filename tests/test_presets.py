"""The presets of conf/experiment: they train, their data is what they say, and their runs can be scored and asked."""

import importlib
import json
from pathlib import Path

import measure_effects
import pytest
import reported
import torch
from PIL import Image
from words import ALONE

from lab.base.paths import ROOT
from lab.config.settings import load

FEW = ["trainer.max_updates=3", "trainer.device=cpu", *ALONE]
SCENES = ["data.train_scenes=24", "data.val_scenes=8", "data.workers=0", "data.batch_size=8"]
WORDS = {"multilabel": SCENES, "preference": ["data.train_pairs=48", "data.val_pairs=16"]}


class Trained:
    """Runs of the presets, a few updates each, the student's from the teacher."""

    def __init__(self, path: Path) -> None:
        self.path, self.runs, self.folders = path, path / "runs", {}

    def ask(self, app: str, *words: object) -> int:
        return importlib.import_module(app).main([str(word) for word in words])

    def folder(self, name: str) -> Path:
        return next(path for path in self.runs.iterdir() if path.name.endswith(f"-{name}"))

    def best(self, preset: str) -> Path:
        return self.folder(preset) / "checkpoints" / "best.pt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trained = Trained(tmp_path_factory.mktemp("presets"))
    for preset in ("teacher", "distillation", "multilabel", "preference"):
        more = WORDS.get(preset, [])
        if preset == "distillation":
            more = [f"task.teacher={trained.folder('teacher') / 'checkpoints' / 'last.pt'}"]
        if preset == "multilabel":
            more = [*SCENES, f"data.root={trained.path / 'data'}"]
        assert trained.ask("train", f"experiment={preset}", f"name={preset}", *FEW, *more, f"trainer.runs={trained.runs}") == 0
    return trained


@pytest.mark.parametrize("words", [[], ["loss=focal"], ["loss=logit_adjusted_ce"], ["data.class_balance=0.99"]], ids=" ".join)
def test_the_long_tail_trains(make_trainer, words):
    trainer = make_trainer("experiment=long_tail", *words)
    counts = trainer.data.counts
    assert counts[9] == round(int(counts[0]) / 100)
    for group in trainer.groups():
        trainer.update(group)
    assert trainer.guard.total.item() == 0
    values = trainer.evaluate(trainer.model, trainer.data.val).values
    assert 0 < values["balanced_accuracy"] < 1


@pytest.mark.parametrize("preset", ["instances", "oriented"])
def test_small_scenes_train(make_trainer, tmp_path, preset):
    words = ["model=yolo_tiny", *SCENES, "data.train_scenes=16", f"data.root={tmp_path}", "loss.implementation=torch"]
    trainer, values = make_trainer(f"experiment={preset}", *words, "optim.schedule.warmup_epochs=0"), []
    for _ in range(2):
        for group in trainer.groups():
            trainer.update(group)
            values.append(trainer.window[0].item())
            trainer._clear_window()
    assert sum(values[-2:]) < sum(values[:2]), values


@pytest.mark.parametrize("preset", ["teacher", "distillation", "multilabel", "preference"])
def test_a_presets_run_is_scored_again(trained, preset):
    """Also a student's, when its teacher is gone."""
    saved = trained.folder("teacher") / "checkpoints"
    moved = saved.rename(saved.with_name("elsewhere")) if preset == "distillation" else None
    try:
        words = f"checkpoint={trained.best(preset)}", f"name={preset}", f"trainer.runs={trained.path / 'again'}"
        assert trained.ask("evaluate", *words) == 0
    finally:
        if moved:
            moved.rename(saved)
    (folder,) = (path for path in (trained.path / "again").iterdir() if f"evaluate-{preset}" in path.name)
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    (values,) = [line["values"] for line in lines if line["kind"] == "metrics"]
    for name, value in torch.load(trained.best(preset), weights_only=True)["best"]["values"].items():
        assert values[f"val/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_label_sets_of_files(trained, tmp_path):
    """What the model says of a file is what it said of the scene: the probabilities of its evaluation."""
    (truth,) = trained.path.glob("data/digit_scenes/*/instances_val.json")
    image = truth.parent / "images" / json.loads(truth.read_text())["images"][0]["file_name"]
    assert trained.ask("predict", f"checkpoint={trained.best('multilabel')}", f"out={tmp_path}", "score=0", image) == 0
    (line,) = [json.loads(text) for text in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    found = {entry["label"]: entry["score"] for entry in line["found"]}
    from lab.training.assemble import assemble

    trainer = assemble(load(["experiment=multilabel", *SCENES, *FEW, f"data.root={trained.path / 'data'}"]))
    trainer.model.load_state_dict(torch.load(trained.best("multilabel"), weights_only=True)["model"])
    with torch.no_grad():
        wanted = trainer.model.eval()(next(iter(trainer.data.val)).images)[0].sigmoid()
    assert found == pytest.approx({str(i): p for i, p in enumerate(wanted.tolist())}, abs=1e-4)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_rewards_of_files(trained, tmp_path, capsys):
    from sklearn.datasets import load_digits

    files = [tmp_path / f"{place}.png" for place in (3, 8)]
    for place, path in zip((3, 8), files, strict=True):
        Image.fromarray((load_digits().images[place] * 255 / 16).round().astype("uint8")).save(path)
    assert trained.ask("predict", f"checkpoint={trained.best('preference')}", f"out={tmp_path / 'said'}", *files) == 0
    lines = [json.loads(text) for text in (tmp_path / "said" / "predictions.jsonl").read_text().splitlines()]
    rewards = [line["found"][0]["reward"] for line in lines]
    assert len(rewards) == 2
    assert rewards[0] != rewards[1]
    assert f"reward {rewards[0]:.3f}" in capsys.readouterr().out


def test_the_measured_comparisons_compose():
    """Each run of `measurements/measure.py effects` is one that the app takes, and results/effects.json holds those runs."""
    found = json.loads((ROOT / "results" / "effects.json").read_text(encoding="utf-8"))
    assert found
    assert set(found) <= set(measure_effects.COMPARISONS)
    for preset, what in measure_effects.COMPARISONS.items():
        seeded = what.seeded.format(seed=1).split()
        for words in what.runs:
            load([f"experiment={preset}", *words.format(teacher="last.pt").split(), *seeded, *measure_effects.QUIET.split()])
        if preset not in found:
            continue
        measured = found[preset]
        wanted = {f"experiment={preset} {words.format(teacher='CHECKPOINT')}" for words in what.runs}
        assert {run["command"] for run in measured["runs"] if run["role"] != "teacher"} == wanted
        seeds = {run["seed"] for run in measured["runs"]}
        assert len(seeds) >= 3
        assert all(sum(run["command"] == command for run in measured["runs"]) == len(seeds) for command in wanted)


def judged(ours, baseline, tests=1, higher=True):
    """What the page says of a difference, which is one of `tests` equal ones."""
    beside = dict.fromkeys(range(tests), "baseline")
    found = reported.compared({"baseline": baseline} | dict.fromkeys(beside, ours), beside, higher)
    return reported.columns_of(found[0], 1, 100)


def test_an_effect_is_judged_by_the_pairs():
    assert judged([0.91, 0.95, 0.90], [0.90, 0.94, 0.892])["verdict"] == "**better**"
    assert judged([0.90, 0.94, 0.892], [0.91, 0.95, 0.90])["verdict"] == "**worse**"
    not_shown = judged([0.91, 0.95, 0.90], [0.95, 0.90, 0.91])
    assert not_shown["verdict"] == "no"
    assert not_shown["difference"].startswith("+0.0 (")
    assert judged([0.2, 0.31], [0.1, 0.2], higher=False)["verdict"] == "**worse**"


def test_effects_of_one_preset_are_corrected_for_each_other():
    ours, baseline = [0.93, 0.95, 0.92, 0.96], [0.90, 0.945, 0.90, 0.945]
    alone, twice = judged(ours, baseline), judged(ours, baseline, tests=2)
    assert (alone["p"], alone["corrected"], alone["verdict"]) == ("0.044", "0.044", "**better**")
    assert (twice["p"], twice["corrected"], twice["verdict"]) == ("0.044", "0.087", "no")
    untested = judged([1.0, 2.0], [0.0, 1.0])  # equal differences
    assert (untested["p"], untested["corrected"], untested["verdict"]) == ("", "", "no")


def test_each_batch_size_has_a_baseline_of_its_own(tmp_path):
    what = measure_effects.COMPARISONS["image_text"]
    roles = [what.role(number) for number in range(len(what.runs))]
    assert roles == ["baseline", "contender"] * 4
    values = {"loss=clip size=1": 0.1, "loss=siglip size=1": 0.2, "loss=clip size=2": 0.7, "loss=siglip size=2": 0.6}
    runs = [
        {
            "command": command,
            "seed": seed,
            "role": roles[number],
            "values": {"recall1": value + 0.001 * seed * (1 + number), "text_recall5": 0.5, "image_recall5": 0.7},
            "seconds": 1.0,
        }
        for seed in range(3)
        for number, (command, value) in enumerate(values.items())
    ]
    path = tmp_path / "effects.json"
    path.write_text(json.dumps({"image_text": {"metric": "recall1", "runs": runs}}))
    rows = reported.effect_rows(path)
    assert [row["difference"].partition(" ")[0] for row in rows] == ["baseline", "+10.1", "baseline", "-9.9"]
    assert " | recall@5 0.600 | " in reported.effect_table(rows)

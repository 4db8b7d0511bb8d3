"""docs/your_own.md from another folder: its files are written there, its commands are run there as a reader would."""

import importlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from PIL import Image
from words import ALONE, TINY

import lab

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "your_own.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
WRONG_DATA = """
class Own(list):
    classes = ["a", "b"]


def no_classes():
    return [("image", 0)]


def strings():
    return Own([("image", 0), ("image", 1)])


def third():
    import torch

    return Own([(torch.zeros(3, 8, 8), target) for target in (0, 1, 2)])


class Fussy:
    def __init__(self, classes=0):
        raise ValueError("classes must be above 0")

    def __call__(self, probability, target):
        return 0.0

    on_epoch = __call__


class Late:
    def on_epoch(self, trainer, values):
        pass
"""
SCRIPT = str(ROOT / "experiments" / "train.py")


def files(text: str) -> dict[str, str]:
    """The code blocks that begin with a file's name in a comment."""
    return {name: code for _, name, code in re.findall(r"^```(python|yaml)\n# (\S+)\n(.*?)^```", text, re.M | re.S)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in files(PAGE).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "wrong_data.py").write_text(WRONG_DATA)
    return tmp_path


@pytest.fixture
def main(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("train").main


@pytest.fixture
def run(folder, warm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of the page in the folder with its files."""

    def run(command: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = command.replace("uv run ../lossforge/experiments/train.py", f"{warm.python()} {SCRIPT}")
        command = command.replace("uv run --project ../lossforge python", warm.python())
        env = {name: value for name, value in warm.env.items() if not name.startswith("LOSSFORGE")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "experiments"), env.get("PYTHONPATH")]))
        return subprocess.run([*shlex.split(command), *more], cwd=folder, env=env, capture_output=True, text=True, timeout=600)

    return run


def last_values(folder: Path) -> dict[str, float]:
    """Of each metric of the only run."""
    (record,) = (folder / "runs").glob("*/metrics.jsonl")
    return values_in(record)


def values_in(record: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["status"] == "FINISHED"
    return {name: value for line in lines if line["kind"] in ("metrics", "summary") for name, value in line["values"].items()}


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "As a library"])
def test_a_section_works_from_another_folder(run, folder, title):
    (command,) = re.findall(r"```sh\n(.*?)\n```", SECTIONS[title], re.S)
    # the preset of a model takes longer on a CPU than what the section is about
    small = [] if "model=" in command or "experiment=" in command else ["model=tiny_resnet"]
    done = run(command, *ALONE, "trainer.device=cpu", *small)
    assert done.returncode == 0, done.stderr
    values = last_values(folder)
    wanted = {"A metric": ["val/brier", "val/mcc"], "A callback": ["own/gap"], "A task": ["val/top1"]}.get(title, ["val/loss"])
    assert set(wanted) <= set(values)
    if title == "A loss":
        assert "plain torch, without kernels" in done.stdout
    if title == "A task":
        assert "val/top5" not in values  # of two classes


def test_the_library_gives_what_came_of_the_run(run, folder):
    script = (folder / "my_script.py").read_text().replace('"trainer.epochs=1"', '"trainer.epochs=1", "tracking=none"')
    (folder / "my_script.py").write_text(script)
    done = run(re.findall(r"```sh\n(.*?)\n```", SECTIONS["As a library"], re.S)[0])
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines() if line.startswith(("ce ", "focal "))]
    assert [(loss, status) for loss, status, *_ in found] == [("ce", "FINISHED"), ("focal", "FINISHED")]
    for _, _, top1, checkpoint in found:
        assert Path(checkpoint).is_file()
        assert float(top1) == values_in(Path(checkpoint).parents[1] / "metrics.jsonl")["best_top1"]


@pytest.mark.slow
def test_runs_and_their_store_are_in_the_folder_of_the_command(clone, tmp_path, monkeypatch):
    """Written there, and read there by every other app; the checkout stays as it is."""
    from mlflow import get_tracking_uri
    from mlflow.tracking import MlflowClient

    mine, before = tmp_path / "mine, lr=1", clone.contents()
    mine.mkdir()

    def app(name: str, *words: str) -> str:
        done = clone.warm.run(str(clone.path / "experiments" / f"{name}.py"), words, mine, apart=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    small = [*TINY, "trainer.max_updates=2", "tracking.model=false"]
    app("train", *small)
    (run,) = (mine / "runs").iterdir()
    app("train", f"resume=runs/{run.name}", "trainer.max_updates=4")
    app("train", "-m", "seed=1,2", *small)
    monkeypatch.chdir(mine)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert unquote(get_tracking_uri()) == f"sqlite:///{mine}/mlflow.db"  # what `mlflow ui` shows
    client = MlflowClient(tracking_uri=f"sqlite:///{mine}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'lossforge'")
    state = json.loads((run / "tracking.json").read_text())
    app("evaluate", f"checkpoint=runs:/{state['run_id']}", "trainer.device=cpu")
    app("compare", "tracking=none")
    assert "nothing is missing" in app("sync", f"{mine}/runs/{run.name}")
    assert "nothing is missing" in app("sync")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(each.data.tags["mlflow.source.name"] for each in runs) == ["experiments/evaluate.py", *["experiments/train.py"] * 4]
    assert [path.name.split("-")[2] for path in sorted((mine / "runs").glob("2*"))] == ["ce", "evaluate", "compare"]
    assert {path.name for path in mine.iterdir()} <= {"runs", "mlflow.db", "mlflow.db.lock", "mlartifacts"}
    assert clone.contents() == before


REGRESSION = """
# a task whose model, data and loss are its own: the mean of an image, as a number
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lab.config.fields import setting
from lab.config.schema import DigitsConfig, ModelConfig, TaskConfig
from lab.data.load import load_data
from lab.run.export import Exportable, Images
from lab.run.predict import Prediction
from lab.tasks.spec import TaskSpec
from lab.tasks.task import Task


@dataclass
class InkConfig(TaskConfig):
    name: str = setting("ink", "the task")


class Counts:
    def __init__(self):
        self.error, self.samples = 0.0, 0

    def result(self):
        self.values = {"loss": self.error / self.samples, "closeness": -self.error / self.samples, "samples": float(self.samples)}
        return self

    def tree(self):
        return {}


def net():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(1))


class Ink(Task):
    monitor, score_names = "closeness", ("samples",)

    def __init__(self, config, data):
        self.config, self.data = config, data

    def model(self):
        made = net()
        made(torch.zeros(1, 1, 32, 32))
        return made

    def normalizer(self, batch):
        return torch.full((), float(len(batch)))

    def loss(self, output, batch, normalizer):
        return (output[:, 0] - batch.images.mean((1, 2, 3))).square().sum() / normalizer

    def scores(self, output, batch):
        return torch.full((1,), float(len(batch)))

    def counts(self, loader):
        return Counts()

    def count(self, counts, output, batch):
        counts.error += float(self.loss(output, batch, torch.ones(())))
        counts.samples += len(batch)

    def pictures(self, result, folder: Path):
        return []

    def headline(self, result):
        return f"held-out loss {result.values['loss']:.4f}"

    def rows(self, best):
        return {"held-out closeness": f"{best['closeness']:.4f}"}


def build(config, device, norm):
    return Ink(config, load_data(config.data, norm, device, config.seed, norm))


def predict(config, classes, asked):
    from torchvision.transforms.v2.functional import normalize, pil_to_tensor, resize

    model = net()

    def predicted(image):
        pixels = resize(pil_to_tensor(image.convert("L")), [32, 32]).float() / 255
        return Prediction(["ink"], [float(model(normalize(pixels, asked.norm.mean, asked.norm.std)[None]))])

    return model, predicted


def export(config, classes, norm):
    model = net()
    return Exportable(Images(model, norm), model, [1, 32, 32], "ink")


GIVEN = {"config": InkConfig, "data": DigitsConfig, "losses": ("ce",), "build": build, "model": ModelConfig}
WHOLE = TaskSpec(**GIVEN, predict=predict, export=export)
WITHOUT = TaskSpec(**GIVEN, predict=None, export=None)
SILENT = TaskSpec(**GIVEN)
"""


@pytest.mark.parametrize("spec", ["WHOLE", "WITHOUT", "SILENT"])
def test_a_task_of_other_models_is_exported_and_asked_as_its_record_says(main, tmp_path, monkeypatch, capsys, spec):
    """Its model is no classifier; what its record leaves out is said, and costs the run nothing."""
    import predict

    (tmp_path / "ink.py").write_text(REGRESSION)
    monkeypatch.chdir(tmp_path)
    words = ["task=custom", f"task.target=ink.py:{spec}", "model=tiny_vit", "trainer.epochs=1", "trainer.runs=runs", "tracking=none"]
    assert main([*words, "trainer.device=cpu"]) == (
        4 if spec == "SILENT" else 0
    )  # a classifier's export fails, and the record does not forbid it
    said = capsys.readouterr()
    assert {"val/closeness", "best_closeness"} <= set(last_values(tmp_path))
    (run,) = (tmp_path / "runs").iterdir()
    pixels = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image[0].numpy()).save(file)
    asked = [f"checkpoint={run}", "out=found", "trainer.device=cpu", *files]
    if spec == "WHOLE":
        assert predict.main(asked) == 0
        found = [json.loads(line)["found"][0]["score"] for line in (tmp_path / "found" / "predictions.jsonl").read_text().splitlines()]
        exported = torch.export.load(run / "checkpoints" / "best.pt2").module()(pixels)
        torch.testing.assert_close(exported[:, 0].detach(), torch.tensor(found), rtol=1e-4, atol=1e-5)
        return
    assert not (run / "checkpoints" / "best.pt2").exists()
    assert predict.main(asked) == 1
    asked_of = "its models are not asked by predict.py" if spec == "WITHOUT" else "its TaskSpec needs a predict and an export of its own"
    assert asked_of in capsys.readouterr().err
    line = (
        "task=custom has no export (TaskSpec.export): its best model is saved as a checkpoint alone"
        if spec == "WITHOUT"
        else "the best model was not exported, and MLflow gets its checkpoint alone: task=custom: its models are not classifiers"
    )
    assert line in " ".join(said.out.split())
    if spec == "WITHOUT":  # before the first epoch
        assert said.out.index("TaskSpec.export") < said.out.index("epoch 1/1")


def test_runs_know_no_task():
    """What is a task's stands in its own folder, so that one of a user's own has all that ours have."""
    import ast

    from lab.registry import TASKS

    found, named = set(), set()
    for path in (ROOT / "experiments" / "lab" / "run").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else [str(getattr(node, "module", ""))]
            found |= {module for module in modules if module.startswith(("lab.tasks", "lab.detectors"))}
            if isinstance(node, ast.Constant) and node.value in TASKS:
                named.add((path.name, node.value))
    assert not found
    assert not named


def test_no_folder_hides_a_function_of_the_library():
    """An import of lab.x sets the attribute x of lab."""
    place = Path(lab.__file__).parent
    assert not [name for name in lab.__all__ if [*place.glob(f"{name}.py"), *place.glob(f"{name}/*.py")]]
    assert all(callable(getattr(lab, name)) for name in lab.__all__)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=custom", "model.target=my_model.py:perceptro"], "perceptro in my_model.py does not exist; .*perceptron"),
        (["model=custom", "model.target=my_model.py:perceptron", "model.args.widht=3"], "cannot be called: TypeError: .*widht"),
        (["model=custom", "model.target=no_such.py:net"], "model.target=no_such.py:net: no file no_such.py"),
        (["data=custom", "data.target=my_data.py:Stripes", "data.args.cont=3"], "cannot be called with .*cont.*TypeError"),
        (["optim=custom", "optim.target=my_optim.py:torch"], "optim.target=my_optim.py:torch: is not a class of torch.optim.Optimizer"),
        (["data=custom", "data.target=wrong_data.py:no_classes"], "the data set of train needs `classes`"),
        (["data=custom", "data.target=wrong_data.py:strings"], "a sample of train is not .*: TypeError: an image is a str"),
        (["data=custom", "data.target=wrong_data.py:third"], "train has the class 2; each sample needs a class from 0 to 1"),
        (["task.metrics={x: 'my_metrics.py:torch'}"], "task.metrics.x=my_metrics.py:torch: is a module; a function or"),
        (["task.metrics={x: 'wrong_data.py:Fussy'}"], "task.metrics.x=wrong_data.py:Fussy: this class cannot be made .*ValueError: class"),
        (["trainer.callbacks=['wrong_data.py:Late']"], r"Late.on_epoch: is called with \(trainer\), which it does not take: .*'values'"),
        (["trainer.callbacks=['my_model.py:perceptron']"], "has none of the methods on_before_update, .*on_update"),
        (["task=custom", "task.target=my_task.py:build"], "is a function; a lab.tasks.spec.TaskSpec is expected"),
        (["task=custom", "task.target=my_task.py:SPEC", "task.boundry=4"], "boundry.*not known.\nDid you mean 'boundary'"),
        (
            ["task=custom", "task.target=my_task.py:SPEC", "loss=mae"],
            "loss=mae: is a loss of .*, task=distillation and task=regression; task=custom takes ce",
        ),
        (["--config-dir=my_conf", "model=smal"], "Did you mean 'small'"),
        (["--config-dir=missing"], "missing: no such folder"),
    ],
    ids=str,
)
def test_mistakes_are_said_before_anything_starts(main, folder, monkeypatch, capsys, words, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LOSSFORGE_CONFIG_DIR", "")
    assert main([*words, "trainer.runs=runs", "tracking=none", "trainer.device=cpu"]) == 1
    assert re.search(said, capsys.readouterr().err)
    assert not (folder / "runs").exists()


def test_an_option_of_ones_own_may_not_hide_behind_ours(main, folder, monkeypatch, capsys):
    (folder / "my_conf" / "model" / "resnet18.yaml").write_text("name: resnet10t\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LOSSFORGE_CONFIG_DIR", "my_conf")
    assert main(["model=resnet18", "--cfg"]) == 1
    assert "has a file of this name, which would be read in its place; rename yours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cfg", "hydra"], "--cfg hydra: Hydra's own settings have no effect here"),
        (["--info"], "Hydra's option is not taken: --cfg prints the settings"),
        (["-sc", "install=bash"], "a shell completes `uv run`"),
        (["hydra.run.dir=elsewhere"], "a run's folder is made under trainer.runs="),
        (["hydra/launcher=joblib"], "of a sweep"),
        (["~model"], "settings cannot be deleted"),
        (["--config-dir"], "--config-dir: a folder is expected"),
        (["--config-nam=x"], "'--config-nam' is not known"),
    ],
    ids=str,
)
def test_words_of_hydra_that_have_no_effect_are_refused(main, capsys, words, said):
    assert main(words) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--cfg", "job", "++optim.lr=0.5"], ["--cfg=job", "+optim.lr=0.5"], ["-c", "optim.lr=0.5"]], ids=str)
def test_words_of_hydra_that_work(main, capsys, words):
    assert main(words) == 0
    assert "\n  lr: 0.5\n" in capsys.readouterr().out

"""docs/your_own.md from another folder: its files are written there, its commands are run there as a reader would."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

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


def run(folder: Path, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = command.replace("uv run ../lossforge/experiments/train.py", f"{sys.executable} {SCRIPT}")
    command = command.replace("uv run --project ../lossforge python", sys.executable)
    argv = [*shlex.split(command), *more]
    path = os.pathsep.join(filter(None, [str(ROOT / "experiments"), os.environ.get("PYTHONPATH")]))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "LOSSFORGE"))} | {"PYTHONPATH": path}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


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
def test_a_section_works_from_another_folder(folder, title):
    (command,) = re.findall(r"```sh\n(.*?)\n```", SECTIONS[title], re.S)
    done = run(folder, command, "tracking=none", "trainer.device=cpu")
    assert done.returncode == 0, done.stderr
    values = last_values(folder)
    wanted = {"A metric": ["val/brier", "val/mcc"], "A callback": ["own/gap"], "A task": ["val/top1"]}.get(title, ["val/loss"])
    assert set(wanted) <= set(values)
    if title == "A loss":
        assert "plain torch, without kernels" in done.stdout
    if title == "A task":
        assert "val/top5" not in values  # of two classes


def test_the_library_gives_what_came_of_the_run(folder):
    script = (folder / "my_script.py").read_text().replace('"trainer.epochs=1"', '"trainer.epochs=1", "tracking=none"')
    (folder / "my_script.py").write_text(script)
    done = run(folder, re.findall(r"```sh\n(.*?)\n```", SECTIONS["As a library"], re.S)[0])
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines() if line.startswith(("ce ", "focal "))]
    assert [(loss, status) for loss, status, *_ in found] == [("ce", "FINISHED"), ("focal", "FINISHED")]
    for _, _, top1, checkpoint in found:
        assert Path(checkpoint).is_file()
        assert float(top1) == values_in(Path(checkpoint).parents[1] / "metrics.jsonl")["best_top1"]


def test_runs_and_their_store_are_in_the_folder_of_the_command(clone, tmp_path, monkeypatch):
    """Written there, and read there by every other app; the checkout stays as it is."""
    from mlflow import get_tracking_uri
    from mlflow.tracking import MlflowClient

    mine, before = tmp_path / "mine, lr=1", clone.contents()
    mine.mkdir()

    def app(name: str, *words: str) -> str:
        command = [sys.executable, str(clone.path / "experiments" / f"{name}.py"), *words]
        done = subprocess.run(command, cwd=mine, env=clone.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    small = ["model=tiny_resnet", "data.image_size=16", "trainer.device=cpu", "trainer.max_updates=2", "tracking.model=false"]
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


def test_no_folder_hides_a_function_of_the_library():
    """An import of lab.x sets the attribute x of lab."""
    assert not [name for name in lab.__all__ if (Path(lab.__file__).parent / name).exists()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=custom", "model.target=my_model.py:perceptro"], "perceptro in my_model.py does not exist; .*perceptron"),
        (["model=custom", "model.target=my_model.py:perceptron", "model.args.widht=3"], "cannot be called: TypeError: .*widht"),
        (["model=custom", "model.target=json:loads"], "model.target=json:loads: cannot be called: TypeError"),
        (["model=custom", "model.target=no_such.py:net"], "model.target=no_such.py:net: no file no_such.py"),
        (["data=custom", "data.target=my_data.py:Stripes", "data.args.cont=3"], "cannot be called with .*cont.*TypeError"),
        (["optim=custom", "optim.target=my_optim.py:torch"], "optim.target=my_optim.py:torch: is no class of torch.optim.Optimizer"),
        (["optim=custom", "optim.target=my_optim.py:SignDescent", "optim.args.betas=3"], "optim.name=custom cannot be made with .*betas"),
        (["data=custom", "data.target=json:loads"], "data.target=json:loads: cannot be called with {}: TypeError"),
        (["data=custom", "data.target=wrong_data.py:no_classes"], "the data set of train needs `classes`"),
        (
            ["data=custom", "data.target=wrong_data.py:strings"],
            "a sample of train is no .*: TypeError: an image is a str",
        ),
        (["data=custom", "data.target=wrong_data.py:third"], "train has the class 2; each sample needs a class from 0 to 1"),
        (
            ["task.metrics={x: 'my_metrics.py:torch'}"],
            "task.metrics.x=my_metrics.py:torch: is a module; a function or",
        ),
        (
            ["task.metrics={x: 'wrong_data.py:Fussy'}"],
            "task.metrics.x=wrong_data.py:Fussy: this class cannot be made .*ValueError: class",
        ),
        (
            ["trainer.callbacks=['wrong_data.py:Fussy']"],
            "trainer.callbacks=wrong_data.py:Fussy: this class cannot be .*ValueError: class",
        ),
        (["trainer.callbacks=['my_model.py:perceptron']"], "has none of the methods on_update"),
        (["task=custom", "task.target=my_task.py:build"], "is a function; a lab.tasks.spec.TaskSpec is expected"),
        (["task=custom", "task.target=my_task.py:SPEC", "task.boundry=4"], "boundry.*not known.\nDid you mean 'boundary'"),
        (["task=custom", "task.target=my_task.py:SPEC", "loss=mae"], "loss=mae with task=custom"),
        (["--config-dir=my_conf", "model=smal"], "Did you mean 'small'"),
        (["--config-dir=missing"], "missing: there is no such folder"),
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

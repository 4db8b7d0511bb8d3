"""The apps from Python: results as pandas frames, the runs of a folder as one, and the notebook of examples/."""

import json
import shutil
from pathlib import Path

import pandas
import pytest
from PIL import Image
from words import TINY

import lab
from lab.base.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SMALL = [*TINY, "data.train_share=0.1", "trainer.epochs=2"]
WORDS = ["tracking.model=false", "trainer.log_every=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield lab.train(*SMALL, *WORDS), folder


@pytest.fixture(autouse=True)
def there(trained, monkeypatch):
    monkeypatch.chdir(trained[1])


def recorded(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [each for each in records if each["kind"] == "metrics"]


def test_a_run_says_how_it_was_called(trained):
    start = json.loads((trained[0].folder / "metrics.jsonl").read_text().splitlines()[0])
    assert start["tags"]["command"] == " ".join(["experiments/train.py", *SMALL, *WORDS])


def test_a_result_has_its_curves_and_its_last_figures(trained):
    result, _ = trained
    history = result.history
    assert list(history.index) == sorted({each["step"] for each in recorded(result.folder) if "train/loss" in each["values"]})
    for record in recorded(result.folder):
        for name, value in record["values"].items():
            if not name.startswith("system/"):
                assert history.loc[record["step"], name] == pytest.approx(float(value), nan_ok=True), name
    assert history["val/top1"].notna().sum() == 2
    assert not [name for name in history if name.startswith("system/")]
    assert result.metrics.loc["best_top1", "value"] == result.values["best_top1"]
    assert repr(result).startswith(f"TrainResult(FINISHED, runs/{result.folder.name}, best_top1=")
    assert len(repr(result)) < 300


def test_an_evaluation_has_frames_too(trained):
    result, _ = trained
    scored = lab.evaluate(result.folder, "trainer.device=cpu", "tracking=none", tta="flip")
    assert scored.metrics.loc["samples", "value"] == len(scored.predictions)
    assert scored.metrics.loc["top1", "value"] == pytest.approx(scored.predictions["correct"].mean())
    assert list(scored.per_class["class"]) == result.classes
    assert repr(scored).startswith("EvaluationResult(FINISHED, runs/")
    with pytest.raises(UserError, match="split=tset"):
        lab.evaluate(result.folder, split="tset")
    with pytest.raises(UserError, match=r"--cfg: an option of the command line; lab.evaluate takes settings"):
        lab.evaluate(result.folder, "--cfg")


def test_predictions_are_a_frame_and_no_file(trained, tmp_path, monkeypatch):
    result, folder = trained
    for number in range(2):
        Image.new("L", (16, 16), 100 * number).save(tmp_path / f"{number}.png")
    before = sorted(folder.iterdir())
    found = lab.predict(result.folder, tmp_path, "trainer.device=cpu", top=3)
    assert list(found.columns) == ["image", "label", "score"]
    assert list(found["image"]) == [str(tmp_path / f"{number}.png") for number in (0, 0, 0, 1, 1, 1)]
    assert (found.groupby("image")["score"].apply(lambda scores: scores.is_monotonic_decreasing)).all()
    assert sorted(folder.iterdir()) == before
    monkeypatch.chdir(tmp_path)
    for name in ("-x.png", "trainer.device=cuda.png"):
        Image.new("L", (16, 16)).save(name)
        assert list(lab.predict(result.folder, name, "trainer.device=cpu", top=1)["image"]) == [name]
    (tmp_path / "2.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"2.png: cannot be read as an image"):
        lab.predict(result.folder, [tmp_path / "2.png"], "trainer.device=cpu")
    with pytest.raises(UserError, match=r"3.png=4: no such file or folder"):
        lab.predict(result.folder, [tmp_path, "3.png=4"], "trainer.device=cpu")


def test_runs_are_one_frame(trained):
    result, _ = trained
    table = lab.runs("runs/*")
    row = table.loc[f"runs/{result.folder.name}"]
    assert (row["name"], row["status"], row["app"], row["model.name"]) == ("ce-tiny_resnet-digits", "FINISHED", "train", "tiny_resnet")
    assert row["best_top1"] == result.values["best_top1"]
    assert list(table.index) == sorted(table.index)
    with pytest.raises(UserError, match="no run folder matches nowhere"):
        lab.runs("nowhere/*")


def test_runs_are_read_where_they_are_written(trained, tmp_path, monkeypatch):
    result, folder = trained
    assert f"runs/{result.folder.name}" in lab.runs().index
    monkeypatch.setenv("LOSSFORGE_RUNS", str(tmp_path / "none [yet]"))
    with pytest.raises(UserError, match=r"no run folder matches .*; lab.runs\(\) reads all of .*none \[yet\]"):
        lab.runs()
    (tmp_path / "none [yet]").symlink_to(folder / "runs")
    assert len(lab.runs()) == len(lab.runs(folder / "runs" / "*"))


def test_a_comparison_has_frames(trained):
    _, folder = trained
    found = lab.compare("tracking.enabled=false")
    assert isinstance(found.cells, pandas.DataFrame)
    assert len(found.cells) == 1
    assert found.page.is_file()
    assert repr(found).startswith("ComparisonResult(runs/")
    assert (folder / "mlflow.db").is_file()


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel_of_jupyter(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] for cell in code)
    code[1].source = code[1].source.replace("trainer.epochs=2", "trainer.max_updates=3")
    code[-1].source = code[-1].source.replace("\n", "\nprint(comparison.page.absolute())\n", 1)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [each["data"] for cell in code for each in cell.outputs if each.output_type == "execute_result"]
    assert "TrainResult(FINISHED, runs/" in shown[0]["text/plain"]
    assert sum("<table" in data.get("text/html", "") for data in shown) >= 5, "curves, figures, runs, mistakes, predictions, comparison"
    assert not [*tmp_path.iterdir()], "the folder in which it was opened stays as it was"
    page = next(each["text"] for each in code[-1].outputs if each.output_type == "stream" and "comparison.html" in each["text"])
    folder = Path(page.strip()).parents[1]
    for loss in ("ce", "focal"):
        assert [*folder.glob(f"*-{loss}-tiny_resnet-digits")]
    shutil.rmtree(folder.parent)

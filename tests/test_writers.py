"""TensorBoard's event file and W&B's offline folder hold what the run folder holds; a writer that fails or is missing disturbs nothing."""

import contextlib
import importlib
import importlib.util
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.run.folder import RunFolder
from lab.tracking.writers import WriterThread

ROOT = Path(__file__).resolve().parents[1]
RUN = [
    *("model=tiny_resnet", "trainer.device=cpu", "loss.implementation=torch", "data.image_size=16", "data.train_share=0.1"),
    *("trainer.epochs=2", "trainer.log_every=1", "tracking.enabled=false", "tracking.model=false", "tracking.system_seconds=0.2"),
]
needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs uv sync --extra writers")
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs uv sync --extra writers")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return lambda name, *argv: importlib.import_module(name).main(list(argv))


def recorded(folder: Path) -> dict[tuple[str, int], float]:
    """Every figure of a run folder's curves, by name and step."""
    return {(name, step): value for kind, name, step, value in figures(folder) if kind == "metrics"}


def single(folder: Path) -> dict[tuple[str, int], float]:
    """The single values of its summaries, likewise."""
    return {(name, step): value for kind, name, step, value in figures(folder) if kind == "summary"}


def figures(folder: Path) -> Iterator[tuple[str, str, int, float]]:
    """Every figure of a run folder: the record's kind, name, step, value. Those of a summary have the last step that is no sample's."""
    last = 0
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] in ("metrics", "summary"):
            step = line.get("step", last)
            last = last if any(name.startswith("system/") for name in line["values"]) else step
            yield from ((line["kind"], name, step, float(value)) for name, value in line["values"].items())


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return found.Reload()


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Every scalar of TensorBoard's, each there once."""
    found = events(folder)
    points = [((name, point.step), point.value) for name in found.Tags()["scalars"] for point in found.Scalars(name)]
    assert len(points) == len(dict(points))
    return dict(points)


def wandb_records(folder: Path) -> list[Any]:
    """The records of W&B's offline files, oldest first: LevelDB's log format, in blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, place, whole = path.read_bytes(), 7, b""
        while place < len(content):
            if (left := -place % 32768) < 7:  # a header does not fit into the rest of the block
                place += left
            _, size, kind = struct.unpack_from("<IHB", content, place)
            whole += content[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # it is whole, or this was its last part
                found.append(wandb_internal_pb2.Record.FromString(whole))
                whole = b""
    return found


def wandb_figures(folder: Path) -> dict[tuple[str, int], float]:
    found = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = values.pop("step", None)
            for name, value in values.items():
                if not name.startswith("_"):
                    assert (name, step) not in found
                    found[name, step] = float(value)
    return found


@pytest.fixture(scope="module")
def by_both(tmp_path_factory):
    """Train with both writers; return the run's folder and what was said."""
    runs = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(ROOT / "experiments")
        patch.setenv("WANDB_MODE", "offline")
        words = [*RUN, f"trainer.runs={runs}", "tracking.writers=[tensorboard,wandb]"]
        assert importlib.import_module("train").main(words) == 0
    (folder,) = runs.iterdir()
    return folder, out.getvalue()


@needs_tensorboard
@needs_wandb
def test_both_hold_all_figures_and_settings_of_a_run(by_both):
    folder, _ = by_both
    wanted = recorded(folder)
    assert {"train/loss", "val/top1"} <= {name for name, _ in wanted}
    assert any(name.startswith("best") for name, _ in single(folder))
    assert scalars(folder) == pytest.approx(wanted | single(folder), rel=1e-6, nan_ok=True)
    assert wandb_figures(folder) == pytest.approx(wanted, nan_ok=True)
    assert "settings/text_summary" in events(folder).Tags()["tensors"]
    text = events(folder).Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| loss.name | ce |" in text
    assert hyper_parameters(folder)["optim.lr"].string_value == "0.001"
    (run,) = [record.run for record in wandb_records(folder) if record.WhichOneof("record_type") == "run"]
    config = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in run.config.update}
    assert config["optim.lr"] == "0.001"
    assert run.project == "lossforge"
    _, said = by_both
    assert "tensorboard --logdir" in said
    assert "wandb sync" in said


def hyper_parameters(folder: Path) -> Any:
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = events(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams


@needs_tensorboard
@needs_wandb
def test_a_continued_run_is_written_on(main, tmp_path):
    words = [*RUN, f"trainer.runs={tmp_path}", "tracking.writers=[tensorboard,wandb]"]
    assert main("train", *words, "trainer.epochs=1") == 0
    (folder,) = tmp_path.iterdir()
    assert main("train", f"resume={folder}", "trainer.epochs=2") == 0
    wanted = recorded(folder)
    assert {step for name, step in wanted if name == "val/loss"} == {3, 6}
    assert scalars(folder) == pytest.approx(wanted | single(folder), rel=1e-6, nan_ok=True)
    assert wandb_figures(folder) == pytest.approx(wanted, nan_ok=True)
    ids = {record.run.run_id for record in wandb_records(folder) if record.WhichOneof("record_type") == "run"}
    assert len(ids) == 1


@needs_tensorboard
def test_a_sample_of_the_load_does_not_move_the_step_of_the_summary(tmp_path):
    folder = RunFolder(tmp_path, "run", {})
    folder.record("start", app="train", name="run", params={"seed": "0"}, tags={})
    for step, sample in ((3, 6), (6, 7)):  # the second summary of a continued run is at step 6, where the first one was by its samples
        folder.metrics(step, {"val/top1": step / 10})
        folder.metrics(sample, {"system/cpu": 1.0})
        folder.summary({"best_top1": step / 10})
    folder.close("FINISHED")
    thread = WriterThread(folder.path, "tensorboard", "lossforge")
    thread.start()
    assert thread.close(30).startswith("tensorboard")
    found = scalars(folder.path)
    assert {step: value for (name, step), value in found.items() if name == "best_top1"} == pytest.approx({3: 0.3, 6: 0.6})


@needs_tensorboard
def test_a_writer_that_fails_is_said_and_sync_writes_the_rest(main, tmp_path, capsys):
    """The place of the event file is taken by a file of another kind."""

    def write(folder: RunFolder) -> str:
        said: list[str] = []
        folder.record("start", app="train", name="run", params={"seed": "0"}, tags={})
        thread = WriterThread(folder.path, "tensorboard", "lossforge", say=said.append)
        (folder.path / "tensorboard").write_text("in the way")
        thread.start()
        folder.metrics(1, {"train/loss": 0.5})
        folder.close("FINISHED")
        row = thread.close(30)
        assert len(said) == 1
        assert "the run goes on" in said[0]
        return row

    tree = {"trainer": {}, "model": {}, "tracking": {"writers": ["tensorboard"], "experiment": "x", "patience_seconds": 30.0}}
    folder = RunFolder(tmp_path, "run", tree)
    row = write(folder)
    assert row.startswith("incomplete: ")
    assert "experiments/sync.py" in row
    (folder.path / "tensorboard").unlink()
    assert main("sync", str(folder.path), f"tracking.uri=sqlite:///{tmp_path / 'm.db'}") == 0
    assert "tensorboard: tensorboard --logdir" in capsys.readouterr().out
    assert scalars(folder.path) == {("train/loss", 1): 0.5}


@pytest.mark.parametrize(
    ("words", "hidden", "said"),
    [
        (["tracking.writers=[tensorboard]"], "tensorboard", "tracking.writers=[tensorboard]: tensorboard is installed by: uv sync --extra"),
        (["tracking.writers=[wandb]"], "wandb", "tracking.writers=[wandb]: wandb is installed by: uv sync --extra writers"),
        (["tracking.writers=[tensorbord]"], None, "'tensorbord' is not known.\nDid you mean 'tensorboard'?"),
    ],
    ids=str,
)
def test_mistakes_are_said_before_anything_starts(main, tmp_path, monkeypatch, capsys, words, hidden, said):
    if hidden:  # as if it were not installed
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, found=importlib.util.find_spec: None if name == hidden else found(name)
        )
    assert main("train", *RUN, f"trainer.runs={tmp_path / 'runs'}", *words) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@needs_wandb
def test_a_missing_login_is_said_before_anything_starts(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main("train", *RUN, f"trainer.runs={tmp_path / 'runs'}", "tracking.writers=[wandb]") == 1
    assert "not logged in. Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline." in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@needs_tensorboard
def test_a_bad_record_keeps_no_other_back(tmp_path):
    said: list[str] = []
    folder = RunFolder(tmp_path, "run", {})
    folder.record("start", app="train", name="run", params={"seed": "0"}, tags={})
    folder.record("metrics", step=1, values={"train/loss": "abc"})
    folder.metrics(2, {"train/loss": 0.5})
    folder.close("FINISHED")
    thread = WriterThread(folder.path, "tensorboard", "lossforge", say=said.append)
    thread.start()
    assert thread.close(60).startswith("tensorboard --logdir")
    assert scalars(folder.path) == {("train/loss", 2): 0.5}
    assert said == ["tensorboard does not take a record of kind 'metrics': ValueError: could not convert string to float: 'abc'"]

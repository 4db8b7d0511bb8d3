"""A damaged metrics.jsonl is named with its line by what goes on with the run, and keeps no other record from MLflow."""

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

import sync
import train
from lab.base.errors import UserError
from lab.base.records import read_history
from lab.config.settings import load
from lab.run.active import record_start
from lab.run.folder import RunFolder

DAMAGED = {
    "truncated": b'{"kind": "metrics", "time": 1.0, "step": 1, "val\n',
    "rubbish": b"\x00\xff\xfe{\x80\n",
    "number": b"3\n",
    "list": b"[1, 2]\n",
    "deep": b"[" * 100_000 + b"\n",
    "kind": b'{"kind": ["metrics"], "time": 1.0}\n',
    "time": b'{"kind": "end", "time": "noon", "status": "FINISHED"}\n',
    "infinite time": b'{"kind": "end", "time": 1e999, "status": "FINISHED"}\n',
    "values": b'{"kind": "metrics", "time": 1.0, "step": 1, "values": [1]}\n',
    "words": b'{"kind": "summary", "time": 1.0, "values": {"best_top1": "good"}}\n',
    "nested": b'{"kind": "metrics", "time": 1.0, "step": 1, "values": {"val/loss": {"a": 1}}}\n',
    "step": b'{"kind": "metrics", "time": 1.0, "step": "one", "values": {"val/loss": 1.0}}\n',
    "tags": b'{"kind": "tags", "time": 1.0, "values": ["error"]}\n',
    "folder": b'{"kind": "resume", "time": 1.0, "tags": {}, "run_folder": 3}\n',
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three records, ended; its second line is the metrics of step 1."""
    settings = load(["model=tiny_resnet", "tracking=none"])
    made = RunFolder(tmp_path / "runs", "test", settings.tree())
    made.record("start", app="train", name="test", params=settings.flat(), tags={"monitor": "top1"})
    made.metrics(1, {"val/top1": 0.25})
    made.metrics(2, {"val/top1": 0.5})
    made.close("KILLED")
    return made.path


def damage(folder: Path, number: int, line: bytes) -> None:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[number - 1] = line
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_named_and_the_others_are_sent(folder, store, capsys, line):
    damage(folder, 2, line)
    for read in (read_history, RunFolder.reopen):
        with pytest.raises(UserError, match=r"metrics.jsonl, line 2: is damaged: a record of a run is expected\."):
            read(folder)
    assert train.main([f"resume={folder}", "trainer.device=cpu"]) == 1
    assert "metrics.jsonl, line 2: is damaged" in capsys.readouterr().err

    assert sync.main([str(folder), f"tracking.uri={store}"]) == 0
    run = MlflowClient(tracking_uri=store).get_run(json.loads((folder / "tracking.json").read_text())["run_id"])
    assert (run.data.metrics["val/top1"], run.info.status) == (0.5, "KILLED")


def test_a_run_without_its_first_record_is_incomplete(folder, store, capsys):
    damage(folder, 1, DAMAGED["rubbish"])
    assert sync.main([str(folder), f"tracking.uri={store}"]) == 1
    assert f"{folder}: incomplete: " in capsys.readouterr().out


def test_a_folder_without_its_records(folder, store, capsys):
    (folder / "metrics.jsonl").unlink()
    assert sync.main([str(folder), f"tracking.uri={store}"]) == 1
    assert f"{folder}: is not a run folder: it holds no metrics.jsonl" in capsys.readouterr().err
    assert train.main([f"resume={folder}", "trainer.device=cpu"]) == 1
    assert "a run's folder, such as runs/<run>, or one of its checkpoints is expected" in capsys.readouterr().err


def test_every_record_that_the_apps_write_is_whole(tmp_path):
    settings = load(["model=tiny_resnet", "tracking=none"])
    made = RunFolder(tmp_path, "test", settings.tree())
    record_start(made, "train", settings, "test", {})
    made.metrics(1, {"train/loss": float("nan"), "train/lr": float("inf"), "val/samples": 3})
    made.summary({"best_top1": -float("inf")})
    made.evaluation(1, {"confusion": [[1]]})
    made.close("FINISHED")
    history = read_history(made.path)
    assert (history.status, history.last["train/loss"], history.last["best_top1"]) == ("FINISHED", "nan", "-inf")

"""Which run resume=auto takes, without a training: folders of runs with the records that a training writes."""

import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lab.base.errors import UserError
from lab.base.records import read_history
from lab.config.settings import load
from lab.run.folder import RunFolder
from lab.run.resume import named, newest


@pytest.fixture
def words(tmp_path):
    return [f"trainer.runs={tmp_path / 'runs'}", "resume=auto"]


def begun(words: list[str], app: str = "train") -> RunFolder:
    """Begin a run with these settings."""
    settings = load(words)
    folder = RunFolder(Path(settings.config.trainer.runs), settings.config.name or "run", settings.tree())
    folder.record("start", app=app, name="run", params={}, tags={})
    return folder


def hold(path: Path, connection: Connection) -> None:
    """Work on a run until told."""
    RunFolder.reopen(path)
    connection.send("held")
    connection.recv()


def test_a_run_that_another_process_works_on_is_left_alone(words):
    folder = begun(words)
    folder.release()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(folder.path, theirs), daemon=True)
    process.start()
    try:
        assert ours.recv() == "held"
        assert newest(load(words)) is None
    finally:
        ours.send("go")
        process.join()
    found = newest(load(words))
    assert found is not None
    assert found.path == folder.path


def test_the_newest_unfinished_training_of_these_settings_is_taken(words):
    older, other, newer, finished = begun(words), begun([*words, "optim.lr=0.5"]), begun(words), begun(words)
    for folder, status in ((older, "KILLED"), (other, "KILLED"), (newer, "FAILED"), (finished, "FINISHED")):
        folder.close(status)
    begun(words, app="evaluate").close("KILLED")
    for more in ([], ["trainer.log_every=7"], ["trainer.save_every=3", "data.eval_batch_size=7"]):
        found = newest(load([*words, *more]))
        assert found is not None, more
        assert (found.path, found.checkpoint) == (newer.path, None)
    assert newest(load([*words, "seed=3"])) is None
    assert newest(load([*words, "name=another"])) is None


def test_a_size_that_the_images_chose_is_the_size_of_the_same_run(words, tmp_path):
    detection = [*words, "task=detection", "data=boxes", f"data.root={tmp_path}"]
    folder = begun([*detection, "data.shortest=64"])
    folder.close("KILLED")
    assert load(detection).config.data.shortest == "auto"
    found = newest(load(detection))
    assert found is not None
    assert found.path == folder.path
    assert newest(load([*detection, "data.shortest=96"])) is None
    settings, _ = named(str(folder.path), ["task=detection", f"data.root={tmp_path}"])
    assert settings.config.data.shortest == 64


def test_a_finished_run_that_was_continued_and_killed_is_taken_again(words):
    folder = begun(words)
    folder.close("FINISHED")
    assert newest(load(words)) is None
    again = RunFolder.reopen(folder.path)
    again.record("resume", step=3, tags={})
    again.release()
    found = newest(load(words))
    assert found is not None
    assert found.path == folder.path


def test_a_repeated_step_is_recorded_once_and_a_clock_that_goes_back_takes_no_time_away(words):
    folder = begun(words)
    began = folder.history.seconds
    for run in (folder, None):
        each = run or RunFolder.reopen(folder.path)
        each.metrics(1, {"a": 1.0 if run else 2.0})
        each.metrics(2, {"a": 3.0})
        each.release()
    path = folder.path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["values"]) for line in lines if line["kind"] == "metrics"] == [(1, {"a": 1.0}), (2, {"a": 3.0})]
    for line, time in zip(lines, (100.0, 160.0, 130.0), strict=True):
        line["time"] = time
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_history(folder.path).seconds == began + 60


@pytest.mark.parametrize("changed", [[], ["trainer.log_every=7"], ["trainer.save_every=3", "data.eval_batch_size=7"]], ids=str)
def test_a_finished_run_goes_on_for_a_larger_length_alone(words, changed):
    folder = begun(words)
    folder.close("FINISHED")
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "last.pt").touch()
    with pytest.raises(UserError, match=r"the run is finished. A larger trainer.epochs= trains it for longer"):
        named(str(folder.path), [f"resume={folder.path}", *changed])
    _, earlier = named(str(folder.path), [f"resume={folder.path}", "trainer.epochs=999", *changed])
    assert {"trainer.epochs", *(word.partition("=")[0] for word in changed)} == set(earlier.changed)

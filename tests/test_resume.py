"""Interrupted runs end as if they had not been: same weights and figures to the bit, one folder, one run in MLflow, nothing twice."""

import contextlib
import json
import math
import pickle
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import (
    Child,
    figures,
    full_at,
    killed_at,
    killed_in_checkpoint,
    records,
    server,
    signalled_at,
    signalled_twice_at,
)
from PIL import Image

from lab.base.errors import UserError

SETTINGS = [
    *("model=tiny_resnet", "model.drop_rate=0.2", "trainer.device=cpu", "loss=focal", "loss.implementation=torch", "optim.lr=5e-3"),
    *("data=folder", "data.image_size=32", "data.batch_size=4", "data.mixup=0.3", "data.auto_augment=rand-m5", "data.random_erase=0.3"),
    *("trainer.epochs=2", "trainer.accumulate=2", "trainer.ema=0.9", "trainer.log_every=5", "trainer.save_updates=4"),
    *("tracking.system_seconds=0.5", "tracking.model=false"),
]  # 12 updates an epoch


class Runs:
    """A folder of runs over one data set, and one MLflow store."""

    def __init__(self, root: Path) -> None:
        self.root, self.context = root, server()
        self.count = 0
        generator = torch.Generator().manual_seed(0)
        for part, count in (("train", 32), ("val", 6)):
            for name in ("cat", "dog", "owl"):
                (root / "pictures" / part / name).mkdir(parents=True)
                for i in range(count):
                    pixels = torch.randint(256, (24, 24, 3), generator=generator, dtype=torch.uint8)
                    Image.fromarray(pixels.numpy()).save(root / "pictures" / part / name / f"{i}.png")

    def words(self, name: str, *more: str) -> list[str]:
        places = [f"data.root={self.root / 'pictures'}", f"trainer.runs={self.root / name}", f"tracking.uri={self.uri}"]
        return [*SETTINGS, *places, f"name={name}", *more]

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.root / 'mlflow.db'}"

    def child(self, words: list[str], *event: Any) -> Child:
        self.count += 1
        return Child(self.context, words, self.root / f"{self.count}.txt", *event)

    def folder(self, name: str) -> Path:
        (folder,) = (self.root / name).iterdir()
        return folder

    def stored(self, name: str) -> Any:
        """(client, the only run of this name in the store)"""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name("lossforge")
        (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
        return client, run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With one run, `whole`, that nothing befell."""
    runs = Runs(tmp_path_factory.mktemp("resume"))
    status, output = runs.child(runs.words("whole", "data.workers=0")).ended()
    assert status == 0, output
    return runs


def state(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"{name}.pt", weights_only=True)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict):
        assert set(one) == set(other), path
        return [each for key in one for each in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)):
        return [each for i, (a, b) in enumerate(zip(one, other, strict=True)) for each in differences(a, b, f"{path}/{i}")]
    return [] if one == other else [path]


def assert_as_the_whole_run(runs: Runs, name: str) -> None:
    folder, whole = runs.folder(name), runs.folder("whole")
    for part in ("last", "best"):
        ours, wanted = state(folder, part), state(whole, part)
        apart = {"config", "signature", "seal", "tracking", "clock", "values"}  # names, places and times
        kept = [{key: value for key, value in each.items() if key not in apart} for each in (ours, wanted)]
        for each in kept:
            for rng in each.get("rng", []):
                rng.pop("python", None)  # MLflow's thread draws from it; our training does not
        assert differences(*kept) == []
    assert figures(folder) == figures(whole)
    for picture in ("confusion_matrix.png", "calibration.png"):
        assert (folder / picture).read_bytes() == (whole / picture).read_bytes()
    assert len(figures(whole)) > 50
    client, run = runs.stored(name)
    assert run.info.status == "FINISHED"
    assert "resumable" not in run.data.tags
    in_file: dict[str, list[Any]] = {}
    for record in (*records(folder, "metrics"), *records(folder, "summary")):
        for key, value in record["values"].items():
            in_file.setdefault(key, []).append((record.get("step", 0), value))
    for key, points in in_file.items():
        assert len({step for step, _ in points}) == len(points), f"{key} has a step twice"
    for key, points in in_file.items():
        assert sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, key)) == sorted(points), key
    assert json.loads((folder / "tracking.json").read_text())["offset"] == (folder / "metrics.jsonl").stat().st_size
    assert not list(folder.rglob(".*"))


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(runs):
    child = runs.child(runs.words("killed", "data.workers=0"), killed_at, 7)
    assert child.ended()[0] == -signal.SIGKILL
    folder = runs.folder("killed")
    assert state(folder, "last")["updates"] == 4
    assert [record["step"] for record in records(folder, "metrics") if "train/loss" in record["values"]] == [5]

    child = runs.child([f"resume={folder}", "data.workers=2"], killed_in_checkpoint)
    assert child.ended()[0] == -signal.SIGKILL
    assert state(folder, "last")["updates"] == 4, "the last good one is intact"
    assert [path.name for path in (folder / "checkpoints").glob(".*")] == [".unfinished-last.pt"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "metrics", "ti')  # as if it had been killed in a record as well

    status, output = runs.child([f"resume={folder / 'checkpoints' / 'last.pt'}", "data.workers=1"]).ended()
    assert status == 0, output
    assert "after update 4 of 24" in output
    assert_as_the_whole_run(runs, "killed")
    assert [record["step"] for record in records(folder, "resume")] == [4, 4]
    assert runs.stored("killed")[1].info.run_id == state(folder, "last")["tracking"]["run_id"]


def wait_for_status(runs: Runs, name: str, status: str) -> None:
    deadline = time.monotonic() + 600
    while True:
        with contextlib.suppress(ValueError):  # the run is not in the store yet
            if runs.stored(name)[1].info.status == status:
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_signals_end_a_run_after_a_checkpoint_and_auto_finds_it(runs):
    words = runs.words("signals", "data.workers=2", "resume=auto")
    child = runs.child(words, killed_at, 2)  # before there is a checkpoint
    status, output = child.ended()
    assert status == -signal.SIGKILL
    assert "this is a new one" in output
    folder = runs.folder("signals")
    for number, at in ((signal.SIGINT, 6), (signal.SIGHUP, 10), (signal.SIGTERM, 14)):
        child = runs.child(words, signalled_at, at)
        assert child.heard() == at
        wait_for_status(runs, "signals", "RUNNING")
        child.send(number)
        status, output = child.ended()
        assert status == 128 + number, output
        assert "Traceback" not in output
        assert f"resume={folder.name}" in output.replace(f"{folder.parent.name}/", "")
        assert state(folder, "last")["updates"] == at + 1
        assert [record["status"] for record in records(folder, "end")][-1] == "KILLED"
        _, run = runs.stored("signals")
        assert (run.info.status, run.data.tags["resumable"]) == ("KILLED", "true"), output
    status, output = runs.child([*words, "data.workers=0"]).ended()
    assert status == 0, output
    assert_as_the_whole_run(runs, "signals")


def test_a_second_signal_ends_a_run_at_once(runs):
    child = runs.child(runs.words("impatient", "data.workers=0"), signalled_twice_at, 2)
    assert child.heard() == 2
    child.send(signal.SIGINT)
    assert child.heard() == 2
    child.send(signal.SIGINT)
    status, output = child.ended()
    assert status == 130, output
    assert "Traceback" not in output
    folder = runs.folder("impatient")
    assert [record["status"] for record in records(folder, "end")] == ["KILLED"]
    assert not (folder / "checkpoints").exists()


@pytest.fixture
def sync(warm: Any) -> Callable[[str], tuple[int, str]]:
    """Send a folder to its store; return the exit status and the output."""
    script = Path(__file__).resolve().parents[1] / "experiments" / "sync.py"

    def sync(*words: str) -> tuple[int, str]:
        done = warm.run(str(script), words, script.parents[1], timeout=600)
        return done.returncode, done.stdout

    return sync


@pytest.mark.slow
def test_a_killed_run_is_marked_and_its_copy_gets_a_run_of_its_own(runs, sync):
    """Killed, copied, the copy continued to its end, then the original."""
    child = runs.child(runs.words("twins", "data.workers=0"), killed_at, 7)
    assert child.ended(600)[0] == -signal.SIGKILL
    folder = runs.folder("twins")
    copy = runs.root / "twins-copied" / "copy"
    shutil.copytree(folder, copy)
    status, output = sync(str(folder), str(copy))
    assert status == 0, output
    assert f"{folder}: its process was killed: the run is marked KILLED" in output
    assert f"{copy}: left alone: it is a copy of {folder}" in output
    client, original = runs.stored("twins")
    assert (original.info.status, original.data.tags["resumable"]) == ("KILLED", "true")
    assert original.data.tags["error"] == "its process was killed"
    last = records(folder, "metrics")[-1]["time"]
    assert original.info.end_time == int(last * 1000)
    assert sync(str(folder))[1].startswith(f"{folder}: complete")

    status, output = runs.child([f"resume={copy}"]).ended(600)
    assert status == 0, output
    assert f"a copy of {folder}: it gets a run of its own in MLflow" in " ".join(output.split())
    after = client.get_run(original.info.run_id)
    assert after.to_dictionary() == original.to_dictionary()
    found = client.search_runs([original.info.experiment_id], "attributes.run_name = 'twins'")
    (fork,) = (run for run in found if run.info.run_id != original.info.run_id)
    assert fork.data.tags["forked_from"] == original.info.run_id
    assert fork.data.tags["forked_from.folder"] == folder.name
    assert (fork.info.status, fork.data.params) == ("FINISHED", original.data.params)
    assert figures(copy) == figures(runs.folder("whole"))
    for name in ("train/loss", "val/top1"):
        stored = sorted((point.step, point.value) for point in client.get_metric_history(fork.info.run_id, name))
        assert stored == sorted((step, value) for (key, step), value in figures(copy).items() if key == name)
    assert state(copy, "last")["tracking"]["run_id"] == fork.info.run_id
    assert sync(str(copy)) == (0, f"{copy}: complete, run {fork.info.run_id}\nnothing is missing\n")

    (copy / "tracking.json").unlink()  # and it is found again without it
    status, output = sync(str(copy))
    assert (status, f"{copy}: complete, run {fork.info.run_id}" in output) == (0, True), output
    assert len(client.search_runs([original.info.experiment_id], "attributes.run_name = 'twins'")) == 2

    moved = folder.rename(runs.root / "twins-copied" / "moved")
    status, output = runs.child([f"resume={moved}"]).ended(600)
    assert status == 0, output
    assert records(moved, "fork") == []
    assert client.get_run(original.info.run_id).info.status == "FINISHED"
    assert len(client.search_runs([original.info.experiment_id], "attributes.run_name = 'twins'")) == 2


def test_a_run_at_work_is_not_marked_as_killed(runs):
    from lab.run.folder import end_if_killed, gone, running

    child = runs.child(runs.words("working", "data.workers=0"), signalled_at, 3)
    assert child.heard(600) == 3
    folder = runs.folder("working")
    assert (running(folder), gone(folder), end_if_killed(folder)) == (True, False, False)
    child.send(signal.SIGTERM)
    assert child.ended(600)[0] == 143
    assert (running(folder), gone(folder), end_if_killed(folder)) == (False, True, False)
    assert [record["status"] for record in records(folder, "end")] == ["KILLED"]


def test_a_clock_that_is_set_back_makes_no_record_earlier(tmp_path, monkeypatch):
    from lab.base.records import read_history
    from lab.run.folder import RunFolder

    folder = RunFolder(tmp_path, "test", {})
    folder.record("start", app="train", name="test", params={}, tags={})
    first = read_history(folder.path).time
    monkeypatch.setattr(time, "time", lambda: first - 7200)
    folder.metrics(1, {"a": 1.0})
    folder.close("KILLED")
    folder = RunFolder.reopen(folder.path)
    folder.record("resume", step=0, tags={})
    folder.close("FINISHED")
    times = [json.loads(line)["time"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert times == sorted(times)
    assert times[-1] < first + 60


def test_a_full_disk_leaves_the_last_good_checkpoint(runs):
    child = runs.child(runs.words("full", "data.workers=0"), full_at, 10, 3_000_000)
    status, output = child.ended()
    assert status == 1
    folder = runs.folder("full")
    last = folder / "checkpoints" / "last.pt"
    assert f"error: {last}: cannot be written: File too large. Make room there" in output
    assert "Traceback" not in output
    assert state(folder, "last")["updates"] == 8
    assert {path.name for path in last.parent.iterdir()} == {"last.pt"}
    assert records(folder, "end")[-1]["status"] == "FAILED"
    _, run = runs.stored("full")
    assert run.info.status == "FAILED"
    assert "last.pt: cannot be written" in run.data.tags["error"]
    status, output = runs.child([f"resume={folder}", "data.workers=0"]).ended()
    assert status == 0, output
    assert_as_the_whole_run(runs, "full")


def test_a_record_that_does_not_fit_is_not_half_there(run_folder):
    run_folder.metrics(1, {"a": 1.0})
    file = run_folder.path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written: File too large. Make room there"):
            run_folder.metrics(2, {"a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run_folder.metrics(3, {"a": 3.0})
    assert [record["step"] for record in records(run_folder.path, "metrics")] == [1, 3]


def test_folders_that_cannot_be_written_are_named(tmp_path):
    from lab.run import checkpoint
    from lab.run.folder import RunFolder

    (tmp_path / "file").touch()
    for runs in (tmp_path / "file" / "runs", Path("/proc/runs")):
        with pytest.raises(UserError, match=rf"trainer.runs={runs}: cannot be written: .* Choose another folder"):
            RunFolder(runs, "name", {})
    with pytest.raises(UserError, match=r"last.pt: cannot be written: Not a directory. Make it writable"):
        checkpoint.save({}, tmp_path / "file" / "last.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"full: cannot be written: File too large. Make room there"):
            checkpoint.save({"a": torch.zeros(10_000)}, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lr=0.1"], ["optim.lr=0.1, while the run has 0.005"]),
        (["loss=ce", "seed=1"], ["loss.name=ce, while the run has focal", "loss.gamma=nothing", "seed=1"]),
        (["trainer.epochs=1"], ["trainer.epochs=1, while the run has 2", "may grow"]),
        (["trainer.device=cpu"], ["the run is finished", "trainer.epochs="]),
        (["optim.lrr=0.1"], ["Did you mean 'lr'"]),
    ],
    ids=str,
)
def test_settings_of_another_run_are_refused(runs, words, said):
    from lab.run.resume import named

    folder = runs.folder("whole")
    with pytest.raises(UserError) as caught:
        named(str(folder), [f"resume={folder}", *words])
    assert [text for text in said if text not in str(caught.value)] == [], str(caught.value)


def test_what_is_no_run_is_refused(runs, tmp_path):
    from lab.run.resume import load_state, named

    with pytest.raises(UserError, match="a run's folder"):
        named(str(tmp_path), [])
    _, earlier = named(str(runs.folder("whole") / "checkpoints" / "best.pt"), ["trainer.epochs=3"])
    assert earlier.changed == {"trainer.epochs": "3"}
    assert pickle.loads(pickle.dumps(earlier)) == earlier  # torchrun's first process sends it to the others
    with pytest.raises(UserError, match="has the weights alone"):
        load_state(earlier)


def test_a_finished_run_trains_for_longer(runs, make_trainer):
    """And the schedule is that of the new length."""
    from lab.run.resume import load_state, named
    from lab.training.assemble import assemble

    settings, earlier = named(str(runs.folder("whole")), ["trainer.epochs=4"])
    trainer = assemble(settings)
    trainer.restore(load_state(earlier))
    assert (trainer.done, trainer.updates, trainer.epoch_ended) == (24, 48, True)
    assert trainer.begin_epoch()
    assert (trainer.epoch, trainer.batch) == (3, 0)
    assert trainer.updater.lr == pytest.approx(
        5e-3 * (1 + math.cos(math.pi * 40 / 88)) / 2
    )  # of 96 updates, the first 8 of which are the warm-up

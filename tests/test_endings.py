"""However a run ends, its folder and the store say how, and the exit status as well."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from words import TINY

from lab.base.files import UNFINISHED
from lab.base.process import Stop
from lab.sweep.stop import Stop as SweepStop

ROOT = Path(__file__).resolve().parents[1]

WORDS = [*TINY, "trainer.log_every=1", "loss.implementation=torch"]

BROKEN = """
import sys
sys.path.insert(0, "experiments")
from lab.training.trainer import Trainer
import train
update = Trainer.update
def broken(self, group):
    if self.done == {at}:
        raise ValueError("the disk is on fire")
    update(self, group)
Trainer.{method} = broken
sys.exit(train.main(sys.argv[1:]))
"""


def run_changed(clone, script, *words):
    """Run a script that changes the app and then starts it."""
    (clone.path / "changed.py").write_text(script)
    return clone.warm.run("changed.py", words, clone.path, apart=True)


def the_run(clone):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{clone.path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("lossforge").experiment_id])
    (folder,) = clone.run_folders()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return run, records


@pytest.mark.parametrize(
    ("method", "at"), [("update", 5), ("update", 0), ("finish", None)], ids=["in a step", "in the first step", "in closing"]
)
def test_a_fault_ends_the_run_as_failed(clone, method, at):
    script = (
        BROKEN.format(method=method, at=at) if method == "update" else BROKEN.format(method=method, at="self.done").replace(", group", "")
    )
    words = [*WORDS, "trainer.max_updates=8", "tracking.model=false"]
    done = run_changed(clone, script, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: the disk is on fire" in done.stderr
    assert "in broken" in done.stderr
    assert "failed" in done.stdout
    run, records = the_run(clone)
    assert run.info.status == records[-1]["status"] == "FAILED"
    assert run.data.tags["error"] == "ValueError: the disk is on fire"
    assert len([each for each in records if "train/loss" in each.get("values", {})]) == (8 if method == "finish" else at)


CLOSING = """
import os, signal, sys
sys.path.insert(0, "experiments")
from lab.run.folder import RunFolder
import train
close = RunFolder.close
def closed(self, *given):
    close(self, *given)
    os.kill(os.getpid(), signal.SIGINT)
RunFolder.close = closed
sys.exit(train.main(sys.argv[1:]))
"""


def test_ctrl_c_while_the_end_is_recorded_loses_nothing(clone):
    words = [*WORDS, "data.train_share=0.1", "trainer.epochs=1", "tracking.model=false"]
    done = run_changed(clone, CLOSING, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run folder" in done.stdout
    run, records = the_run(clone)
    assert run.info.status == records[-1]["status"] == "FINISHED"


def test_nohup_keeps_a_run_going_when_its_terminal_is_closed(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a process
    stop = Stop(checkpoint_first=True)
    with SweepStop(tmp_path).by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not SweepStop(tmp_path).requested
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.wanted
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wanted


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_ends_with_a_checkpoint(tmp_path):
    """The kernel sends SIGHUP, and each further line of output is an error."""
    words = [*WORDS, "trainer.epochs=500", f"trainer.runs={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, str(ROOT / "experiments/train.py"), *words])
    os.set_blocking(terminal, False)
    shown, deadline = b"", time.monotonic() + 600
    while "train/loss" not in recorded(tmp_path):
        with contextlib.suppress(BlockingIOError):
            shown += os.read(terminal, 65536)
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["status"] == "KILLED"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.pt"}
    assert "resume=" in (folder / "log.txt").read_text().splitlines()[-1]


MOMENTS: dict[str, Callable[[Path, int], bool]] = {
    "in the imports": lambda path, pid: "_yaml" in loaded(pid),
    "in torch's import": lambda path, pid: "libtorch_cpu" in loaded(pid),
    "as the data is read": lambda path, pid: "sklearn" in loaded(pid),
    "the folder is made": lambda path, pid: any(path.glob("runs/*/config.yaml")),
    "before the first update": lambda path, pid: "start" in recorded(path),
    "in an epoch": lambda path, pid: "train/loss" in recorded(path),
    "at an evaluation": lambda path, pid: "evaluation" in recorded(path),
    "at a checkpoint": lambda path, pid: any(path.glob("runs/*/checkpoints/*.pt")),
    "at the pictures": lambda path, pid: any(path.glob("runs/*/*.png")),
    "while MLflow gets the rest": lambda path, pid: "FINISHED" in recorded(path),
}
"""When Ctrl-C is pressed: whether it is time, by what is on disk and in the process."""
OF_CI = ("in torch's import", "the folder is made", "at an evaluation", "at the pictures")
IN_IMPORTS = ("in the imports", "in torch's import", "as the data is read")


def loaded(pid):
    return Path(f"/proc/{pid}/maps").read_text()


def recorded(path):
    return "".join(file.read_text() for file in path.glob("runs/*/metrics.jsonl"))


@pytest.mark.parametrize("moment", [pytest.param(moment, marks=[pytest.mark.slow] * (moment in OF_CI)) for moment in MOMENTS])
def test_ctrl_c_ends_in_a_line_at_any_moment_and_the_run_goes_on(clone, moment):
    words = [*WORDS, "data.train_share=0.1", "trainer.epochs=2", "tracking.model=false"]
    process, began = clone.start(*words, fresh=moment in IN_IMPORTS), time.monotonic()
    while not MOMENTS[moment](clone.path, process.pid):
        assert process.poll() is None
        assert time.monotonic() < began + 600
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    said = output.splitlines()
    assert "Traceback" not in output
    assert not [name for name in clone.contents() if UNFINISHED in name and "mlflow.db" not in name]
    if not (clone.path / "runs").exists():
        assert (process.returncode, said[-1]) == (130, "interrupted before it began")
        assert not (clone.path / "mlflow.db").exists()
        return
    if process.returncode:
        assert process.returncode == 130, output
        (folder,) = clone.run_folders()
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if "incomplete: " not in output:
            assert the_run(clone)[0].info.status == records[-1]["status"]
        if records[-1]["status"] == "KILLED":
            assert said[-1] == f"to go on: uv run experiments/train.py resume=runs/{clone.run_folders()[0].name}"
    done = clone.run(*words, "resume=auto")
    assert done.status == 0, done.output
    folders = clone.run_folders()
    ends = [json.loads(line)["status"] for line in recorded(clone.path).splitlines() if '"kind": "end"' in line]
    assert ends[-1] == "FINISHED"
    assert len(folders) == (2 if ends[0] == "FINISHED" else 1)


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_a_training(tmp_path):
    """As in `train.py ... | head -1`."""
    words = ["experiment=quick", "trainer.epochs=2", "data.train_share=0.3", f"trainer.runs={tmp_path}/runs", "tracking=none"]
    process = subprocess.Popen([sys.executable, str(ROOT / "experiments/train.py"), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "training samples" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=600) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["status"] == "FINISHED"
    assert (folder / "checkpoints" / "best.pt").is_file()

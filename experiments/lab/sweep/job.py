"""One job of a sweep: a run of train.py in its own process; run folders tell whether to start, continue or skip it."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import yaml

from lab.base.errors import UserError
from lab.base.files import open_to_append, read_text, try_lock
from lab.base.formats import visible
from lab.base.paths import ROOT
from lab.base.process import ENDING
from lab.base.records import History, read_history
from lab.config.schema import TrainConfig
from lab.config.settings import Settings, load, quoted
from lab.run.active import record_start, write_error
from lab.run.folder import RunFolder, running
from lab.sweep.plan import is_tracking, runs_of
from lab.sweep.stop import Stop
from lab.tracking.uploader import MlflowUploader, tracking_uri

PLAN = "sweep.yaml"
SECONDS_BETWEEN_LOOKS = 0.5
BYTES_KEPT = 20_000
LIBC, SET_DEATH_SIGNAL = ctypes.CDLL(None), 1  # loaded here, because nothing may be loaded between fork and exec
STOPPED = tuple(128 + number for number in ENDING)  # exit statuses of train.py after a signal


def run_job(sweep: str, gpus: Sequence[str], shown: bool, watched: bool, config: Any) -> None:
    """Run the job number `config.job` of the sweep in the folder `sweep`; called by a launcher.

    Args:
        gpus: the host's GPUs; each parallel job takes one. Empty: CUDA_VISIBLE_DEVICES stays as it is.
        shown: whether the run writes to the terminal, or to a file in the sweep's folder.
        watched: whether the sweep's process is on this host, so that the job can end when that process has ended.
    """
    folder = Path(sweep)
    jobs = yaml.safe_load(read_text(folder / PLAN))["jobs"]
    name, overrides = jobs[config.job]["name"], jobs[config.job]["words"]
    stop = Stop(folder, watched=watched)
    title = f"job {config.job + 1}/{len(jobs)} {name}"
    if stop.requested:
        return
    if (lock := try_lock(folder / ".locks" / name)) is None:
        print(f"{title}: is running in another process", flush=True)
        return
    with lock:
        try:
            settings = load([*overrides, f"name={quoted(name)}", f"trainer.runs={quoted(folder)}"])
        except UserError as error:
            print(f"{title}: {error}", flush=True)
            return
        runs = runs_of(folder, name, settings.tree())
        if done := [run for run in runs if run.status == "FINISHED"]:
            print(f"{title}: was finished before, {done[-1].path.name}", flush=True)
            return
        if runs and running(runs[-1].path):
            print(f"{title}: is running in another process", flush=True)
            return
        Attempt(folder, name, settings, runs, title).run(overrides, lock, gpus, shown, stop)


class Attempt:
    """One process and its run. `runs`: the runs of earlier attempts."""

    def __init__(self, sweep: Path, name: str, settings: Settings[TrainConfig], runs: list[History], title: str) -> None:
        self.sweep, self.name, self.settings, self.runs, self.title = sweep, name, settings, runs, title
        # a run whose process did not begin has nothing to go on with, not even the name of its score
        self.resumed = runs[-1] if runs and runs[-1].status in (None, "KILLED") and runs[-1].monitor else None
        self.size = self.resumed.size if self.resumed else 0
        self.said = b""  # the end of what the process wrote to stderr

    def run(self, overrides: list[str], lock: IO[bytes], gpus: Sequence[str], shown: bool, stop: Stop) -> None:
        if self.resumed:
            print(f"{self.title}: continues {self.resumed.path.name}", flush=True)
            overrides = [f"resume={quoted(self.resumed.path)}", *(word for word in overrides if is_tracking(word))]
        else:
            print(f"{self.title}: {' '.join(overrides)}", flush=True)
            overrides = [*overrides, f"name={quoted(self.name)}", f"trainer.runs={quoted(self.sweep)}"]
        slot, env = self._slot(gpus)
        with slot or nullcontext():
            status = self._process(overrides, env, [each.fileno() for each in (lock, slot) if each], shown, stop)
            run = self._settled(status)
        score = f", {run.monitor} {run.score:.4g}" if run.score is not None else ""
        print(visible(f"{self.title}: {(run.status or 'cut off').lower()}{score}{f', {run.error}' if run.error else ''}"), flush=True)

    def _slot(self, gpus: Sequence[str]) -> tuple[IO[bytes] | None, dict[str, str]]:
        """Lock the lowest number that no running job of this host has; return the lock, and an environment with this number's GPU."""
        if not gpus or self.settings.config.trainer.device not in ("auto", "cuda"):
            return None, {}
        number = 0
        while (slot := try_lock(self.sweep / ".locks" / f".{os.uname().nodename}-{number}")) is None:
            number += 1
        return slot, {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}

    def _process(self, overrides: list[str], env: dict[str, str], locks: list[int], shown: bool, stop: Stop) -> int:
        """Run train.py until it ends or the sweep is asked to stop; return its exit status."""
        command = [sys.executable, str(ROOT / "experiments" / "train.py"), *overrides]
        # its own session, so that Ctrl-C reaches it only through `stop`, once
        options: dict[str, Any] = {"env": os.environ | env, "pass_fds": locks, "start_new_session": True, "stderr": subprocess.PIPE}
        options["preexec_fn"] = _end_with_parent
        with self._output(shown) as output:
            process = subprocess.Popen(command, stdout=None if shown else output, **options)
            copying = threading.Thread(target=self._copy, args=(process.stderr, output), daemon=True)
            copying.start()
            told = ""
            try:
                while process.poll() is None:
                    if (wish := stop.requested) and wish != told:
                        told = wish
                        process.terminate() if wish == "stop" else os.killpg(process.pid, signal.SIGKILL)
                    try:
                        process.wait(SECONDS_BETWEEN_LOOKS)
                    except subprocess.TimeoutExpired:
                        continue
            finally:  # a launcher may raise an exception here, as submitit does before a time limit
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            copying.join(5)  # a child of the run that outlives it may keep the pipe open
        return process.returncode

    def _output(self, shown: bool) -> IO[bytes]:
        if shown:
            return os.fdopen(os.dup(sys.stderr.fileno()), "wb", buffering=0)
        (self.sweep / "logs").mkdir(exist_ok=True)
        return open_to_append(self.sweep / "logs" / f"{self.name}.log")

    def _copy(self, source: IO[bytes], output: IO[bytes]) -> None:
        while text := os.read(source.fileno(), 65536):
            self.said = (self.said + text)[-BYTES_KEPT:]
            output.write(text)

    def _settled(self, status: int) -> History:
        """Return the attempt's run; if its process did not record how it ended, do so for it."""
        known = {run.path for run in self.runs}
        new = [run for run in runs_of(self.sweep, self.name, self.settings.tree()) if run.path not in known]
        run = new[-1] if new else read_history(self.resumed.path) if self.resumed else None
        if run and run.status and (new or run.size > self.size):
            return run
        if run:
            folder = RunFolder.reopen(run.path)
        else:
            folder = RunFolder(self.sweep, self.name, self.settings.tree())
            record_start(folder, "train", self.settings, self.name, {})
        write_error(folder, self.said.decode(errors="replace") or f"exit status {status}\n")
        folder.record("tags", values={"error": self._reason(status)})
        folder.close("KILLED" if status < 0 or status in STOPPED else "FAILED")
        tracking = self.settings.config.tracking
        if tracking.enabled:
            uploader = MlflowUploader(folder.path, tracking_uri(tracking), tracking)
            uploader.start()
            uploader.close()
        return read_history(folder.path)

    def _reason(self, status: int) -> str:
        if status == -signal.SIGTERM and Stop(self.sweep).requested:
            return "stopped before it began"
        if status < 0:
            return f"killed by signal {-status}"
        lines = [line.strip() for line in self.said.decode(errors="replace").splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else f"exit status {status}")
        return said.removeprefix("error: ")[:500]


def _end_with_parent() -> None:
    """Let the system send SIGTERM to this process when its parent dies, so that the run ends with a checkpoint."""
    LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGTERM)

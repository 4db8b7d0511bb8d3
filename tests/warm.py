"""A process that has imported what the apps import, and forks to run one: an app's imports are two thirds of a short run's time.

The fork is a process of its own, with the script's arguments, folder and environment. What is imported beforehand is no code of this
project's apps: a fork imports `lab` from the clone that it runs in. Run as a script, this file is that process.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

BEFOREHAND = (
    "pandas", "torch", "torch._dynamo", "torch.utils.data", "torchvision", "torchvision.datasets", "torchvision.transforms.v2",
    "torchvision.models.detection", "torchvision.utils", "timm", "timm.data", "timm.optim", "timm.scheduler", "timm.utils", "hydra",
    "hydra._internal.config_loader_impl", "omegaconf", "rich.table", "mlflow", "mlflow.pyfunc", "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store", "mlflow.system_metrics.metrics", "alembic.command", "sqlalchemy.dialects.sqlite",
    "sklearn.datasets", "scipy.stats", "matplotlib.pyplot", "lossforge.losses",
)  # fmt: skip


FORKS_LOSE_THE_GPU = Path("/dev/nvidiactl").exists()
"""A process that has asked for GPUs cannot use them in its forks, and imports may ask: there each run is a new Python."""


class Ran(NamedTuple):
    """How a script ended. seconds: of processor time."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Warm:
    """The process, which starts at the first run."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, script: str, words: Sequence[str], cwd: Path, timeout: float = 240, apart: bool = False) -> Ran:
        """Run a script to its end. apart: whether stderr is not written into stdout."""
        if FORKS_LOSE_THE_GPU:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if apart else subprocess.STDOUT}
            done = subprocess.run([sys.executable, script, *words], cwd=cwd, env=self.env, text=True, timeout=timeout, **streams)
            more = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = more.ru_utime + more.ru_stime - used.ru_utime - used.ru_stime
            return Ran(done.returncode, done.stdout, done.stderr or "", seconds)
        if self.process is None:
            self.socket, theirs = socket.socketpair()
            command = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            theirs.close()
        asked = json.dumps({"script": script, "words": list(words), "cwd": str(cwd)}).encode()
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            fds = [stdout.fileno(), (stderr if apart else stdout).fileno()]
            socket.send_fds(self.socket, [len(asked).to_bytes(8, "big")], fds)
            self.socket.sendall(asked)
            pid = received(self.socket)
            late = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
            late.start()
            status, seconds = received(self.socket)
            late.cancel()
            texts = []
            for stream in (stdout, stderr):
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
        return Ran(status, *texts, seconds)

    def close(self) -> None:
        if self.process is not None:
            self.socket.close()
            self.process.wait(20)


def received(place: socket.socket) -> Any:
    text = b""
    while not text.endswith(b"\n"):
        piece = place.recv(1)
        if not piece:
            raise EOFError("the process that forks has ended")
        text += piece
    return json.loads(text)


def serve(place: socket.socket) -> None:
    for name in BEFOREHAND:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        size, fds, _, _ = socket.recv_fds(place, 8, 2)
        if not size:
            return
        text, length = b"", int.from_bytes(size, "big")
        while len(text) < length:
            text += place.recv(length - len(text))
        asked = json.loads(text)
        pid = os.fork()
        if not pid:
            place.close()
            run_and_exit(fds, **asked)
        for fd in fds:
            os.close(fd)
        place.sendall(f"{pid}\n".encode())
        _, status, used = os.wait4(pid, 0)
        place.sendall(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]).encode() + b"\n")


def run_and_exit(fds: list[int], script: str, words: list[str], cwd: str) -> None:
    """Run a script as Python would, and end this process. fds: become stdout and stderr."""
    status = 1
    try:
        for fd, place in zip(fds, (1, 2), strict=True):
            os.dup2(fd, place)
            os.close(fd)
        os.chdir(cwd)
        sys.argv, sys.orig_argv = [script, *words], [sys.executable, script, *words]
        sys.path[0] = str(Path(script).resolve().parent)
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=script, __builtins__=__builtins__)
        sys.modules["__main__"] = main
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

"""A process that has imported what the apps import, and forks to run one: an app's imports are two thirds of a short run's time.

The fork is a process of its own, with the script's arguments, folder and environment. What is imported beforehand is no code of this
project's apps: a fork imports `lab` from the clone that it runs in. Run as a script, this file is that process.

What another program starts, such as torchrun its ranks, is a fork as well where that program takes `warm_python.py` for Python.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mlflow_tables import make_tables

BEFOREHAND = (
    "pandas", "torch", "torch._dynamo", "torch.export._trace", "torch.export.pt2_archive", "torch.utils.data", "torch.utils.flop_counter",
    "torchvision", "torchvision.datasets", "torchvision.transforms.v2", "torchvision.models.detection", "torchvision.utils",
    "timm", "timm.data", "timm.optim", "timm.scheduler", "timm.utils", "hydra", "hydra._internal.config_loader_impl", "omegaconf",
    "rich.table", "rich.progress", "mlflow", "mlflow.pyfunc", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store", "mlflow.system_metrics.metrics", "mlflow.system_metrics.metrics.gpu_monitor",
    "mlflow.system_metrics.metrics.cpu_monitor", "mlflow.system_metrics.metrics.disk_monitor",
    "mlflow.system_metrics.metrics.network_monitor", "mlflow.utils.search_logged_model_utils", "alembic.command", "alembic.config",
    "sqlalchemy.dialects.sqlite", "sklearn.datasets", "sklearn.model_selection", "scipy.stats", "matplotlib.pyplot",
    "matplotlib.backends.backend_agg", "PIL.JpegImagePlugin", "PIL.GifImagePlugin", "pyarrow.pandas_compat", "triton.experimental.gluon",
    "lossforge.losses", "lossforge.kernels.classes.rowwise.launch", "lossforge.kernels.formulas.softmax",
    "torch.distributed.launcher.api", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict",
)  # fmt: skip


FORKS_LOSE_THE_GPU = Path("/dev/nvidiactl").exists()
"""A process that has asked for GPUs cannot use them in its forks, and imports may ask: there each run is a new Python."""


class Ran(NamedTuple):
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


class Process:
    """A fork that runs a script, used as a subprocess.Popen."""

    def __init__(self, warm: "Warm", pid: int, stdout: IO[str] | None = None) -> None:
        self.warm, self.pid, self.stdout = warm, pid, stdout
        self.returncode: int | None = None
        self.end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            os.close(self.end)
            self.returncode = self.warm.ask({"ended": self.pid})
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        assert self.stdout is not None
        stdout, read = self.stdout, list[str]()
        reader = threading.Thread(target=lambda: read.append(stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if not read:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        stdout.close()
        self.wait(timeout)
        return read[0], None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The process, which starts at the first run."""

    def __init__(self, env: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="warm")
        self.env = env | {"WARM_SOCKET": f"{self.folder.name}/socket", "WARM_PYTHON": sys.executable}
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        if self.process is None:
            self.socket, theirs = socket.socketpair()
            with theirs, socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self.env["WARM_SOCKET"])
                listener.listen()
                fds = theirs.fileno(), listener.fileno()
                command = [sys.executable, __file__, *map(str, fds)]
                self.process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, pass_fds=fds)

    def python(self) -> str:
        """Return a program that runs scripts and modules as Python does, in an environment with this one's WARM_SOCKET."""
        if FORKS_LOSE_THE_GPU:
            return sys.executable
        self.begin()
        return str(Path(__file__).with_name("warm_python.py"))

    def ask(self, asked: dict[str, Any], *fds: int) -> Any:
        self.begin()
        text = json.dumps(asked).encode()
        socket.send_fds(self.socket, [len(text).to_bytes(8, "big")], fds)
        self.socket.sendall(text)
        return received(self.socket)

    def start(self, script: str, words: Sequence[str], cwd: Path) -> "Process | subprocess.Popen[str]":
        """Start a script, and give what it prints as a stream."""
        if FORKS_LOSE_THE_GPU:
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            return subprocess.Popen([sys.executable, script, *words], cwd=cwd, env=self.env, **streams)
        ours, theirs = os.pipe()
        pid = self.ask({"script": script, "words": list(words), "cwd": str(cwd)}, theirs, theirs)
        os.close(theirs)
        return Process(self, pid, open(ours, encoding="utf-8"))

    def run(self, script: str, words: Sequence[str], cwd: Path, timeout: float = 600, apart: bool = False) -> Ran:
        """Run a script to its end. apart: whether stderr is not written into stdout."""
        if FORKS_LOSE_THE_GPU:
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if apart else subprocess.STDOUT}
            done = subprocess.run([sys.executable, script, *words], cwd=cwd, env=self.env, text=True, timeout=timeout, **streams)
            return Ran(done.returncode, done.stdout, done.stderr or "")
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            fds = [stdout.fileno(), (stderr if apart else stdout).fileno()]
            process = Process(self, self.ask({"script": script, "words": list(words), "cwd": str(cwd)}, *fds))
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            texts = []
            for stream in (stdout, stderr):
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
        return Ran(status, *texts)

    def close(self) -> None:
        if self.process is not None:
            self.socket.close()
            self.process.wait(20)
        self.folder.cleanup()


def received(place: socket.socket) -> Any:
    text = b""
    while not text.endswith(b"\n"):
        piece = place.recv(1)
        if not piece:
            raise EOFError("the process that forks has ended")
        text += piece
    return json.loads(text)


def prepare() -> None:
    """Import the libraries, and let them do once what they do slowly the first time: find plugins and fonts, export, interpret a kernel."""
    for name in BEFOREHAND:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch
    from hydra.core.plugins import Plugins
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lossforge.losses import cross_entropy

    if importlib.util.find_spec("mlflow"):
        make_tables()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork lacks the threads of its parent, and would wait for them
    Plugins.instance()
    figure = Figure()
    figure.subplots().set_title("0")
    FigureCanvasAgg(figure).print_figure(io.BytesIO())
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1), torch.nn.ReLU()).eval()
    torch.export.save(torch.export.export(model, (torch.ones(2, 1, 2, 2),)), io.BytesIO())
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken_interpreter()
        with warnings.catch_warnings(action="ignore"):
            cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))  # no backward, which starts threads too
    torch.set_num_threads(threads)


def quicken_interpreter() -> None:
    """Let the forks interpret kernels as pytest's own process does: a training of 46 updates takes a fifth less."""
    spec = importlib.util.spec_from_file_location("quick_interpreter", Path(__file__).parents[1] / "quick_interpreter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.quicken()


def request(place: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what is asked, and the descriptors that came along: ({}, []) once nobody is there to ask."""
    size, fds, _, _ = socket.recv_fds(place, 8, 2)
    if not size:
        return {}, []
    text, length = b"", int.from_bytes(size, "big")
    while len(text) < length:
        text += place.recv(length - len(text))
    return json.loads(text), fds


def serve(place: socket.socket, listener: socket.socket) -> None:
    prepare()
    gc.collect()
    gc.freeze()
    while True:
        if listener in select.select([place, listener], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                attend(connection, place, listener)
            connection.close()
            continue
        asked, fds = request(place)
        if not asked:
            return
        if "ended" in asked:
            _, status = os.waitpid(asked["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                place.close()
                listener.close()
                run_and_exit(fds, **asked)
            for fd in fds:
                os.close(fd)
        place.sendall(json.dumps(answer).encode() + b"\n")


def attend(connection: socket.socket, *others: socket.socket) -> None:
    """Fork for a program that has connected, tell it the fork's id and how it ended, and kill the fork if the program ends before."""
    for each in others:
        each.close()
    asked, fds = request(connection)
    pid = os.fork()
    if not pid:
        connection.close()
        run_and_exit(fds, **asked)
    for fd in fds:
        os.close(fd)
    connection.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def run_and_exit(fds: list[int], script: str, words: list[str], cwd: str, env: dict[str, str] | None = None) -> None:
    """Run a script as Python would, and end this process.

    Args:
        fds: become stdout and stderr.
        script: its path, or "-m": `words` begins with a module.
        words: its arguments.
        cwd: the folder to run in.
        env: its environment; None: this process's. WARM_EXECUTABLE in it becomes sys.executable.
    """
    status = 1
    try:
        for fd, place in zip(fds, (1, 2), strict=True):
            os.dup2(fd, place)
            os.close(fd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
            sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
        torch = sys.modules["torch"]
        # a new pool: two threads of autograd that made it at once would abort (torch 2.11)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        os.chdir(cwd)
        sys.executable = os.environ.get("WARM_EXECUTABLE", sys.executable)
        sys.orig_argv = [sys.executable, script, *words]
        if script == "-m":
            sys.argv, sys.path[0] = words, cwd
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            sys.exit()
        sys.argv = [script, *words]
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
    serve(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:]))

"""Fixtures for the apps: a clone to run them in, and a trainer assembled in this process."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from warm import Process, Warm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("experiments", "tools", "measurements", "tests")]


@dataclass
class Done:
    status: int
    output: str


class Clone:
    """A copy of what a run needs, so that its default places (runs/, mlflow.db) are the test's own."""

    def __init__(self, path: Path, warm: "Warm") -> None:
        self.path, self.warm = path, warm
        self.script = "experiments/train.py"
        for name in ("experiments", "conf"):
            shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.env = dict(warm.env)  # not what libraries that a test imports add to this process's
        self.started: list[Process | subprocess.Popen[str]] = []

    def start(self, *words: str, fresh: bool = False, **env: str) -> "Process | subprocess.Popen[str]":
        """Start the script. fresh: in a new Python, where its start is what is tested, or what it reads from the environment then."""
        if not fresh and self.env | env == self.warm.env:
            process = self.warm.start(self.script, words, self.path)
        else:
            command = [sys.executable if fresh else self.warm.python(), self.script, *words]
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, cwd=self.path, env=self.env | env, **streams)
        self.started.append(process)
        return process

    def end(self) -> None:
        """End what a failed test left at work."""
        for process in self.started:
            process.kill()
            process.wait()

    def run(self, *words: str, timeout: float = 600, fresh: bool = False, **env: str) -> Done:
        """Run the script to its end. fresh: as for `start`."""
        if not fresh and self.env | env == self.warm.env:
            ran = self.warm.run(self.script, words, self.path, timeout)
            return Done(ran.returncode, ran.stdout)
        process = self.start(*words, fresh=fresh, **env)
        output, _ = process.communicate(timeout=timeout)
        return Done(process.returncode, output)

    def contents(self) -> set[str]:
        """Everything in it but Python's caches."""
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if "__pycache__" not in path.parts}

    def run_folders(self) -> list[Path]:
        return sorted((self.path / "runs").iterdir())


def environment() -> dict[str, str]:
    """Return the environment of the apps."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW", "PYTEST"))}
    return kept | {"PYTHONUNBUFFERED": "1"}


LONGEST = (
    "distributed", "resume", "sweep", "use_with", "outage", "mlflow_ui", "logged_model", "losses_train", "predict", "evaluate", "compare",
    "site", "endings", "measure_integrations", "onnx", "your_own", "slurm", "docker", "updater", "bench_app",
)  # fmt: skip
"""The files that take longest. They run first, so that no process of pytest-xdist is still at work on one when the others are done."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """An app takes the signals of its process for good; one that ran in this process gives them back here."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests under nohup would ignore, and what they start
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def tables_of_stores() -> None:
    """Copy the tables of MLflow's stores that tests make in this process, once it has imported what makes them."""
    if "mlflow.store.db.utils" in sys.modules:
        from mlflow_tables import copy_tables

        copy_tables()


@pytest.fixture(autouse=True, scope="session")
def key_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sign the tests' runs with a key of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("LOSSFORGE_RUNS", raising=False)
        yield


@pytest.fixture(scope="session")
def warm(key_of_the_user: None) -> "Iterator[Warm]":
    """What runs the apps without importing torch, MLflow and timm anew each time."""
    from warm import Warm

    process = Warm(environment())
    yield process
    process.close()


@pytest.fixture(scope="session")
def torchrun(warm: "Warm") -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in two processes of torchrun, which are forks of the warm one, as torchrun itself is."""

    def run(*words: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
        python = warm.python()
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, words)]
        env = warm.env | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": python} | env
        return subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=cwd)

    return run


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that fails if it imports torch, which takes seconds: what answers at once does without."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch.py").write_text("raise RuntimeError('torch was imported')")
    return {"PYTHONPATH": str(folder)}


EACH = """
import contextlib, importlib, io, json, sys
from pathlib import Path
sys.path.insert(0, "experiments")
app, answers = importlib.import_module(sys.argv[1]), []
for words in json.loads(sys.argv[2]):
    before, output = set(Path().rglob("*")), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = app.main(words)
    written = [str(path) for path in set(Path().rglob("*")) - before if "__pycache__" not in path.parts]
    answers.append([words, status, output.getvalue(), written])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers_without_torch(
    new_clone: Callable[[], Clone], without_torch: dict[str, str]
) -> Callable[..., dict[tuple[str, ...], tuple[int, str, list[str]]]]:
    """Ask an app in one process without torch; return its exit status, output and the files that it wrote, by the words."""

    def ask(app: str, mistakes: list[list[str]]) -> dict[tuple[str, ...], tuple[int, str, list[str]]]:
        clone = new_clone()
        command, env = [sys.executable, "-c", EACH, app, json.dumps(mistakes)], clone.env | without_torch
        done = subprocess.run(command, cwd=clone.path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return {tuple(words): (status, output, written) for words, status, output, written in json.loads(done.stdout)}

    return ask


@pytest.fixture
def clone(tmp_path: Path, warm: "Warm") -> Iterator[Clone]:
    clone = Clone(tmp_path / "clone", warm)
    yield clone
    clone.end()


@pytest.fixture(scope="session")
def new_clone(tmp_path_factory: pytest.TempPathFactory, warm: "Warm") -> Callable[[], Clone]:
    return lambda: Clone(tmp_path_factory.mktemp("clone") / "main", warm)


@pytest.fixture
def run_folder(tmp_path: Path) -> Any:
    from lab.run.folder import RunFolder

    folder = RunFolder(tmp_path / "runs", "test", {})
    yield folder
    folder.close("FINISHED")


@pytest.fixture
def make_trainer() -> Callable[..., Any]:
    """Assemble a trainer from the words of a command line."""

    def make(*words: str, model: Any = None) -> Any:
        from lab.config.settings import load
        from lab.training.assemble import assemble

        return assemble(load(["model=tiny_resnet", "trainer.device=cpu", *words]), model)

    return make


@pytest.fixture
def quiet() -> Any:
    from lab.training.console import Console

    return Console(1)

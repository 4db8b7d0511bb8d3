"""Which cases run by default, in how many processes, and Triton's interpreter, which has to be chosen before anything imports triton."""

import contextlib
import fcntl
import gc
import importlib.util
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Where Python must write no bytecode and the environment has none, it goes into pytest's cache: the tests start some dozen processes that
# import torch, and to compile all its modules anew takes half of that time
if sys.dont_write_bytecode and not Path(getattr(pytest.__spec__, "cached", None) or "").is_file():
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# oneDNN's bfloat16 weight gradient of a 3×3 convolution over 1×1 pixels is now and then not finite with AVX-512; with AVX2 it is right
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# torch.compile tries vector instructions, and compiles, in processes that import torch, which takes longer than its code
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # programs that tests start share the cores with the other workers

import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before conftest.py could set TRITON_INTERPRET=1: the kernels would not run on CPU tensors")
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, not only one for each value of each parameter of a test")
    parser.addoption(
        "--ci", action="store_true", help="run each test with each value of each parameter; a marker `each` holds with ci=True alone"
    )
    parser.addoption(
        "--tenth",
        type=int,
        metavar="N",
        help="run the N-th tenth of these cases, in Triton's interpreter as it is",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Quicken Triton's interpreter, unless a tenth of the cases runs without it."""
    if os.environ.get("TRITON_INTERPRET") == "1" and config.option.tenth is None:
        spec = importlib.util.spec_from_file_location("quick_interpreter", Path(__file__).with_name("quick_interpreter.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.quicken()


def pytest_report_header(config: pytest.Config) -> str:
    option = config.option
    tier = "each value of each parameter" if option.ci else "each value of each parameter that matters"
    return f"cases: {'all' if option.all else f'{tier}; all combinations with --all, or of a file or -k'}"


def values(case: pytest.Function) -> set[Any]:
    """What a case has of its test's parameters: each value, and each loss's dtype. A case of the benchmarks counts as its loss.

    The marker `each` names the parameters that matter, with --ci only where it says ci=True; "template" among them is that of the loss.
    """
    each = case.get_closest_marker("each")
    if each and case.config.option.ci and not each.kwargs.get("ci"):
        each = None

    def value(given: Any) -> tuple[type, Any]:
        given = getattr(given, "loss", given)
        try:
            hash(given)
        except TypeError:
            return type(given), id(given)
        return type(given), given

    params = case.callspec.params
    found = {name: value(given) for name, given in params.items() if not each or name in each.args}
    if each and "template" in each.args:
        found["template"] = value(params["loss"].template)
    return {*found.items(), (found.get("loss"), found.get("dtype"))}


def covering(cases: list[pytest.Function]) -> Iterator[pytest.Function]:
    """Few cases of one test that together have every value of each parameter, whatever the order of `cases`.

    The hash of the names spreads dtypes, modes and shapes over the losses.
    """
    cases = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    of = {case: values(case) for case in cases}
    missing = set().union(*of.values())
    while missing:
        case = max(cases, key=lambda case: len(of[case] & missing))
        missing -= of[case]
        yield case


def asked_for(config: pytest.Config, items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What the command line says more narrowly than by a folder: by file, by name, or as failed before."""
    if config.option.all or config.option.keyword:
        return set(items)
    files = {(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args}
    failed = config.cache.get("cache/lastfailed", {}) if config.getoption("lf", False) and config.cache else {}
    return {item for item in items if item.path in files or item.nodeid in failed}


@pytest.hookimpl(tryfirst=True)  # before -m and --deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, tests = asked_for(config, items), defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") and not config.option.ci:
            continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
        else:
            kept.add(item)
    for cases in tests.values():
        kept.update(covering(cases))
    if config.option.tenth is not None:
        kept = {item for item in kept if (zlib.crc32(item.nodeid.encode()) - config.option.tenth) % 10 == 0}
    left_out = [item for item in items if item not in kept]
    config.stash[LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep Python's garbage collector off modules and cases, which live as long as the tests: each search of them takes 0.5 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture
def all_cases(request: pytest.FixtureRequest) -> bool:
    """Whether a test that chooses its cases by itself takes all."""
    return bool(asked_for(request.config, [request.node]))


KEPT = 2**28
"""Bytes of a GPU that a process may keep between two tests: the processes of pytest-xdist share its memory."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    several = "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available()
    skip_guard_timing()
    with turn(several and item.get_closest_marker("large") is not None):
        done = yield
        free_gpu()
    return done


def skip_guard_timing() -> None:
    """Spare each graph that torch.compile makes 40 ms, in which it times its guards for its log, with the processor's caches emptied."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *args: 0.0


@contextlib.contextmanager
def turn(wanted: bool) -> Iterator[None]:
    """Wait, where it is wanted, until no other process is in here: this file serves as their lock."""
    if not wanted:
        yield
        return
    file = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def free_gpu() -> None:
    """Give back what a test held of the GPU, if that is much."""
    if not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_allocated() > KEPT:
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # by which Python keeps the frames of a failed test
            vars(sys).pop(name, None)
        gc.collect()  # an expected exception refers to the test's frame, and this to the exception
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # one for each stream that a product ran on
    if torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist tells the one that it works for
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.line(f"{left_out} more cases run with --all.")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Several processes by default where pytest-xdist is installed, but for single tests and where a terminal is wanted: -s, --trace."""
    option = config.option
    by_hand = option.capture == "no" or option.trace or any("::" in arg for arg in config.args)
    if not by_hand and not hasattr(config, "workerinput") and getattr(option, "numprocesses", 0) is None and not option.tx:
        option.numprocesses = "auto"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """A process a core, each with 2 GiB; none beside the first on a GPU, whose memory and time the tests measure."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    if torch.cuda.is_available():
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = min(len(os.sched_getaffinity(0)), memory // 2**31, 8)  # beyond 8, importing torch in each costs more than it saves
    return workers if workers > 1 else 0

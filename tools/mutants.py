#!/usr/bin/env python3
"""Change one place of the source at a time, and say whether the default tier of the tests notices.

`tools/mutants.toml` lists the changes. Each is made in a copy of the tree. The tests run that killed it before; where these pass, the whole
default tier runs. Tests that compare generated text with the source do not count, because they notice any change.

A mutant is found by its text, wherever the file lies. `drawn` names the tool whose operator made it; the others were thought of. To find
out what kills new ones: `tools/mutants.py --find tests/test_a.py packages/losses/tests/test_b.py --area engine`. A new one may also be
listed with the files that should kill it; `--find` alone then puts the cases in their place.
"""

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
SOURCES = ("packages/*/src", "experiments")
GENERATED = ("tests/test_generate.py", "tests/test_loss_pages.py", "tests/test_pages.py", "tests/test_readme.py", "tests/test_way.py")
"""Tests that compare generated text with the source."""
LEAST = 0.95
"""The share of the mutants that must be killed."""
SECONDS = 180
"""The time limit of the tests that killed a mutant before."""
SECONDS_OF_ALL = 3600
CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        file: the name of the source file, without its folder.
        old: text that stands once in the source, or once in files of this name.
        new: what takes its place.
        area: the part of the project.
        drawn: the tool whose operator made the change; empty: thought of.
        killed_by: ids of tests that fail.
        equivalent: why no test can notice the change; such a mutant is not run.
    """

    file: str
    old: str
    new: str
    area: str
    drawn: str = ""
    killed_by: tuple[str, ...] = field(default=(), hash=False)
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.area} {self.file}: {self.old!r} -> {self.new!r}"


def read() -> list[Mutant]:
    found = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**each | {"killed_by": tuple(each.get("killed_by", ()))}) for each in found]


def write(mutants: Sequence[Mutant]) -> None:
    """Write the list: strings of JSON are strings of TOML."""
    blocks = []
    for mutant in mutants:
        values = {each.name: getattr(mutant, each.name) for each in fields(mutant)}
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items() if value or name == "new"]
        blocks.append("".join(["[[mutant]]\n", *lines]))
    LIST.write_text("# tools/mutants.py reads and writes this list\n\n" + "\n".join(blocks), encoding="utf-8")


@functools.cache
def sources(root: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for folder in SOURCES for top in root.glob(folder) for path in sorted(top.rglob("*.py"))}


def places(mutant: Mutant, root: Path) -> list[Path]:
    """Return the files with the mutant's old text, as often as it stands there; of its name alone where others have the text too."""
    found = [path for path, text in sources(root).items() for _ in range(text.count(mutant.old))]
    return [path for path in found if path.name == mutant.file] if len(found) > 1 else found


class Chosen:
    """A plugin of pytest: of the default tier only some files or tests, and the ids of the cases that fail."""

    def __init__(self, root: Path, only: Collection[str]) -> None:
        """only: how ids of cases begin: a file, a test, a case; none: all."""
        self.only, self.files = only, {root / each.partition("::")[0] for each in only}
        self.failed: list[str] = []

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        wanted = not self.only or any(path == collection_path or collection_path in path.parents for path in self.files)
        return None if wanted else True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the named cases, or all of their files where no name is that of a case in this tier."""
        items[:] = [item for item in items if item.nodeid.startswith(tuple(self.only))] or items

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def prepare() -> None:
    """Import what the tests import, so that the processes of the mutants need not: libraries, nothing of this project's packages."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "tests"))
    from warm import BEFOREHAND

    for name in ("hypothesis", *BEFOREHAND):
        if not name.startswith("lossforge"):
            with suppress(ImportError):
                importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    del sys.path[0], sys.modules["warm"], sys.modules["mlflow_tables"]


def copy_tree(folder: Path) -> None:
    """Copy what git knows, and make a repository of it, as some tests ask git."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *command], cwd=folder, check=True)


def use_copy(folder: Path) -> None:
    """Let this process and those that it starts import the copy's packages."""
    tops = [str(top.relative_to(ROOT)) for each in SOURCES for top in ROOT.glob(each)]
    sys.path[:] = [str(folder / top) for top in tops] + [path for path in sys.path if not Path(path).is_relative_to(ROOT / "packages")]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(folder / top) for top in tops)
    os.chdir(folder)


def run_tests(folder: Path, only: Sequence[str], log: Path, whole: int) -> None:
    """Run tests in the copy, until one fails; write the ids of what failed. whole: processes of a run of the whole tier."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    use_copy(folder)
    chosen = Chosen(folder, only)
    processes = ["-n", "0"] if only else ["-n", str(whole), *[f"--ignore={each}" for each in GENERATED]]
    status = pytest.main(["packages", "tests", "-xq", "-p", "no:cacheprovider", *processes], plugins=[chosen])
    log.with_suffix(".failed").write_text("\n".join(chosen.failed), encoding="utf-8")
    sys.stdout.flush()
    os._exit(int(status))


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, survived, hung, or why it was not run."""

    mutant: Mutant
    word: str
    seconds: float
    killed_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.word:8} {self.seconds:5.0f} s  {self.mutant}" + "".join(f"\n    {each}" for each in self.killed_by)


def outcome(folder: Path, only: Sequence[str], seconds: float) -> tuple[str, tuple[str, ...]]:
    """Run tests in a process of their own, and say what became of the change that is made in `folder`."""
    log = folder.with_suffix(".log")
    log.with_suffix(".failed").unlink(missing_ok=True)
    process = CONTEXT.Process(target=run_tests, args=(folder, only, log, os.cpu_count() or 1))
    process.start()
    process.join(seconds)
    hung, pid = process.exitcode is None, process.pid
    assert pid is not None
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # it leads a session of its own
    process.join()
    if hung:
        return "hung", ()
    with suppress(OSError):
        failed = tuple(log.with_suffix(".failed").read_text(encoding="utf-8").split("\n"))
        return ("survived", ()) if process.exitcode in (0, 5) else ("killed", tuple(filter(None, failed)))
    return "killed", ()  # it died


COPY = Path()
TURN = 0


def begin(folder: str) -> None:
    """Give a process of the pool a copy of the tree."""
    global COPY
    COPY = Path(tempfile.mkdtemp(dir=folder))
    copy_tree(COPY)


def put(path: Path, text: str) -> None:
    """Write a source file, with a time of its own, by which Python knows that its bytecode is old."""
    global TURN
    TURN += 2
    path.write_text(text, encoding="utf-8")
    os.utime(path, (TURN, TURN))


def tried(mutant: Mutant, asked: Sequence[str], fall_back: bool) -> Outcome:
    """Make the change in this process's copy, and run what killed it, or the tests that are asked for, then perhaps the whole tier."""
    began = time.monotonic()
    where = places(mutant, COPY)
    if len(where) != 1:
        return Outcome(mutant, f"{len(where)} places", 0)
    text = sources(COPY)[where[0]]
    put(where[0], text.replace(mutant.old, mutant.new, 1))
    try:
        word, killers = "survived", tuple[str, ...]()
        if asked or mutant.killed_by:
            word, killers = outcome(COPY, asked or mutant.killed_by, SECONDS)
        if word == "survived" and fall_back:
            word, killers = outcome(COPY, (), SECONDS_OF_ALL)
    finally:
        put(where[0], text)
    return Outcome(mutant, word, time.monotonic() - began, killers)


def unchanged(only: Sequence[str]) -> str:
    """Run tests where nothing is changed, those of the packages and of the apps apart; return what pytest says if some do not pass."""
    for top in ("packages/", "tests/"):
        some = [each for each in only if each.startswith(top)]
        word, _ = outcome(COPY, some, SECONDS_OF_ALL) if some else ("survived", ())
        if word != "survived":
            return f"{word}:\n{COPY.with_suffix('.log').read_text(encoding='utf-8', errors='replace')[-3000:]}"
    return ""


def outcomes(mutants: Sequence[Mutant], processes: int, asked: Sequence[str], fall_back: bool) -> Iterator[Outcome]:
    """Try each mutant, once all tests that shall kill them pass without a change."""
    prepare()
    work = functools.partial(tried, asked=asked, fall_back=fall_back)
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, ProcessPoolExecutor(processes, CONTEXT, begin, (folder,)) as pool:
        if said := pool.submit(unchanged, sorted(asked or {each for mutant in mutants for each in mutant.killed_by})).result():
            raise SystemExit(f"The tests do not pass without a change:\n{said}")
        yield from pool.map(work, mutants)


def table(found: Sequence[Outcome]) -> str:
    """Return how many mutants of each area were drawn and thought of, and what became of them."""
    rows = ["area          drawn  by hand  killed  survived  hung  other"]
    for area in [*dict.fromkeys(each.mutant.area for each in found), "all"]:
        of_area = [each for each in found if area in (each.mutant.area, "all")]
        words = [each.word for each in of_area]
        drawn = sum(bool(each.mutant.drawn) for each in of_area)
        counts = *(words.count(word) for word in ("killed", "survived", "hung")), sum("places" in word for word in words)
        rows.append(f"{area:12} {drawn:6} {len(of_area) - drawn:8} {counts[0]:7} {counts[1]:9} {counts[2]:5} {counts[3]:6}")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="say which mutants no longer apply at exactly one place, and run none")
    parser.add_argument("--area", action="append", help="only those of this area; may be repeated")
    parser.add_argument("--text", help="only those whose file, old or new text contains this")
    parser.add_argument("--new", action="store_true", help="only those that no test is known to kill")
    parser.add_argument("--find", nargs="*", metavar="TEST", help="run these files, tests or cases, or those listed; list what kills")
    parser.add_argument("--quick", action="store_true", help="do not run the whole tier where the tests that killed a mutant pass")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(argv)
    every = read()
    mutants = [each for each in every if not each.equivalent and (not options.area or each.area in options.area)]
    mutants = [each for each in mutants if not options.new or not each.killed_by]
    mutants = [each for each in mutants if not options.text or any(options.text in text for text in (each.file, each.old, each.new))]
    lost = [each for each in mutants if len(places(each, ROOT)) != 1]
    if options.check:
        for each in lost:
            print(f"{len(places(each, ROOT))} places: {each}")
        print(f"{len(mutants) - len(lost)} of {len(mutants)} apply")
        return bool(lost)
    began, found = time.monotonic(), list[Outcome]()
    for one in outcomes(mutants, options.processes, options.find or (), not options.quick and options.find is None):
        print(one, flush=True)
        found.append(one)
        if options.find is not None and one.killed_by:
            write([replace(each, killed_by=one.killed_by) if each == one.mutant else each for each in read()])
    killed = sum(each.word == "killed" for each in found)
    print(f"\n{table(found)}\n\n{killed} of {len(found)} killed in {time.monotonic() - began:.0f} s")
    return killed < LEAST * len(found)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())

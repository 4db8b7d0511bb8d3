"""A folder of somebody else: no link in it is written through, and a pipe or a device in it is not waited for."""

import ast
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from words import TINY

import train
from lab.base.errors import UserError
from lab.base.files import UnfitFileError, locked, open_to_append, open_to_read, open_to_write, read_bytes, try_lock, write_text
from lab.base.records import read_history
from lab.run.saved import open_checkpoint
from lab.tracking.store import client_of
from lab.tracking.store_paths import leads_outside, outside

ROOT = Path(__file__).parents[1]
QUICK = [*TINY, "trainer.max_updates=2", "tracking.model=false", "loss.implementation=torch"]
PRECIOUS = b"\0 what the user needs"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, whose mlflow.db is the default store."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


@pytest.fixture
def precious(tmp_path):
    file = tmp_path / "precious"
    file.write_bytes(PRECIOUS)
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that can go on, and a store."""
    root = tmp_path_factory.mktemp("whole")
    words = [*QUICK, f"tracking.uri=sqlite:///{root}/mlflow.db", f"trainer.runs={root / 'runs'}", "name=own", "trainer.save_updates=1"]
    assert train.main(words) == 0
    return root


@pytest.mark.parametrize("ending", [".lock", *(pytest.param(each, marks=pytest.mark.slow) for each in ("-journal", "-wal", "-shm"))])
@pytest.mark.parametrize("there", [False, True], ids=["no store", "a store"])
def test_a_link_beside_the_store_empties_no_file(here, precious, whole, capsys, ending, there):
    if there:
        shutil.copy(whole / "mlflow.db", here / "mlflow.db")
        with contextlib.closing(sqlite3.connect("mlflow.db")) as database:
            database.execute(f"PRAGMA journal_mode={'wal' if ending in ('-wal', '-shm') else 'delete'}")
    (here / f"mlflow.db{ending}").symlink_to(precious)
    status = train.main(QUICK)
    assert precious.read_bytes() == PRECIOUS
    if there or ending == ".lock":
        assert (status, f"mlflow.db{ending}: is a link" in capsys.readouterr().err, list(here.glob("runs/*"))) == (1, True, [])
        with pytest.raises(UnfitFileError, match="is a link"):
            client_of(f"sqlite:///{here}/mlflow.db")


@pytest.mark.parametrize("content", [b"", PRECIOUS, "sqlite"], ids=["an empty file", "no database", "another database"])
def test_a_store_that_is_a_link_makes_no_store_of_another_file(here, precious, capsys, content):
    if content == "sqlite":
        precious.unlink()
        with contextlib.closing(sqlite3.connect(precious)) as database:
            database.execute("CREATE TABLE mine (x)")
            database.commit()
    else:
        precious.write_bytes(content)
    before = precious.read_bytes()
    (here / "mlflow.db").symlink_to(precious)
    assert train.main(QUICK) == 1
    assert "which is not a store of MLflow" in capsys.readouterr().err
    assert precious.read_bytes() == before


def test_a_store_behind_a_link_is_used(here, whole):
    (here / "mlflow.db").symlink_to(whole / "mlflow.db")
    assert client_of(f"sqlite:///{here}/mlflow.db").get_experiment_by_name("lossforge")


def test_a_lock_ends_with_its_block_whatever_was_forked_within_it(tmp_path):
    """As a data worker is, while the thread that sends to MLflow makes the store."""
    with locked(tmp_path / "lock"):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        file = try_lock(tmp_path / "lock")
        assert file is not None
        assert try_lock(tmp_path / "lock") is None
        file.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("what", ["link", "dangling link", "pipe", "folder"])
@pytest.mark.parametrize("write", [open_to_write, open_to_append, lambda path: locked(path).__enter__()], ids=["open", "append", "lock"])
def test_what_is_no_file_is_not_opened_to_write(tmp_path, precious, what, write):
    path = tmp_path / "there"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(precious if what == "link" else tmp_path / "nowhere")
    with pytest.raises(UnfitFileError, match="is a link" if "link" in what else "is not a regular file"):
        write(path)
    assert precious.read_bytes() == PRECIOUS
    assert not (tmp_path / "nowhere").exists()


def test_an_opened_file_keeps_its_contents(precious):
    with locked(precious), open_to_append(precious) as file:
        file.write(b", and more")
    os.close(open_to_write(precious))
    assert precious.read_bytes() == PRECIOUS + b", and more"


def test_a_written_file_replaces_a_link(tmp_path, precious):
    for name in ("there", ".unfinished-there"):
        (tmp_path / name).symlink_to(precious)
    write_text(tmp_path / "there", "new")
    assert ((tmp_path / "there").read_text(), precious.read_bytes()) == ("new", PRECIOUS)


def test_the_library_replaces_a_link_at_a_report(tmp_path, precious):
    from lossforge.bench.report import Report

    for name in ("report.json", "report.json.new"):
        (tmp_path / name).symlink_to(precious)
    Report("gpu", {}, "commit", "date").save(tmp_path / "report.json")
    assert (json.loads((tmp_path / "report.json").read_text())["gpu"], precious.read_bytes()) == ("gpu", PRECIOUS)


DIRECT = {
    "lab/detectors/scenes.py": "writes in a folder that it has just made",
    "lab/tracking/logged_model.py": "writes in a temporary folder",
    "lab/run/machine.py": "writes to /proc and reads from there",
    "lab/processes/rank_failures.py": "reads from /proc",
    "lab/comparison/page.py": "reads a file of the program",
    "lab/config/settings.py": "reads the program's settings",
    "lab/config/help.py": "reads comments of the program's settings",
    "lab/base/files.py": "is the helper",
    "lab/data/images/files.py": "reads images, after refuse_pipe",
    "lab/data/images/pixels.py": "reads images, after refuse_pipe",
    "lab/detectors/detection/data.py": "opens an image of an annotation file, by lab.data.images.files",
    "lab/data/cells.py": "reads a table again, after refuse_special",
    "lab/data/sources/shards.py": "reads shards, after refuse_special",
    "lab/data/sources/npz.py": "reads arrays of an archive, after refuse_pipe",
}


METHODS = ("read_text", "read_bytes", "write_text", "write_bytes", "touch")


def opens(tree):
    """Yield the line of each call that opens, reads or writes a file by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            known = owner in ("Image", "tarfile", "truth") or "devnull" in ast.unparse(node)
            drawn = (name == "savefig" and ast.unparse(node.args[0]) not in ("file", "out")) or (name == "save" and "Image" in owner)
            if drawn or (not known and (name == "open" or (name in METHODS and isinstance(function, ast.Attribute)))):
                yield node.lineno


def test_every_file_is_opened_by_the_helper():
    """A new place that opens a file by itself is listed with its reason, or uses lab.base.files."""
    apps = [*(ROOT / "experiments").glob("*.py"), *(ROOT / "experiments" / "lab").rglob("*.py")]
    found = {str(path.relative_to(ROOT / "experiments")) for path in apps if any(opens(ast.parse(path.read_text())))}
    assert found == set(DIRECT)


@pytest.mark.parametrize("name", ["a\tb", "a\nb", " a", "a ", "a%09b", "\x1fa", "a\x9fb"])
def test_a_location_that_is_read_in_two_ways_is_refused(tmp_path, name):
    uri, place = f"sqlite:///{tmp_path}/mlflow.db", f"{tmp_path}/{name}"
    assert outside(uri, place if not name.startswith(("\x1f", " ")) else f"{name[0]}{tmp_path}/a", False)
    assert outside(uri, f"file://{place}", False) or name == " a", "a blank within a path is one"


def test_a_tab_in_a_location_leads_no_file_elsewhere(here, whole, tmp_path, capsys):
    """urlsplit takes `a<TAB>b` for `ab`, and MLflow for a link of that name."""
    shutil.copy(whole / "mlflow.db", here / "mlflow.db")
    victim = tmp_path / "victim"
    (victim / "checkpoints").mkdir(parents=True)
    (victim / "config.yaml").write_text("mine")
    (here / "a\tb").symlink_to(victim)
    with contextlib.closing(sqlite3.connect("mlflow.db")) as database:
        database.execute("UPDATE experiments SET artifact_location = ?", (f"{here}/ab",))
        database.execute(
            f"CREATE TRIGGER theirs AFTER INSERT ON runs BEGIN UPDATE runs SET artifact_uri = '{here}/a' || char(9) || 'b'; END"
        )
        database.execute(f"UPDATE runs SET artifact_uri = '{here}/a' || char(9) || 'b'")
        database.commit()
    assert train.main(QUICK) == 0
    assert "outside of" in capsys.readouterr().out
    assert (victim / "config.yaml").read_text() == "mine"
    shutil.copy(next((whole / "runs").glob("*/checkpoints/best.pt")), victim / "checkpoints" / "best.pt")
    run = MlflowClient(tracking_uri=f"sqlite:///{here}/mlflow.db").search_runs(["1"])[-1].info.run_id
    with pytest.raises(UserError, match="outside of"):
        open_checkpoint(f"runs:/{run}", [])


def test_a_link_where_mlflow_writes_is_refused(here, tmp_path):
    """The location is in the store's folder, and what a file's name leads to is not."""
    (here / "place").mkdir()
    (here / "place" / "config.yaml").symlink_to(tmp_path / "precious")
    (here / "place" / "checkpoints").symlink_to(tmp_path)
    (here / "place" / "inside").symlink_to(here / "place")
    uri = f"sqlite:///{here}/mlflow.db"
    for name, refused in (("config.yaml", True), ("checkpoints/best.pt", True), ("inside/new.txt", False), ("new.txt", False)):
        assert bool(leads_outside(uri, str(here / "place"), [name])) == refused, name
    assert leads_outside(uri, str(tmp_path), [])
    assert not leads_outside("http://127.0.0.1:5000", str(tmp_path), [])


@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "folder", "large"])
def test_what_is_no_regular_file_is_not_read(tmp_path, what):
    path = tmp_path / "there"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "large":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.symlink_to(what)
    with pytest.raises(UnfitFileError, match="has more than" if what == "large" else "is not a regular file"):
        read_bytes(path)
    if what != "large":
        with pytest.raises(UnfitFileError):
            open_to_read(path)


def replaced(path, what):
    path.unlink(missing_ok=True)
    os.mkfifo(path) if what == "pipe" else path.symlink_to(what)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "pipe") for name in ("tracking.json", "metrics.jsonl", "config.yaml", "first record", "checkpoints/last.pt")),
        *((name, "/dev/zero") for name in ("tracking.json", "metrics.jsonl", "first record")),
    ],
)
def test_no_app_waits_for_a_file_that_never_ends(whole, warm, tmp_path, name, what):
    """Each app ends soon, by itself, in a process of its own."""
    folder = shutil.copytree(next((whole / "runs").iterdir()), tmp_path / "runs" / "theirs")
    if name == "first record":  # the folder that the first record names
        other = tmp_path / "other"
        other.mkdir()
        replaced(other / "metrics.jsonl", what)
        records = folder / "metrics.jsonl"
        first = json.loads(records.read_text().splitlines()[0])["run_folder"]
        records.write_text(records.read_text().replace(first, str(other)))
    else:
        replaced(folder / name, what)
    places = [f"trainer.runs={tmp_path / 'runs'}", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "tracking.patience_seconds=1"]
    shown = [] if (name, what) == ("tracking.json", "pipe") else ["--cfg"]
    script = "import sys; sys.path.insert(0, 'experiments'); import evaluate, sync, train, json\n" + "\n".join(
        f"print({app}.main({words!r}), file=sys.stderr)"
        for app, words in (
            ("train", [f"resume={folder}", "trainer.max_updates=2", *places, *shown]),
            ("train", [*QUICK, "name=own", "resume=auto", "trainer.save_updates=1", *places, *shown]),
            ("evaluate", [f"checkpoint={folder}", "--cfg", *places]),
            ("evaluate", ["checkpoint=runs:/1", "--cfg", *places]),
            ("sync", [str(folder), *places]),
        )
    )
    (tmp_path / "apps.py").write_text(script, encoding="utf-8")
    done = subprocess.run([warm.python(), tmp_path / "apps.py"], cwd=ROOT, env=warm.env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.base.records.LONGEST", 1000)
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(2**40)
    assert read_history(tmp_path).size == 0


@pytest.mark.parametrize("app", ["train", "evaluate", "sync", "predict"])
def test_sigterm_ends_an_app(whole, warm, tmp_path, app):
    """While it waits for a store that does not answer, or before."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"tracking.uri=http://127.0.0.1:{silent.getsockname()[1]}"
        folder = shutil.copytree(next((whole / "runs").iterdir()), tmp_path / "theirs")
        records = folder / "metrics.jsonl"  # of a run that is no copy
        records.write_text(records.read_text().replace(json.loads(records.read_text().splitlines()[0])["run_folder"], "/elsewhere"))
        words = {
            "train": [*QUICK, uri, f"trainer.runs={tmp_path / 'runs'}", "trainer.max_updates=100000"],
            "evaluate": ["checkpoint=runs:/1", uri],
            "predict": ["checkpoint=runs:/1", uri, "x.png"],
            "sync": [str(folder), uri],
        }[app]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([warm.python(), f"experiments/{app}.py", *words], cwd=ROOT, env=warm.env, **pipes)
        if app == "train":
            while process.poll() is None and not list((tmp_path / "runs").glob("*/log.txt")):
                time.sleep(0.2)
        else:
            silent.settimeout(120)
            silent.accept()
        for _ in range(3):  # a training saves a checkpoint after the first one, and the second ends the wait for MLflow
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
                break
        assert process.returncode in (143, -signal.SIGTERM, 130, 1)

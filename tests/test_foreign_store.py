"""A store in a file may be another person's, such as an mlflow.db in a folder that was copied: it leads no file elsewhere."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from mlflow.tracking._tracking_service.utils import path_to_local_sqlite_uri
from words import TINY

import evaluate
import sync
import train
from lab.base.errors import UserError
from lab.config.schema import TrackingConfig
from lab.config.user import runs_folder
from lab.run.folder import RunFolder
from lab.run.saved import open_checkpoint
from lab.tracking.store_paths import outside
from lab.tracking.uploader import MlflowUploader, checked_uri

QUICK = [*TINY, "trainer.max_updates=2", "tracking.model=false"]


@pytest.mark.parametrize(
    ("location", "refused"),
    [
        ("{store}/mlartifacts/lossforge", False),
        ("file://{store}/mlartifacts/lossforge", False),
        ("file://{store}/with%20space", False),
        ("file://{outside}", True),
        ("file://{store}/../outside", True),
        ("file://{store}/%2e%2e/outside", True),
        ("file://{store}/link", True),
        ("file://{store}-beside", True),
        ("file://elsewhere.example.org{store}", True),
        ("s3://theirs", True),
        ("mlflow-artifacts:/1", True),
    ],
)
def test_a_location_is_below_the_stores_folder(tmp_path, location, refused):
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "outside").mkdir()
    (store / "link").symlink_to(tmp_path / "outside")
    uri, place = f"sqlite:///{store}/mlflow.db", location.format(store=store, outside=tmp_path / "outside")
    assert bool(outside(uri, place, False)) == refused
    assert not outside(uri, place, True)
    assert bool(outside(f"sqlite+pysqlite:///{store}/mlflow.db?timeout=9", place, False)) == refused
    assert not outside("http://127.0.0.1:5000", place, False), "a server's files are where the server says"


def test_a_store_behind_a_link_keeps_its_files(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "mlflow.db").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mlflow.db").symlink_to(tmp_path / "shared" / "mlflow.db")
    for folder in ("mine", "shared"):
        assert not outside(f"sqlite:///{tmp_path}/mine/mlflow.db", f"{tmp_path}/{folder}/mlartifacts", False)


@pytest.mark.parametrize("name", ["a%2F..%2F..%2Fb", "100%25 é?c#d", "a\nb%0A\t"], ids=["leaves", "query", "controls"])
def test_a_folder_of_any_name_has_its_own_store(tmp_path, monkeypatch, name):
    """SQLAlchemy reads `%2F` as a slash, and `?` as the end of a path; a folder's own line end is quoted in the place of its files."""
    here = tmp_path / "here" / name
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("_MLFLOW_SERVER_ARTIFACT_ROOT", raising=False)
    folder = RunFolder(runs_folder(None), "own", {})
    folder.record("start", name="own", params={}, tags={})
    folder.artifact(folder.path / "config.yaml")
    folder.close("FINISHED")
    tracking = TrackingConfig(experiment="100%25", patience_seconds=10)
    uri = checked_uri(tracking)
    uploader = MlflowUploader(folder.path, uri, tracking)
    uploader.start()
    assert uploader.close() is None, uploader.error
    assert uploader.aside == []
    assert {path.name for path in here.iterdir()} == {"runs", "mlflow.db", "mlflow.db.lock", "mlartifacts"}
    assert {path.name for path in (here / "mlartifacts" / "100%25").glob("*/artifacts/*")} == {"config.yaml", "metrics.jsonl"}
    assert [*tmp_path.iterdir(), *(tmp_path / "here").iterdir()] == [tmp_path / "here", here]
    assert uri == path_to_local_sqlite_uri(str(here / "mlflow.db")), "what `mlflow ui` takes in this folder"
    assert outside(uri, f"{here.as_uri()}/a%0Ab", False), "a line end that is not the folder's own"


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
    return file.read_bytes()


@pytest.fixture
def store(empty_store, tmp_path, monkeypatch):
    """A stranger's store in the current folder, which is the default one."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(empty_store)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")


def test_a_run_is_not_sent_where_a_strangers_experiment_says(store, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    store.create_experiment("lossforge", artifact_location=theirs.as_uri())
    assert train.main(QUICK) == 1
    error = capsys.readouterr().err
    said = f"error: tracking.uri=sqlite:///{tmp_path}/here/mlflow.db: experiment lossforge: its files are at {theirs.as_uri()}"
    assert error.startswith(said)
    assert "tracking.artifacts_outside=true" in error
    assert not Path("runs").exists()

    assert train.main([*QUICK, "tracking=none"]) == 0
    (run,) = Path("runs").iterdir()
    assert sync.main([str(run)]) == 1
    assert f"its files are at {theirs.as_uri()}" in capsys.readouterr().out
    assert not theirs.exists()
    assert sync.main([str(run), "tracking.artifacts_outside=true"]) == 0
    assert list(theirs.glob("*/artifacts/config.yaml"))

    (stored,) = store.search_runs([store.get_experiment_by_name("lossforge").experiment_id])
    name = f"runs:/{stored.info.run_id}/checkpoints/last.pt"
    with pytest.raises(UserError, match="its files are at"):
        open_checkpoint(name, [])
    assert evaluate.main([f"checkpoint={name}", "--cfg"]) == 1
    assert "tracking.artifacts_outside=true" in capsys.readouterr().err


def test_a_trigger_of_a_strangers_store_leads_no_file_elsewhere(store, tmp_path, capsys):
    """SQL in the file can change where a run's files are after the experiment was looked at."""
    theirs = tmp_path / "theirs"
    with contextlib.closing(sqlite3.connect("mlflow.db")) as database:
        for number, event in enumerate(("INSERT ON runs", "INSERT ON tags", "UPDATE ON runs")):
            database.execute(f"CREATE TRIGGER theirs{number} AFTER {event} BEGIN UPDATE runs SET artifact_uri = '{theirs.as_uri()}'; END")
        database.commit()
    assert train.main(QUICK) == 0
    assert f"its files are at {theirs.as_uri()}" in " ".join(capsys.readouterr().out.split())
    assert not theirs.exists()

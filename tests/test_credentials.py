"""A password in the store's address is needed to reach the store, and is found nowhere afterwards."""

import os
import pickle
import subprocess
from pathlib import Path

import postgres
import pytest
import torch
import yaml
from mlflow_server import Server, written
from safetensors import safe_open
from words import TINY

from lab.base.errors import UserError
from lab.base.formats import masked
from lab.config.schema import TrackingConfig
from lab.config.settings import load
from lab.tracking.uploader import completed, tracking_uri

SECRET = "tr0ub4dor-and-3"
WORDS = [*TINY, "loss.implementation=torch", "trainer.log_every=1", "tracking.model=false"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:secret@host:5000/a", "http://me:***@host:5000/a"),
        ("http://:secret@host", "http://:***@host"),
        ("https://secret@host/a", "https://***@host/a"),
        ("http://me:sec%40ret@host", "http://me:***@host"),
        ("http://me:sec@ret@host/a", "http://me:***@host/a"),
        ("http://me:sec/ret@host/a", "http://me:***@host/a"),
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("postgresql+psycopg2://me:a se/cr?et#x@host:5432/db", "postgresql+psycopg2://me:***@host:5432/db"),
        ("mysql+pymysql://me:sec@ret@host/db", "mysql+pymysql://me:***@host/db"),
        ("postgresql://me@host/db?password=sec;r#et&sslmode=require", "postgresql://me@host/db?password=***&sslmode=require"),
        ("http://host/mlflow?x=1&api_key=secret", "http://host/mlflow?x=1&api_key=***"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dsecret", "mssql+pyodbc:///?odbc_connect=***"),
        ("tracking.uri='http://host/?token=secret' seed=1", "tracking.uri='http://host/?token=***' seed=1"),
        ("a=http://h:1 b=http://me:secret@host c=x@y", "a=http://h:1 b=http://me:***@host c=x@y"),
    ],
)
def test_what_is_masked(address, shown):
    assert masked(address) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "address",
    [
        *(
            "sqlite:////runs/mlflow.db",
            "http://host:5000/#/experiments/1?by=me@host",
            "http://[::1]:5000/a?by=me@host",
            "postgresql://h:5432/db",
        ),
        *("databricks://profile", "postgresql://me@host/db?sslmode=require", "me:secret@host is no address", "5:3"),
    ],
)
def test_what_holds_no_secret_stays(address):
    assert masked(address) == address


WHOLE = f"http://me:{SECRET}@host"


@pytest.mark.parametrize(
    ("given", "says"), [("", "it is not set"), (f"http://me:{SECRET}@other", "it holds http://me:***@other")], ids=["none", "another's"]
)
def test_masked_credentials_need_the_whole_address_in_the_environment(monkeypatch, given, says):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    with pytest.raises(UserError, match=r"tracking.uri=http://me:\*\*\*@host: .*Set MLFLOW_TRACKING_URI to the whole") as caught:
        completed("http://me:***@host")
    assert says in str(caught.value)


def test_credentials_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", WHOLE)
    assert completed("http://me:***@host") == tracking_uri(TrackingConfig()) == WHOLE
    assert tracking_uri(TrackingConfig(uri="http://me:***@host")) == WHOLE


def test_a_runs_own_server_is_taken_where_none_is_named_and_its_own_file_is_not(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(TrackingConfig(), "http://third") == "http://third"
    assert tracking_uri(TrackingConfig(), "sqlite:////elsewhere.db").startswith("sqlite:")
    assert tracking_uri(TrackingConfig(), "sqlite:////elsewhere.db") != "sqlite:////elsewhere.db"


@pytest.mark.parametrize("uri", ["localhost:5000", "127.0.0.1:5000", "mlflow.example.org:5000/path"])
def test_a_server_without_a_scheme_is_refused(uri):
    with pytest.raises(UserError, match=f"tracking.uri={uri}: has no scheme; for a server http://{uri} is expected"):
        tracking_uri(TrackingConfig(uri=uri))


@pytest.mark.parametrize("uri", ["htp://host", "C:\\mlruns", "sqlite:store.db", "http://", f"postgres://me:{SECRET}@host/x"])
def test_a_store_that_mlflow_does_not_have_is_refused(uri):
    with pytest.raises(UserError, match=r"^tracking.uri=.*: http://, https://, sqlite:///, postgresql://, .* is expected.$") as caught:
        tracking_uri(TrackingConfig(uri=uri))
    assert SECRET not in str(caught.value)


def test_a_store_in_a_folder_is_refused_as_mlflow_does(monkeypatch):
    for uri in ("/srv/mlruns", "file:///srv/mlruns"):
        with pytest.raises(UserError, match=r"a database is expected, such as sqlite:////srv/mlruns/mlflow.db\. .*migrate-filestore"):
            tracking_uri(TrackingConfig(uri=uri))
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        assert tracking_uri(TrackingConfig(uri=uri)) == uri
        monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    for uri in ("databricks", "databricks://profile", "postgresql+psycopg2://host/x", "sqlite:///x.db", "https://host"):
        assert tracking_uri(TrackingConfig(uri=uri)) == uri


@pytest.mark.parametrize(
    ("setting", "said"), [("trackin.uri", "trackin.uri"), ("trainer.epochs", "http://me:***@host")], ids=["unknown", "of another type"]
)
def test_an_error_of_a_setting_holds_no_secret(setting, said):
    with pytest.raises(UserError) as caught:
        load([f"{setting}=http://me:{SECRET}@host"])
    assert SECRET not in str(caught.value)
    assert said in str(caught.value)


def test_settings_are_shown_without_secrets():
    settings = load([f"tracking.uri=http://me:{SECRET}@host", f"tracking.tags={{from: 'http://you:{SECRET}@there'}}"])
    assert settings.config.tracking.uri == f"http://me:{SECRET}@host"
    assert SECRET not in str(settings.tree()) + str(settings.flat())
    assert settings.flat()["tracking.tags.from"] == "http://you:***@there"


def test_a_server_that_fails_is_named_without_its_password(run_folder):
    from lab.tracking.uploader import MlflowUploader

    run_folder.record("start", app="train", name="x", params={}, tags={"command": f"tracking.uri=http://me:{SECRET}@127.0.0.1:9"})
    uploader = MlflowUploader(run_folder.path, f"http://me:{SECRET}@127.0.0.1:9", TrackingConfig(experiment="x", patience_seconds=0))
    uploader.start()
    assert str(uploader.close()).startswith("http://me:***@127.0.0.1:9 does not answer: Connection refused")
    assert holders(run_folder.path) == []


def holders(*folders: Path) -> list[str]:
    """The files below that hold the secret, as bytes or as what they unpack to."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        if path.suffix == ".pt":
            whole += str(torch.load(path, weights_only=True)).encode()
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                whole += str(file.metadata()).encode()
        if path.suffix == ".pkl":
            whole += str(pickle.loads(whole)).encode()
        if SECRET.encode() in whole:
            found.append(str(path))
    return found


def sync(clone, *words, **env):
    command = [clone.warm.python(), "experiments/sync.py", *words]
    done = subprocess.run(command, cwd=clone.path, env=clone.env | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def database():
    if postgres.binaries() is None:
        pytest.skip("Postgres is not installed (Debian's package postgresql)")
    if os.geteuid() == 0 and not Path("/etc/passwd").read_text(encoding="utf-8").count("\npostgres:"):
        pytest.skip("Postgres does not run as root, and there is no user postgres")
    cluster = postgres.Postgres(SECRET)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def test_a_run_on_a_database_with_a_password(clone, database):
    """Trained, resumed and sent by an address from the environment."""
    clone.env |= {"OMP_NUM_THREADS": "1"}
    whole = {"MLFLOW_TRACKING_URI": database.uri}
    done = clone.run(*WORDS, "trainer.max_updates=3", timeout=600, **whole)
    assert done.status == 0, done.output
    assert "postgresql+psycopg2://mlflow:***@127.0.0.1" in done.output
    (folder,) = clone.run_folders()
    before = clone.contents()
    refused = clone.run(f"resume={folder}", "trainer.max_updates=5")
    assert refused.status == 1, refused.output
    assert "Set MLFLOW_TRACKING_URI to the whole address (it is not set)" in refused.output
    assert "Traceback" not in refused.output
    assert clone.contents() == before
    outputs = [done.output, refused.output]
    again = clone.run(f"resume={folder}", "trainer.max_updates=5", timeout=600, **whole)
    assert again.status == 0, again.output
    outputs += [again.output]

    assert database.psql("select count(*) from runs") == "1"
    count = sum(written(folder).values())
    assert database.psql("select count(*) from metrics") == str(count)

    (folder / "tracking.json").write_text((folder / "tracking.json").read_text().replace('"offset": ', '"offset": 0, "was": '))
    status, output = sync(clone)
    assert (status, "Set MLFLOW_TRACKING_URI" in output) == (1, True), output
    assert "Traceback" not in output
    outputs += [output]
    status, output = sync(clone, str(folder), **whole)
    assert (status, "complete, run " in output) == (0, True), output
    outputs += [output]
    assert database.psql("select count(*) from metrics") == str(count)

    assert [output for output in outputs if SECRET in output] == []
    assert holders(clone.path) == []
    dump = database.dump()
    assert "trainer.max_updates" in dump
    assert SECRET not in dump


@pytest.mark.slow
def test_a_sweep_on_a_server_with_a_password(clone, tmp_path):
    """The address is one of its words; jobs, whose words are in a file, get it by their environment."""
    clone.env |= {"OMP_NUM_THREADS": "1"}
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "server").start()
    address = server.uri.replace("http://", f"http://me:{SECRET}@")
    words = [*WORDS, "trainer.max_updates=2", "seed=0,1", f"tracking.uri={address}"]
    try:
        done = clone.run("-m", *words, "hydra/launcher=submitit_local", timeout=900)
        assert done.status == 0, done.output
        runs = server.runs()
        assert [run["info"]["status"] for run in runs] == ["FINISHED"] * 3
        params = [{each["key"]: each["value"] for each in run["data"]["params"]} for run in runs]
        assert {each["tracking.uri"] for each in params} == {server.uri.replace("http://", "http://me:***@")}
    finally:
        server.kill()
    (sweep,) = (path for path in clone.run_folders() if (path / "sweep.yaml").exists())
    assert f"tracking.uri={params[0]['tracking.uri']}" in yaml.safe_load((sweep / "sweep.yaml").read_text())["words"]
    assert SECRET not in done.output
    assert holders(clone.path, tmp_path / "server") == []

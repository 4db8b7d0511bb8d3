"""One bad record keeps no other back: names become valid and stay different, and what a store refuses is set aside and named."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name
from mlflow_server import Server

from lab.config.schema import TrackingConfig
from lab.config.user import seal
from lab.run.folder import RunFolder
from lab.tracking.store import valid_name, valid_text
from lab.tracking.uploader import SEALED, MlflowUploader, read_state, run_key

KEPT = ["train/loss", "a", "a/b", "a.b-c d:e", "ap/été", "_", "ap/..x", "x" * 250]
MADE = ["", " /", ".", "..", "../..", "a//b", "a/", "/a", "//a", "a/./b", "a/../b", "..a", "a,b", "a;b", "a\n", "a\0b", "\ud800", "😀"]
MADE += ["x" * 251, "x" * 250 + "/", "x" * 250 + "\n", "a_b-1eb7c5,"]


@pytest.mark.parametrize("name", KEPT)
def test_a_name_that_mlflow_takes_stays(name):
    assert valid_name(name) == name


@pytest.mark.parametrize("name", MADE, ids=[repr(name[-6:]) for name in MADE])
def test_any_other_name_is_made_valid(name):
    made = valid_name(name)
    _validate_metric_name(made)  # MLflow's own rule
    assert len(made) <= MAX_ENTITY_KEY_LENGTH
    assert made != name


def test_different_names_stay_different():
    assert len({valid_name(f"ap/{name}") for name in KEPT + MADE}) == len(KEPT + MADE)
    assert valid_name("a,b") == "a_b-1eb7c5"  # sha256("a,b") begins so


def test_a_text_has_nothing_that_a_database_refuses():
    assert valid_text("a\0b\ud800c", 4) == "a\ufffdb\ufffd"
    assert valid_text(1.5, 10) == "1.5"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server")).start()
    yield server
    server.kill()


@pytest.fixture(params=["server", "database"])
def place(request, tmp_path):
    return request.getfixturevalue("server").uri if request.param == "server" else f"sqlite:///{tmp_path / 'mlflow.db'}"


def delivered(folder, uri, said=lambda text: None):
    """The run as the store has it, and its uploader."""
    uploader = MlflowUploader(folder.path, uri, TrackingConfig(experiment="delivery", patience_seconds=20), say=said)
    uploader.start()
    assert uploader.close() is None, uploader.error
    client = MlflowClient(tracking_uri=uri)
    return client, client.get_run(uploader.run_id), uploader


@pytest.mark.each("function")
def test_names_of_categories_arrive(run_folder, place):
    """An empty name, `.` and `a//b` stopped the delivery for good."""
    names = ["", ".", "a//b", "a/b", "x" * 300, "x" * 301]
    run_folder.record("start", name="names", params={"a//b": "1", "": "2"}, tags={"..": "3"})
    run_folder.metrics(1, {f"ap/{name}": float(i) for i, name in enumerate(names)})
    run_folder.summary({f"best_ap/{name}": float(i) for i, name in enumerate(names)})
    run_folder.close("FINISHED")
    _, run, uploader = delivered(run_folder, place)
    wanted = {valid_name(f"{kind}/{name}"): float(i) for kind in ("ap", "best_ap") for i, name in enumerate(names)}
    assert run.data.metrics == wanted
    assert len(wanted) == 2 * len(names)
    assert run.data.params == {valid_name("a//b"): "1", valid_name(""): "2"}
    assert run.data.tags[valid_name("..")] == "3"
    assert (run.info.status, uploader.aside) == ("FINISHED", [])


def test_a_job_waits_for_the_run_of_its_sweep_without_a_word(tmp_path):
    """The parent's run may be there seconds after the first job began; nothing has failed then."""
    uri, said = f"sqlite:///{tmp_path / 'mlflow.db'}", []
    (tmp_path / "sweep" / "job").mkdir(parents=True)
    sweep, job = RunFolder.reopen(tmp_path / "sweep"), RunFolder.reopen(tmp_path / "sweep" / "job")
    sweep.record("start", name="sweep", params={}, tags={})
    sweep.close("FINISHED")
    (sweep.path / "sweep.yaml").touch()
    job.record("start", name="job", params={}, tags={})
    uploader = MlflowUploader(job.path, uri, TrackingConfig(experiment="delivery", patience_seconds=20), say=said.append)
    uploader.start()
    while uploader.failures < 2:
        time.sleep(0.05)
    assert "is not there yet" in str(uploader.error)
    assert said == []
    _, parent, _ = delivered(sweep, uri)
    job.close("FINISHED")
    assert uploader.close() is None, uploader.error
    run = MlflowClient(tracking_uri=uri).get_run(uploader.run_id)
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id


@pytest.mark.slow
def test_no_other_thread_changes_the_environment(tmp_path):
    """C code of the main thread that reads it at that moment ended the process: a run of 3,300 tests met it once."""
    code = """
import os, sys, threading
import numpy  # whose import changes the environment; the app has imported it by then
def hook(event, _):
    if event in ("os.putenv", "os.unsetenv") and threading.current_thread() is not threading.main_thread():
        print("changed by", threading.current_thread().name, flush=True)
sys.addaudithook(hook)
sys.path.insert(0, "experiments")
from pathlib import Path
from lab.config.schema import TrackingConfig
from lab.run.folder import RunFolder
from lab.tracking.uploader import MlflowUploader
Path(sys.argv[1], "run").mkdir()
folder = RunFolder.reopen(Path(sys.argv[1], "run"))
folder.record("start", name="run", params={}, tags={})
folder.close("FINISHED")
uploader = MlflowUploader(folder.path, f"sqlite:///{sys.argv[1]}/mlflow.db", TrackingConfig(experiment="x", patience_seconds=20))
uploader.start()
print("ended", uploader.close())
"""
    env = {name: value for name, value in os.environ.items() if "MLFLOW" not in name and name != "DO_NOT_TRACK"}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == ["ended None"], done.stderr
    assert "changed by" not in done.stdout


def append(folder, *records):
    """Records as somebody else may have written them."""
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


BAD = [
    {"kind": "metrics", "time": 2.0, "step": 1, "values": {"m": "abc"}},
    {"kind": "metrics", "time": 2.0, "step": 2**70, "values": {"m": 1.0}},
    {"kind": "metrics", "time": 2.0, "values": {"m": 1.0}},
    {"kind": "metrics", "time": 2.0, "step": 1, "values": [1]},
    {"kind": "summary", "time": 2.0, "values": {"m": "abc"}},
    {"kind": "tags", "time": 2.0},
    {"kind": "data", "time": 2.0, "sets": [{"name": "", "digest": "d" * 99, "samples": 1, "classes": 1, "source": "s", "context": "c"}]},
    {"kind": "view", "time": 2.0, "key": "a", "state": {"x": "y" * 30_000}},
    {"kind": "artifact", "time": 2.0, "path": "no-folder"},
    {"kind": "artifact", "time": 2.0, "path": "config.yaml", "folder": "../../up"},
    {"kind": "end", "time": 2.0, "status": "LOST"},
]


def test_a_bad_record_is_set_aside_and_the_rest_arrives(run_folder, place):
    said = []
    run_folder.record("start", name="bad", params={"seed": "0"}, tags={})
    (run_folder.path / "no-folder").write_text("text")
    for number, record in enumerate(BAD):
        append(run_folder, record)
        run_folder.metrics(number, {"train/loss": number / 2})
    run_folder.record("tags", values={"after": "all"})
    run_folder.close("FINISHED")
    client, run, uploader = delivered(run_folder, place, said.append)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {point.step: point.value for point in history} == {number: number / 2 for number in range(len(BAD))}
    assert (run.info.status, run.data.tags["after"], "m" in run.data.metrics) == ("FINISHED", "all", False)
    kinds = [line.split("'")[1] for line in uploader.aside]
    assert kinds == [record["kind"] for record in BAD]
    assert read_state(run_folder.path)["aside"] == uploader.aside
    assert "'abc'" in uploader.aside[0]
    assert sum(line.startswith("MLflow does not take a record of kind") for line in said) == len(BAD)
    assert uploader.aside[0] in uploader.closed()


@pytest.mark.each("function")
def test_one_param_that_is_refused_keeps_no_other_back(run_folder, place):
    """A run that is there has one of the params with another value, which MLflow does not change."""
    run_folder.record("start", name="params", params={f"p{i}": str(i) for i in range(150)}, tags={})
    delivered(run_folder, place)
    lines = (run_folder.path / "metrics.jsonl").read_text().replace('"p77": "77"', '"p77": "0"').replace('"p149": "149"', '"q": "1"')
    (run_folder.path / "metrics.jsonl").write_text(lines)
    state = read_state(run_folder.path) | {"offset": 0, "key": run_key(run_folder.path)}
    state["seal"] = seal(run_folder.path, *(state[name] for name in SEALED))
    (run_folder.path / "tracking.json").write_text(json.dumps(state))
    _, run, uploader = delivered(run_folder, place)
    assert (run.data.params["p77"], run.data.params["q"]) == ("77", "1")
    (line,) = uploader.aside
    assert "param 'p77'" in line


@pytest.mark.each("function")
def test_a_record_leads_to_no_file_outside_of_its_folder(run_folder, place, tmp_path):
    """A folder of somebody else's sent the files of the machine that sends it."""
    secret = tmp_path / "secret.txt"
    secret.write_text("my key")
    (run_folder.path / "link.txt").symlink_to(secret)
    run_folder.record("start", name="outside", params={}, tags={})
    for path in (str(secret), "../../secret.txt", "link.txt", "."):
        run_folder.record("artifact", path=path, folder="")
        run_folder.record("model", path=path, folder="")
    (run_folder.path / "mine.txt").write_text("mine")
    run_folder.record("artifact", path="mine.txt", folder="")
    run_folder.close("FINISHED")
    client, run, uploader = delivered(run_folder, place)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"mine.txt", "metrics.jsonl"}
    assert len(uploader.aside) == 8
    assert f"{secret} is not in the run's folder" in uploader.aside[0]


@pytest.mark.each("function")
def test_a_file_that_cannot_be_read_keeps_nothing_back(run_folder, place):
    if os.geteuid() == 0:
        (run_folder.path / "a.txt").mkdir()
    else:
        (run_folder.path / "a.txt").touch(mode=0)
    run_folder.record("start", name="unreadable", params={}, tags={})
    run_folder.record("artifact", path="a.txt", folder="")
    run_folder.close("FINISHED")
    _, run, uploader = delivered(run_folder, place)
    assert run.info.status == "FINISHED"
    assert "a.txt is not a file that can be read" in uploader.aside[0]

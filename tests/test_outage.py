"""A tracking server that goes down costs no training and no data: every metric is in the store exactly once, in the end."""

import contextlib
import http.client
import http.server
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

import pytest
from mlflow_server import Server, written
from words import TINY

WORDS = [*TINY, "loss.implementation=torch", "trainer.log_every=1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server")).start()
    yield server
    server.kill()


def losses(folder: Path) -> list[float]:
    """When each update's loss was written, in seconds."""
    records = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"
    ]
    return [record["time"] for record in records if "train/loss" in record.get("values", {})]


def wait(process, true):
    deadline = time.monotonic() + 300
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sync(clone, *words):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # where the tests were started in the background, a shell ignores Ctrl-C for them and for what they start
    streams["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([clone.warm.python(), "experiments/sync.py", *words], cwd=clone.path, env=clone.env, **streams)


def complete(server, folder, experiment):
    """The store has one run, and it holds all that the folder does, once."""
    (run,) = server.runs(experiment, "ALL")
    assert server.history(run) == written(folder)
    last = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["kind"] == "end"
    assert run["info"]["status"] == last["status"]
    assert {"metrics.jsonl", "config.yaml"} <= server.artifacts(run)


@pytest.mark.slow
def test_a_server_that_is_killed_comes_back_and_is_killed_for_good(clone, server):
    words = [*WORDS, "data.batch_size=8", "trainer.epochs=500", "tracking.system_seconds=0.5", "tracking.patience_seconds=1"]
    process = clone.start(*words, f"tracking.uri={server.uri}", "tracking.experiment=killed", OMP_NUM_THREADS="1")
    wait(process, lambda: list(clone.path.glob("runs/*/tracking.json")))
    (folder,) = clone.run_folders()

    def sent():
        return json.loads((folder / "tracking.json").read_text(encoding="utf-8"))["offset"]

    wait(process, lambda: sent() > 4000 and len(losses(folder)) > 10)
    busy = sync(clone)
    os.killpg(server.process.pid, signal.SIGSTOP)  # hangs, and answers nothing
    stopped, until = time.time(), len(losses(folder)) + 20
    assert "left to the process that is sending it" in busy.communicate(timeout=600)[0]
    wait(process, lambda: len(losses(folder)) > until)
    server.kill()
    server.start()
    back = time.time()
    for _ in range(2):  # all that was missed, and then what has been written meanwhile
        size = (folder / "metrics.jsonl").stat().st_size
        wait(process, lambda size=size: sent() > size)
    server.kill()
    until = len(losses(folder)) + 5
    wait(process, lambda: len(losses(folder)) > until)
    process.terminate()
    output, _ = process.communicate(timeout=600)
    assert process.returncode in (130, 143), output
    assert "Traceback" not in output
    assert output.count("MLflow fails") == output.count("MLflow works again") == 1, output
    assert output.count("does not answer") == 2, output  # when it was noticed, and in the table
    assert f"experiments/sync.py runs/{folder.name}" in " ".join(output.replace("│", "").split())

    times = losses(folder)
    gaps = [(end, end - start) for start, end in itertools.pairwise(times)]
    before = [gap for end, gap in gaps if end < stopped]
    outage = [gap for end, gap in gaps if stopped < end < back]
    assert len(outage) > 20
    assert statistics.median(outage) < 2 * statistics.median(before) + 0.1
    assert max(outage) < 10  # a request that hangs is given up after 20 s

    server.start()
    both = [sync(clone, str(folder)) for _ in range(2)]
    outputs = [each.communicate(timeout=600)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], outputs
    assert any("complete, run " in output for output in outputs), outputs
    complete(server, folder, "killed")
    assert sent() == (folder / "metrics.jsonl").stat().st_size


@pytest.fixture
def hanging():
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    held.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


def until_said(process, text: str) -> str:
    """What a process printed until then."""
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(output)


# on a busy machine the first request is given up before the signal arrives
UNANSWERED = r"incomplete: (interrupted while it did not answer|\S+ does not answer)"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_the_wait_for_a_server_that_hangs(clone, server, hanging, number, status):
    alone = [*WORDS, "trainer.max_updates=2", "tracking.model=false"]
    words = [*alone, f"tracking.uri={hanging}", "tracking.experiment=hanging", "tracking.patience_seconds=3600"]
    process = clone.start(*words, OMP_NUM_THREADS="1")
    output = until_said(process, f"waiting for MLflow at {hanging}")
    process.send_signal(number)
    output += process.communicate(timeout=600)[0]
    assert process.returncode == status, output
    assert "Traceback" not in output
    said = " ".join(output.replace("│", "").split())
    assert "run None" not in said
    assert re.search(UNANSWERED, said), said
    (folder,) = clone.run_folders()
    assert f"experiments/sync.py runs/{folder.name}" in said
    assert "finished" in said
    assert json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["status"] == "FINISHED"

    if number == signal.SIGTERM:
        return
    waiting = sync(clone, str(folder))
    output = until_said(waiting, f"waiting for MLflow at {hanging}")
    waiting.send_signal(signal.SIGINT)
    output += waiting.communicate(timeout=600)[0]
    assert waiting.returncode == 130, output
    assert re.search(f"{re.escape(str(folder))}: {UNANSWERED}", output), output
    assert "Traceback" not in output
    if not server.healthy():
        server.start()
    sent = sync(clone, str(folder), f"tracking.uri={server.uri}")
    assert "complete, run " in sent.communicate(timeout=600)[0]
    assert sent.returncode == 0
    complete(server, folder, "hanging")


@pytest.mark.slow
def test_pictures_are_drawn_while_mlflow_imports_ipython(clone, hanging, tmp_path):
    """matplotlib reads IPython's version, which a module that another thread is importing does not have yet."""
    (tmp_path / "IPython.py").write_text(
        "import time\ntime.sleep(10)\nversion_info = (9, 0)\nget_ipython = lambda: None\n", encoding="utf-8"
    )
    words = [*WORDS, "trainer.max_updates=2", f"tracking.uri={hanging}", "tracking.experiment=hanging", "tracking.patience_seconds=0"]
    process = clone.start(*words, fresh=True, OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))
    until_said(process, f"waiting for MLflow at {hanging}")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=600)[0]
    assert "finished" in output, output
    (folder,) = clone.run_folders()
    assert list(folder.rglob("confusion*.png"))


class Losing(http.server.ThreadingHTTPServer):
    """Hands requests on to a server, and loses the answers that `lost` chooses: the connection is cut after the request has arrived.

    Where `lost` gives a status and a body, these are the answer, and the server is not asked.
    """

    daemon_threads = True

    def __init__(self, server: Server, lost) -> None:
        super().__init__(("127.0.0.1", 0), Forward)
        self.behind, self.lost = server, lost
        self.uri = f"http://127.0.0.1:{self.server_port}"
        self.count: dict[str, int] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Forward(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.server.count[path] = number = self.server.count.get(path, 0) + 1
        cut = self.server.lost(path, number)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection", "transfer-encoding")}

        def ask():
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheader("Content-Type") or "application/json"

        if isinstance(cut, threading.Event):  # arrives too late, when nobody waits for it any more
            self.connection.shutdown(socket.SHUT_RDWR)  # to close it is not enough: rfile and wfile hold it open
            cut.wait(60)
            ask()
            self.close_connection = True
            return
        status, content, kind = (*cut, "application/json") if isinstance(cut, tuple) else ask()
        if cut and not isinstance(cut, tuple):
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = forward  # noqa: N815 (names that http.server looks for)

    def log_message(self, *words):
        pass


def sent(run_folder, uri, experiment, patience=60):
    """Its uploader, when it has ended, and what it said in the end."""
    from lab.config.schema import TrackingConfig
    from lab.tracking.uploader import MlflowUploader

    tracking = TrackingConfig(experiment=experiment, patience_seconds=patience, register=run_folder.path.parents[1].name)
    uploader = MlflowUploader(run_folder.path, uri, tracking)
    uploader.start()
    return uploader, uploader.close()


def uploaded(run_folder, uri, experiment):
    """Its uploader, when all of the finished folder has been sent."""
    uploader, problem = sent(run_folder, uri, experiment)
    assert problem is None, uploader.error
    return uploader


@pytest.fixture
def soon(monkeypatch):
    """Each try follows the failed one at once: a test in which each request fails waits for a minute else."""
    monkeypatch.setattr("lab.tracking.uploader.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("lab.tracking.uploader.LONGEST_PAUSE", 0.1)


@pytest.fixture
def written_folder(run_folder):
    """A start, data, metrics with nan and names that MLflow refuses, a model, a summary, tags, an artifact, a view, an end."""
    params = {"seed": "0", "tracking.uri": "http://me:secret@host"}
    run_folder.record("start", name="lost", params=params, tags={"command": "x" * 9000})
    sets = [{"name": "digits", "digest": "d1", "samples": 90, "classes": 2, "source": "http://me:secret@host/digits"}]
    sets += [{"name": "digits", "digest": "d2", "samples": 10, "classes": 2, "source": "digits"}]
    run_folder.record("data", sets=[each | {"context": context} for each, context in zip(sets, ("training", "validation"), strict=True)])
    for step in range(120):
        values = {"train/loss": 1 / (step + 1), "train/lr": float("nan") if step == 3 else 0.1, "a,b": float(step)}
        run_folder.metrics(step, values)
    run_folder.record("tags", values={"error": "none", "mlflow.note.content": "[pictures]({run}/artifacts/pictures)"})
    run_folder.artifact(run_folder.path / "config.yaml", "settings")
    (run_folder.path / "best.pt2").write_bytes(b"a model")
    shapes = {"shape": [1, 8, 8], "output": [2], "says": "probabilities", "classes": ["a", "b"], "step": 119}
    about = {"name": "ce-resnet", "type": "classification", "params": {"loss": "ce"}, "register": run_folder.path.parents[1].name}
    run_folder.record("model", path="best.pt2", **shapes, **about)
    run_folder.summary({"best_top1": 0.5, "seconds": float("nan")})
    run_folder.record("view", key="compare-1", state={"selectedColumns": ["metrics.`best_top1`"]})
    run_folder.close("FINISHED")
    return run_folder


def test_answers_that_are_lost(written_folder, server, soon):
    if not server.healthy():
        server.start()
    proxy = Losing(server, lambda path, number: number == 1)
    uploaded(written_folder, proxy.uri, "lost")
    proxy.shutdown()
    asked = {path.partition("/mlflow")[2]: number for path, number in proxy.count.items()}
    assert asked["/runs/create"] == asked["/experiments/create"] == asked["/logged-models"] == 1  # found again, where the answer was lost
    again = [number for name, number in asked.items() if name.endswith(("/log-batch", "/runs/update", ".yaml", ".jsonl"))]
    assert len(again) == 5
    assert min(again) > 1
    (run,) = server.runs("lost", "ALL")
    stored = server.history(run)
    assert sum(stored.values()) == 362
    assert set(stored.values()) == {1}
    assert stored["train/loss", 119, 1 / 120] == stored["a_b-1eb7c5", 7, 7.0] == 1
    assert run["info"]["status"] == "FINISHED"
    assert {param["key"]: param["value"] for param in run["data"]["params"]} == {"seed": "0", "tracking.uri": "http://me:***@host"}
    assert server.artifacts(run, "settings") == {"settings/config.yaml"}
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    address = f"#/experiments/{run['info']['experiment_id']}/runs/{run['info']['run_id']}/artifacts/pictures"
    assert tags["mlflow.note.content"] == f"[pictures]({address})"
    beside(server, run, written_folder)


def beside(server, run, folder):
    """The store has the run's data, its model and the view, each once."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=server.uri)
    whole = client.get_run(run["info"]["run_id"])
    data = {each.tags[0].value: (each.dataset.name, each.dataset.digest) for each in whole.inputs.dataset_inputs}
    assert data == {"training": ("digits", "d1"), "validation": ("digits", "d2")}
    assert len(whole.inputs.dataset_inputs) == 2
    assert "secret" not in str(whole.inputs.to_dictionary())
    (output,) = whole.outputs.model_outputs
    (model,) = client.search_logged_models([whole.info.experiment_id], f"source_run_id = '{whole.info.run_id}'")
    assert (model.model_id, model.status.value, model.name, output.step) == (output.model_id, "READY", "ce-resnet", 119)
    assert [(each.key, each.value, each.dataset_digest) for each in model.metrics] == [("best_top1", 0.5, "d2")]
    files = {path.name for path in (server.folder / "artifacts").glob(f"*/models/{model.model_id}/artifacts/*")}
    assert files >= {"MLmodel", "data", "requirements.txt"}
    versions = client.search_model_versions(f"name = '{folder.path.parents[1].name}' and run_id = '{whole.info.run_id}'")
    assert [version.version for version in versions] == ["1"]
    experiment = client.get_experiment(whole.info.experiment_id)
    assert json.loads(experiment.tags["mlflow.sharedViewState.compare-1"]) == {"selectedColumns": ["metrics.`best_top1`"]}
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_run_that_the_server_creates_too_late_leaves_no_second_one(written_folder, server, soon):
    if not server.healthy():
        server.start()
    late = threading.Event()

    def lost(path, number):
        if path.endswith("runs/log-batch"):
            late.set()
        return late if path.endswith("runs/create") and number == 1 else None

    proxy = Losing(server, lost)
    uploader = uploaded(written_folder, proxy.uri, "late")
    proxy.shutdown()
    assert len(server.runs("late", "ALL")) == 2
    (run,) = server.runs("late")
    assert run["info"]["run_id"] == uploader.run_id
    assert sum(server.history(run).values()) == 362


def test_what_was_sent_is_not_doubled_when_nobody_remembers_it(written_folder, server):
    """tracking.json is lost, as after a power cut, or another store was chosen in between."""
    if not server.healthy():
        server.start()
    for _ in range(2):
        uploaded(written_folder, server.uri, "forgotten")
        (run,) = server.runs("forgotten", "ALL")
        assert sum(server.history(run).values()) == 362
        beside(server, run, written_folder)
        (written_folder.path / "tracking.json").unlink()


NO_RIGHT = (403, b'{"error_code": "PERMISSION_DENIED", "message": "Permission denied"}')
NO_PATH = (404, b"<!doctype html><title>404 Not Found</title>")
EMPTY, BROKEN = (200, b"{}"), (500, b'{"error_code": "INTERNAL_ERROR", "message": "bucket is gone"}')


def without_its_model(server, folder, experiment):
    """All of the run but its model has arrived."""
    (run,) = server.runs(experiment, "ALL")
    assert sum(server.history(run).values()) == 362
    assert run["info"]["status"] == "FINISHED"
    assert server.artifacts(run) >= {"settings", "metrics.jsonl"}
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert tags["error"] == "none"
    assert {metric["key"] for metric in run["data"]["metrics"]} >= {"best_top1", "seconds"}
    assert len(run["inputs"]["dataset_inputs"]) == 2


@pytest.mark.parametrize(
    ("name", "path", "answer"),
    [
        ("no right to make a model", "/mlflow/logged-models", NO_RIGHT),
        ("a server older than MLflow 3", "/mlflow/logged-models/search", NO_PATH),
        ("no right to a model's files", "/models/m-", NO_RIGHT),
    ],
)
def test_a_model_that_the_store_refuses_keeps_nothing_else_back(written_folder, server, soon, name, path, answer):
    if not server.healthy():
        server.start()
    proxy = Losing(server, lambda asked, _: answer if path in f"{asked}/" else None)
    uploader = uploaded(written_folder, proxy.uri, name)
    proxy.shutdown()
    (said,) = uploader.aside
    assert said.startswith("a record of kind 'model' (ce-resnet): ")
    without_its_model(server, written_folder, name)


def test_an_answer_without_an_id_is_asked_for_again(written_folder, server, soon):
    """The first of each, as a proxy may give it; an id of the run that is empty, as an earlier version kept it, is none."""
    if not server.healthy():
        server.start()
    made = ("/runs/create", "/experiments/create", "/experiments/get-by-name", "/mlflow/logged-models")
    proxy = Losing(server, lambda path, number: EMPTY if path.endswith(made) and number == 1 else None)
    number = uploaded(written_folder, proxy.uri, "empty").run_id
    proxy.shutdown()
    (run,) = server.runs("empty", "ALL")
    assert number == run["info"]["run_id"]
    assert sum(server.history(run).values()) == 362
    beside(server, run, written_folder)
    forget_the_id(written_folder)
    assert uploaded(written_folder, server.uri, "empty").run_id == number


def forget_the_id(folder):
    from lab.config.user import seal
    from lab.tracking.uploader import SEALED, read_state

    state = read_state(folder.path) | {"run_id": "", "offset": 0}
    state["seal"] = seal(folder.path, *(state[name] for name in SEALED))
    (folder.path / "tracking.json").write_text(json.dumps(state))


def test_a_place_for_artifacts_that_fails_keeps_no_metric_back(written_folder, server, soon):
    """The files, the model's too, follow when it works again, by another process."""
    from lab.tracking.uploader import is_sent, read_state

    if not server.healthy():
        server.start()
    proxy = Losing(server, lambda path, _: BROKEN if "/mlflow-artifacts/" in path else None)
    uploader, problem = sent(written_folder, proxy.uri, "artifacts", patience=0.5)
    assert "500 error responses" in problem
    assert f"uv run experiments/sync.py {os.path.relpath(written_folder.path)}" in problem
    assert uploader.aside == []
    (run,) = server.runs("artifacts", "ALL")
    assert sum(server.history(run).values()) == 362
    assert run["info"]["status"] == "FINISHED"
    assert len(read_state(written_folder.path)["later"]) == 4  # settings, model, the summary that names the model, records
    assert not is_sent(written_folder.path, proxy.uri)
    proxy.lost = lambda path, number: None
    uploaded(written_folder, proxy.uri, "artifacts")
    proxy.shutdown()
    assert is_sent(written_folder.path, proxy.uri)
    (run,) = server.runs("artifacts", "ALL")
    assert sum(server.history(run).values()) == 362
    assert server.artifacts(run) >= {"settings", "metrics.jsonl"}
    beside(server, run, written_folder)

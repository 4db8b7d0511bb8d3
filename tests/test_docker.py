"""The image's and the services' files are what they should be, and the services' MLflow server works on a real Postgres."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import postgres
import pytest
import yaml
from mlflow_server import Server, written
from words import TINY

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = ROOT / "docker" / "compose.yaml"
LOGIN = ROOT / "docker" / "serve_mlflow.py"
WORDS = [*TINY, "loss.implementation=torch", "trainer.max_updates=6"]


def tool(name: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(Path(sys.executable).with_name(name)), *words], cwd=ROOT, capture_output=True, text=True)


def filled(text: str, values: dict[str, str] | None = None) -> str:
    """Compose's variables with what is set, else with their defaults."""
    given = values or {}
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: given.get(match[1]) or match[2], text)


def services() -> dict[str, dict]:
    return yaml.safe_load(filled(COMPOSE.read_text(encoding="utf-8")))["services"]


def test_hadolint_finds_nothing():
    done = tool("hadolint", "docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && apt-get install gcc\n", encoding="utf-8")
    assert "DL3006" in tool("hadolint", str(tmp_path / "Dockerfile")).stdout


def test_the_services_are_as_the_compose_specification_says(tmp_path):
    filled_in = tmp_path / "compose.yaml"
    filled_in.write_text(filled(COMPOSE.read_text(encoding="utf-8")), encoding="utf-8")
    assert "$" not in filled_in.read_text(encoding="utf-8").replace("$$", "")
    for file in (COMPOSE, filled_in):
        done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(file))
        assert done.returncode == 0, done.stdout
    filled_in.write_text(filled_in.read_text(encoding="utf-8").replace("shm_size", "shm_sise"), encoding="utf-8")
    assert tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(filled_in)).returncode == 1


def test_services_go_together():
    found = services()
    for name, service in found.items():
        image = service["image"]
        assert "build" in service or re.fullmatch(r"[\w/]+:\d[\w.-]+@sha256:[0-9a-f]{64}", image), f"{name}: {image} is not pinned"
        for other, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in found[other], f"{name} waits for {other}, which never says that it is healthy"
    for name in ("train", "bench"):
        (device,) = found[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
    assert "deploy" not in found["train-cpu"]
    volumes = set(yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["volumes"])
    used = {volume.partition(":")[0] for service in found.values() for volume in service.get("volumes", [])}
    assert used - {"./make_passwords.sh"} == volumes
    assert all(port.startswith("127.0.0.1:") for service in found.values() for port in service.get("ports", []))


def networks_of(service: dict) -> set[str]:
    return set(service.get("networks", [] if service.get("network_mode") == "none" else ["default"]))


TRAINS = {"train", "train-cpu", "bench", "sync"}
STORE = {"postgres", "s3"}


def test_what_trains_reaches_the_mlflow_server_alone_and_the_store_reaches_no_further():
    """And what trains has no password of the store."""
    found = services()
    assert set(found) == STORE | TRAINS | {"mlflow", "passwords"}
    reached = {name: {other for other in found if networks_of(found[name]) & networks_of(found[other])} for name in found}
    assert {name: reached[name] for name in TRAINS} == dict.fromkeys(TRAINS, TRAINS | {"mlflow"})
    assert reached["mlflow"] >= STORE
    assert reached["passwords"] == set()
    for service in (each for name, each in services().items() if name in TRAINS):
        assert not any("password" in volume for volume in service["volumes"])
        assert not any(word in str(service["environment"]) for word in ("AWS", "POSTGRES", "PGPASS"))
    networks = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["networks"]
    assert [name for name, how in networks.items() if how and how.get("internal")] == ["store"]
    assert all(networks_of(found[name]) == {"store"} and "ports" not in found[name] for name in STORE)


def test_services_have_few_rights():
    for name, service in services().items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged")
        assert name == "s3" or "cap_add" not in service
        assert not any("docker.sock" in volume for volume in service.get("volumes", []))
    assert {name for name, service in services().items() if service.get("read_only")} == {"passwords", "postgres"}


def made(folder: Path, **given: str) -> dict[str, str]:
    for name in ("postgres", "s3"):
        (folder / name).mkdir(exist_ok=True)
    subprocess.run(["sh", str(ROOT / "docker" / "make_passwords.sh"), str(folder)], check=True, env={"PATH": os.environ["PATH"]} | given)
    assert {file.name for name in ("postgres", "s3") for file in (folder / name).iterdir()} == {"password"}
    return {name: (folder / name / "password").read_text(encoding="utf-8") for name in ("postgres", "s3")}


def test_passwords_are_made_once(tmp_path):
    (tmp_path / "other").mkdir()
    first, other = made(tmp_path), made(tmp_path / "other")
    values = {*first.values(), *other.values()}
    assert len(values) == 4
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in values)
    assert made(tmp_path) == first
    assert made(tmp_path, S3_PASSWORD="of my own", POSTGRES_PASSWORD="") == first | {"s3": "of my own"}
    text = COMPOSE.read_text(encoding="utf-8") + (ROOT / "docker" / "env.example").read_text(encoding="utf-8")
    assert not re.search(r"^#?\w*PASSWORD=\S|PASSWORD:-[^}]", text, re.MULTILINE)  # none by default


def test_the_s3_store_starts_with_its_password(tmp_path):
    """The words of its start, run by the shell; $$ is a $ in Compose."""
    service = services()["s3"]
    made(tmp_path)
    shell, option, script, name = service["entrypoint"]
    script = script.replace("$$", "$").replace("/secrets", str(tmp_path)).replace("/entrypoint.sh", str(tmp_path / "entrypoint.sh"))
    (tmp_path / "entrypoint.sh").write_text('#!/bin/sh\necho "$AWS_SECRET_ACCESS_KEY" "$@"\n', encoding="utf-8")
    (tmp_path / "entrypoint.sh").chmod(0o755)
    words = service["command"].split()
    done = subprocess.run([shell, option, script, name, *words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [(tmp_path / "s3" / "password").read_text(encoding="utf-8"), *words]


def test_the_server_takes_passwords_from_files(tmp_path):
    """libpq and the S3 client read them from the environment."""
    made(tmp_path)
    (tmp_path / "mlflow").write_text('#!/bin/sh\necho "$PGPASSWORD" "$AWS_SECRET_ACCESS_KEY"\n', encoding="utf-8")
    (tmp_path / "mlflow").chmod(0o755)
    given = services()["mlflow"]["environment"]
    env = {key: str(given[key]).replace("/secrets", str(tmp_path)) for key in ("PGPASSWORD_FILE", "AWS_SECRET_ACCESS_KEY_FILE")}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([sys.executable, str(LOGIN)], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == [(tmp_path / name / "password").read_text(encoding="utf-8") for name in ("postgres", "s3")]


def test_every_variable_is_explained_with_its_default():
    asked = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE.read_text(encoding="utf-8")))
    explained = dict(re.findall(r"^#(\w+)=(.*)$", (ROOT / "docker" / "env.example").read_text(encoding="utf-8"), re.MULTILINE))
    assert explained == asked


def test_the_image_has_what_it_copies():
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    members = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("packages/*/pyproject.toml")}
    assert set(re.findall(r"^COPY (packages/\w+)/pyproject.toml", dockerfile, re.MULTILINE)) == members
    wanted = [line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    assert all((ROOT / path).exists() for path in wanted)


def test_what_the_image_copies_can_be_installed(tmp_path):
    """A package needs its readme and its licence to be installed, even from its sources."""
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        source, to = ROOT / line[1:], tmp_path / "app" / line[1:]
        if line.startswith("!") and source.is_dir():
            shutil.copytree(source, to, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        elif line.startswith("!"):
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to)
    for package in (".", *(f"packages/{path.parent.name}" for path in ROOT.glob("packages/*/pyproject.toml"))):
        command = ["uv", "build", "--quiet", "--wheel", "--out-dir", str(tmp_path / "dist"), package]
        done = subprocess.run(command, cwd=tmp_path / "app", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "dist").glob("*.whl"))) == 4


@pytest.fixture(scope="module")
def database():
    if postgres.binaries() is None:
        pytest.skip("Postgres is not installed (Debian's package postgresql)")
    if os.geteuid() == 0 and not Path("/etc/passwd").read_text(encoding="utf-8").count("\npostgres:"):
        pytest.skip("Postgres does not run as root, and there is no user postgres")
    cluster = postgres.Postgres()
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def answer(uri: str, host: str) -> int:
    """The status of an API request that calls the server by this name."""
    request = urllib.request.Request(f"{uri}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_run_on_the_services_server_with_postgres(clone, database, tmp_path):
    """The hosts that compose.yaml allows are these; a name of the network outside is refused."""
    allowed = services()["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"]
    server = Server(tmp_path, database.uri, MLFLOW_SERVER_ALLOWED_HOSTS=f"{allowed},127.0.0.1:*").start()
    try:
        assert [answer(server.uri, host) for host in ("mlflow:5000", "localhost:5000", "evil.example:5000")] == [200, 200, 403]
        done = clone.run(*WORDS, MLFLOW_TRACKING_URI=server.uri, OMP_NUM_THREADS="1")
        assert done.status == 0, done.output
        (folder,) = clone.run_folders()
        (run,) = server.runs()
        assert run["info"]["status"] == "FINISHED"
        assert server.history(run) == written(folder)
        assert {"config.yaml", "metrics.jsonl", "checkpoints", "pictures"} <= server.artifacts(run)
        stored = database.psql("select count(*), count(distinct (key, step, value)) from metrics")
        count = sum(written(folder).values())
        assert stored == f"{count}|{count}"
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        assert database.psql("select count(*) from params") == str(len(records[0]["params"]))
    finally:
        server.kill()


class Guarded(Server):
    """The services' server as compose.yaml starts it, but on this machine alone: its address says how it would be published."""

    def start(self) -> "Guarded":
        artifacts = self.folder / "artifacts"
        artifacts.mkdir(exist_ok=True)
        command = [sys.executable, str(LOGIN), "--host=127.0.0.1", f"--port={self.port}", "--workers=2"]
        env = self.env | {"MLFLOW_BACKEND_STORE_URI": self.store, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"--artifacts-destination={artifacts}"], stdout=log, stderr=log, env=env, cwd=ROOT, start_new_session=True
            )
        deadline = time.monotonic() + 300
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text(encoding="utf-8")[-4000:])
            time.sleep(0.1)
        return self

    def status(
        self,
        user: str = "",
        password: str = "",
        path: str = "api/2.0/mlflow/experiments/get-by-name?experiment_name=Default",
        content: dict[str, str] | None = None,
    ) -> int:
        given = {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"} if user else {}
        body = content and json.dumps(content).encode()
        given |= {"Content-Type": "application/json"} if content else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.uri}/{path}", body, given), timeout=60) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code


TRAINS_BY = "a-password-of-what-trains"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    return f"sqlite:///{tmp_path / 'server.db'}" if request.param == "sqlite" else request.getfixturevalue("database").uri


@pytest.mark.slow
@pytest.mark.each("function")
def test_beyond_this_machine_the_server_asks_for_a_login(clone, store, tmp_path):
    first, second = "a-first-pass%word", "another-password"
    for password, other in ((first, second), (second, first)):  # started again with another one, the new one holds
        given = {"MLFLOW_USER": "ada", "MLFLOW_PASSWORD": password, "MLFLOW_TRAIN_PASSWORD": TRAINS_BY}
        server = Guarded(tmp_path, store, MLFLOW_ADDRESS="0.0.0.0", **given).start()
        try:
            assert server.status("ada", password) == 200
            assert [server.status(), server.status("ada", other), server.status("admin", "password1234")] == [401, 401, 401]
            assert [server.status(path=path) for path in ("", "ajax-api/2.0/mlflow/experiments/search?max_results=1")] == [401, 401]
            assert server.status("train", TRAINS_BY) == 200
            users = "api/2.0/mlflow/users/get?username=ada"
            assert [server.status(*login, users) for login in (("ada", password), ("train", TRAINS_BY))] == [200, 403]
            if password == first:  # an experiment of the administrator's, in which what trains records, too
                assert server.status("ada", password, "api/2.0/mlflow/experiments/create", {"name": f"login-{store[:4]}"}) == 200
            else:  # as the containers that train log in
                given = {"MLFLOW_TRACKING_USERNAME": "train", "MLFLOW_TRACKING_PASSWORD": TRAINS_BY}
                experiment = f"tracking.experiment=login-{store[:4]}"
                done = clone.run(*WORDS, experiment, MLFLOW_TRACKING_URI=server.uri, OMP_NUM_THREADS="1", **given)
                assert done.status == 0, done.output
                assert re.search(r"MLflow .*run [0-9a-f]{32}", done.output), done.output
                assert "not taken" not in done.output
        finally:
            server.kill()


def test_on_this_machine_the_server_asks_for_none(tmp_path):
    server = Guarded(tmp_path, MLFLOW_ADDRESS="127.0.0.1").start()
    try:
        assert server.status() == 200
        assert server.status("admin", "") == 200  # as compose.yaml's containers call it then
    finally:
        server.kill()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.4", "gpu-box"])
@pytest.mark.parametrize(
    ("password", "trains_by"), [("", ""), ("short", "short"), ("x" * 12, ""), ("", "x" * 12), ("x" * 12, "x" * 12)], ids=str
)
def test_beyond_this_machine_no_server_starts_without_two_passwords(tmp_path, address, password, trains_by):
    env = os.environ | {
        "MLFLOW_ADDRESS": address,
        "MLFLOW_PASSWORD": password,
        "MLFLOW_TRAIN_PASSWORD": trains_by,
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path / 'a.db'}",
    }
    done = subprocess.run([sys.executable, LOGIN], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: MLFLOW_ADDRESS={address}: ")
    assert "Set MLFLOW_PASSWORD and MLFLOW_TRAIN_PASSWORD to two passwords" in done.stderr
    assert not (tmp_path / "a.db").exists()


def test_the_address_that_is_published_is_the_one_that_decides():
    values = {"MLFLOW_ADDRESS": "0.0.0.0", "MLFLOW_PASSWORD": "x" * 12, "MLFLOW_TRAIN_PASSWORD": "y" * 12, "MLFLOW_TRAIN_USER": "eve"}
    found = yaml.safe_load(filled(COMPOSE.read_text(encoding="utf-8"), values))["services"]
    (port,) = found["mlflow"]["ports"]
    given = found["mlflow"]["environment"]
    assert port == f"{given['MLFLOW_ADDRESS']}:5000:5000"
    assert [name for name, service in found.items() if service.get("ports")] == ["mlflow"]
    assert found["mlflow"]["command"][0] == str(LOGIN.relative_to(ROOT))
    for name in ("train", "train-cpu", "bench", "sync"):
        login = [found[name]["environment"][f"MLFLOW_TRACKING_{key}"] for key in ("USERNAME", "PASSWORD")]
        assert login == [given["MLFLOW_TRAIN_USER"], given["MLFLOW_TRAIN_PASSWORD"]] == ["eve", "y" * 12]
        assert "x" * 12 not in str(found[name])

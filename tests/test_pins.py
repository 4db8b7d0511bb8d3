"""Images and actions are pinned by what a real registry and real git repositories on this machine say; no release goes without."""

import hashlib
import http.server
import json
import re
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pins
import pytest
import release

ROOT = Path(__file__).resolve().parents[1]
INDEX, OLD = pins.MANIFESTS[0], pins.MANIFESTS[3]


class Registry(http.server.ThreadingHTTPServer):
    """A registry by the OCI distribution specification, read alone: manifests by tag, for whoever has a token, which anybody gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.host = f"127.0.0.1:{self.server_port}"
        self.manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.given: dict[str, str] = {}  # tokens, by what each is for
        self.said: dict[str, str] = {}  # headers that are not true
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def push(self, name: str, tag: str, kind: str = INDEX) -> str:
        body = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": [], "of": f"{name}:{tag}:{len(self.manifests)}"}).encode()
        self.manifests[name, tag] = body, kind
        return f"sha256:{hashlib.sha256(body).hexdigest()}"


class Answer(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/token":
            scope = urllib.parse.parse_qs(query)["scope"][0]
            self.server.given[scope] = token = f"token-{len(self.server.given)}"
            return self.answer(200, json.dumps({"token": token}).encode(), "application/json")
        name, tag = re.fullmatch(r"/v2/(.+)/manifests/(.+)", path).groups()
        scope = f"repository:{name}:pull"
        if self.headers.get("Authorization") != f"Bearer {self.server.given.get(scope)}":
            asked = f'Bearer realm="http://{self.server.host}/token",service="tests",scope="{scope}"'
            return self.answer(401, b"{}", "application/json", {"WWW-Authenticate": asked})
        body, kind = self.server.manifests.get((name, tag), (b'{"errors": []}', "application/json"))
        accepted = [each.strip() for each in self.headers["Accept"].split(",")]
        status = 404 if (name, tag) not in self.server.manifests else 200 if kind in accepted else 406
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        return self.answer(status, body, kind, {"Docker-Content-Digest": digest} | self.server.said)

    def answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def registry():
    server = Registry()
    yield server
    server.shutdown()
    server.server_close()


def git(folder, *words):
    names = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    return subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def actions(tmp_path, monkeypatch):
    """Repositories in place of GitHub's; return the commits of their tags. One tag is annotated, as most are."""
    commits = {}
    for name, annotated in (("actions/checkout", True), ("astral-sh/setup-uv", False)):
        folder = tmp_path / "github" / name
        folder.mkdir(parents=True)
        git(folder, "init", "-q")
        git(folder, "commit", "-q", "--allow-empty", "-m", name)
        git(folder, "tag", *(["-a", "-m", "one"] if annotated else []), "v1.2.3")
        commits[name] = git(folder, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{(tmp_path / 'github').as_uri()}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    return commits


@pytest.fixture
def tree(tmp_path, registry):
    """A repository's files that name images and actions of this machine."""
    root = tmp_path / "tree"
    files = {
        "docker/Dockerfile": "ARG BASE=HOST/library/python:3.12.12-slim\nFROM ${BASE} AS libraries\nFROM HOST/tools:1 AS more\n",
        "docker/compose.yaml": "x:\n  image: lossforge:${TAG:-latest}\nservices:\n  s3:\n    image: HOST/a/s3:4.47\n    restart: always\n",
        ".github/workflows/ci.yml": "jobs:\n  check:\n    container: HOST/library/python:3.11.13 # as root\n    steps:\n"
        "      - uses: actions/checkout@v1.2.3\n      - uses: astral-sh/setup-uv/more@v1.2.3\n        with:\n          x: 1\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace("HOST", registry.host))
    return root


def texts(root):
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def test_what_is_named_gets_the_digest_of_its_tag(tree, registry, actions):
    names = ("library/python:3.12.12-slim", "tools:1", "a/s3:4.47", "library/python:3.11.13")
    digests = [registry.push(*name.split(":"), kind) for name, kind in zip(names, (INDEX, OLD, INDEX, INDEX), strict=True)]
    before = texts(tree)
    assert len(pins.unpinned(tree)) == 6
    assert f"docker/Dockerfile: {registry.host}/tools:1 has no digest: write it with --pin" in pins.unpinned(tree)
    assert len(pins.pin(tree)) == 6
    wanted = dict(before)
    for name, digest in zip(names, digests, strict=True):
        wanted = {file: text.replace(f"{registry.host}/{name}", f"{registry.host}/{name}@{digest}") for file, text in wanted.items()}
    workflow = wanted[".github/workflows/ci.yml"]
    workflow = workflow.replace("actions/checkout@v1.2.3", f"actions/checkout@{actions['actions/checkout']} # v1.2.3")
    workflow = workflow.replace("setup-uv/more@v1.2.3", f"setup-uv/more@{actions['astral-sh/setup-uv']} # v1.2.3")
    assert texts(tree) == wanted | {".github/workflows/ci.yml": workflow}
    assert pins.unpinned(tree) == []
    assert pins.pin(tree) == []
    assert set(registry.given) == {f"repository:{name.partition(':')[0]}:pull" for name in names}


def test_a_tag_that_was_moved_gets_its_new_digest(tree, registry, actions):
    for name in ("library/python:3.12.12-slim", "tools:1", "a/s3:4.47", "library/python:3.11.13"):
        registry.push(*name.split(":"))
    pins.pin(tree)
    digest = registry.push("tools", "1")
    (line,) = pins.pin(tree)
    assert line.endswith(f"is {registry.host}/tools:1@{digest}")
    assert line.count("@sha256:") == 2


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("tag", "docker/compose.yaml: {host}/a/s3:4.47: http://{host}/v2/a/s3/manifests/4.47 answers 404"),
        ("digest", "{host} says sha256:0, but sends sha256:"),
        ("down", "{host} is not reached"),
        ("page", "answers 200 with text/html; the manifest of an image is expected"),
        ("action", "https://github.com/actions/checkout has no tag v1.2.3"),
        ("repository", "https://github.com/actions/checkout is not reached"),
    ],
)
def test_what_cannot_be_resolved_leaves_all_files_as_they_are(tree, registry, actions, tmp_path, spoil, said):
    for name in ("library/python:3.12.12-slim", "tools:1", "a/s3:4.47", "library/python:3.11.13"):
        registry.push(*name.split(":"))
    checkout = tmp_path / "github" / "actions" / "checkout"
    if spoil == "tag":
        del registry.manifests["a/s3", "4.47"]
    elif spoil == "digest":
        registry.said["Docker-Content-Digest"] = "sha256:0"
    elif spoil == "down":
        registry.shutdown()
        registry.server_close()
    elif spoil == "page":
        registry.said["Content-Type"] = "text/html"
    elif spoil == "action":
        git(checkout, "tag", "-d", "v1.2.3")
    else:
        checkout.rename(tmp_path / "gone")
    before = texts(tree)
    with pytest.raises(pins.PinError) as caught:
        pins.pin(tree)
    assert said.format(host=registry.host) in str(caught.value)
    assert texts(tree) == before


def test_what_has_no_tag_is_said(tree):
    (tree / "docker/compose.yaml").write_text("    image: postgres\n")
    assert pins.unpinned(tree) == ["docker/compose.yaml: postgres: an image NAME:TAG is expected"]


def test_names_are_read_as_docker_reads_them():
    assert pins.place_of("python") == ("registry-1.docker.io", "library/python")
    assert pins.place_of("a/b") == ("registry-1.docker.io", "a/b")
    assert pins.place_of("ghcr.io/a/b") == ("ghcr.io", "a/b")
    assert pins.place_of("localhost:5000/b") == ("localhost:5000", "b")


def test_all_that_this_repository_uses_is_found():
    found = list(pins.used(ROOT))
    images = {each.parts["name"] for each in found if not each.action}
    assert images == {"python", "postgres", "chrislusf/seaweedfs"}
    workflows = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml"))
    assert sum(each.action for each in found) == workflows.count("uses: ") > 0
    assert all(each.parts["pin"] for each in found if each.action)


def test_a_release_without_digests_is_refused(tree, registry, actions, capsys):
    (tree / "pyproject.toml").write_text('version = "0.1.0"\n')
    others = [name for name in release.CHECKLIST if name != "pins"]
    assert release.walk(tree, others) == 1
    assert re.search(
        r"^  MISSING  pins +docker/Dockerfile: 127\S+ has no digest: write it with --pin$", capsys.readouterr().out, re.MULTILINE
    )
    for name in ("library/python:3.12.12-slim", "tools:1", "a/s3:4.47", "library/python:3.11.13"):
        registry.push(*name.split(":"))
    pins.pin(tree)
    assert release.walk(tree, others) == 0


def test_the_tool_says_what_it_cannot_pin(tmp_path):
    """No registry is reached: a proxy that nobody listens at."""
    env = {"PATH": "/usr/bin:/bin", "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "GIT_TERMINAL_PROMPT": "0"}
    before = texts(ROOT / "docker")
    done = subprocess.run([sys.executable, "tools/release.py", "--pin"], cwd=ROOT, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.match(r"error: docker/Dockerfile: python:\S+: registry-1\.docker\.io is not reached: .*; nothing is pinned\n$", done.stderr)
    assert texts(ROOT / "docker") == before

"""The workflows and forms on GitHub are valid and safe, and call what is here."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": [path for path in sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) if path.name != "config.yml"],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def tool(name: str, *words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(Path(sys.executable).with_name(name)), *map(str, words)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_as_their_schema_says(schema):
    assert SCHEMAS[schema]
    done = tool("check-jsonschema", "--builtin-schema", schema, *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout


def test_a_wrong_workflow_would_be_found(tmp_path):
    wrong = tmp_path / "ci.yml"
    wrong.write_text(
        (GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8").replace("timeout-minutes: 60", "timeout: 60"), encoding="utf-8"
    )
    for schema in list(SCHEMAS)[:2]:
        assert tool("check-jsonschema", "--builtin-schema", schema, wrong).returncode == 1


def test_nothing_unsafe_is_found():
    done = tool("zizmor", "--offline", "--no-progress", ".github")
    assert done.returncode == 0, done.stdout + done.stderr


def test_something_unsafe_would_be_found(tmp_path):
    step = "      - run: echo ${{ github.event.pull_request.title }}\n"
    (tmp_path / "ci.yml").write_text(f"on: pull_request_target\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps:\n{step}")
    done = tool("zizmor", "--offline", "--no-progress", tmp_path / "ci.yml")
    assert done.returncode > 10
    assert {"template-injection", "dangerous-triggers"} <= set(re.findall(r"\[([a-z-]+)\]", done.stdout))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_little_and_ends(path):
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["permissions"] == {"contents": "read"}
    assert {"group", "cancel-in-progress"} == set(found["concurrency"])
    for name, job in found["jobs"].items():
        writes = {permission for permission, kind in job.get("permissions", {}).items() if kind == "write"}
        assert not writes or (job["environment"] and writes <= {"id-token", "pages"}), name
        assert "container" not in job or re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-\w+@sha256:[0-9a-f]{64}", job["container"])
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step
    versions = re.findall(r"uses: \S+ # v\d+\.\d+\.\d+$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(versions) == path.read_text(encoding="utf-8").count("uses: ")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_is_here(path):
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        for step in job["steps"]:
            for word in re.findall(r"(?<![\w-])(?:\.ci|tools|measurements|experiments|packages|tests)/[\w./]*", step.get("run", "")):
                assert (ROOT / word).exists(), word


def steps(*words: str) -> list[str]:
    """The steps that a call of .ci/run would run."""
    return subprocess.run([".ci/run", "--list", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_jobs_run_each_step_once():
    job = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]["check"]
    found = [step for part in job["strategy"]["matrix"]["include"] for step in part["steps"].split()]
    assert sorted(found) == sorted(steps("--all"))
    assert job["steps"][-1]["run"] == '.ci/run $TIER --since "$BEFORE" $STEPS'


def test_one_step_runs_by_its_name():
    assert steps("types") == ["types"]
    assert steps("torch", "lint") == ["lint", "torch"]
    done = subprocess.run([".ci/run", "tests"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"unknown step tests; there are: {' '.join(steps('--all'))}\n"


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (["--since", "HEAD^"], False),
        (["--since", "HEAD", "torch"], False),
        (["--since", "HEAD^", "torch"], True),
        (["--since", "HEAD", "--ci"], False),
        (["--since", "HEAD", "--all"], True),
        (["--since", "unknown", "--ci"], True),
        (["--since", "HEAD^", "--ci"], True),
    ],
    ids=str,
)
def test_oldest_and_newest_torch_run_where_their_files_changed(tmp_path, words, runs):
    """In a repository whose last commit changed a package."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name in ("packages", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name, encoding="utf-8")
    for command in (["init", "-q"], ["add", "docs"], ["commit", "-qm", "Before"], ["add", "packages"], ["commit", "-qm", "After"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *command], cwd=tmp_path, check=True)
    (tmp_path / "docs" / "file").write_text("changed", encoding="utf-8")
    listed = subprocess.run([".ci/run", "--list", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert ("torch" in listed) == runs


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("", "all passed"),
        ("mypy", "types failed with status 3"),
        ("hadolint", "dockerfile failed with status 3"),
        ("zensical", "documentation failed with status 3"),
        ("ruff", "lint failed"),
    ],
)
def test_types_are_checked_beside_the_documentation_and_a_fault_of_each_ends_the_call(tmp_path, fails, says):
    """With a uv that runs nothing, and fails in one step."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "called: $*"\ncase "$*" in *"{fails or "nothing"}"*) exit 3 ;; esac\n', encoding="utf-8")
    uv.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["lint", "types", "dockerfile", "documentation", "workflows"]
    done = subprocess.run([".ci/run", *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == (3 if fails else 0), done.stdout
    assert says in done.stdout
    for command, goes_on in (
        ("mypy", fails != "ruff"),
        ("python -m zensical build", fails not in ("ruff", "hadolint")),
        ("zizmor", not fails),
    ):
        assert (f"called: run {command}" in done.stdout) == goes_on, done.stdout
    if not fails:
        timed = re.findall(r"^ +\d+ s  (\w+)$", done.stdout, re.MULTILINE)[2:]
        assert sorted(timed) == sorted(words)
        assert [name for name in timed if name != "types"] == [name for name in words if name != "types"]


MEETS = "touch {own}\nfor _ in $(seq 600); do [ -e {other} ] && break; sleep 0.1; done\n[ -e {other} ] || exit 9\n"


@pytest.mark.parametrize("fails", ["", "torch", "apps"])
def test_the_versions_of_torch_are_tried_beside_the_apps(tmp_path, fails):
    """Each waits until the other has begun."""
    for folder in (".ci", "tools"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    texts = {
        "tools/oldest_and_newest": MEETS.format(own="torch", other="apps") + ("exit 4\n" if fails == "torch" else ""),
        "uv": 'case "$*" in *"pytest tests/"*) ;; *) exit 0 ;; esac\n'
        + MEETS.format(own="apps", other="torch")
        + ("exit 4\n" if fails == "apps" else ""),
        "apt-get": "",  # installs nothing
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho called: {name}\n{text}", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([".ci/run", "torch", "apps"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == (4 if fails else 0), done.stdout
    assert (f"{fails} failed with status 4" if fails else "all passed") in done.stdout
    assert "called: tools/oldest_and_newest" in done.stdout


@pytest.fixture(scope="module")
def chosen():
    """Return the job that runs a chosen commit on a machine of ours."""
    (job,) = yaml.safe_load((GITHUB / "workflows" / "gpu.yml").read_text(encoding="utf-8"))["jobs"].values()
    return job


def test_no_event_but_a_maintainers_hand_runs_code_on_a_machine_of_ours():
    """A pull request brings its own copy of a workflow, and of any condition in it."""
    for path in WORKFLOWS:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if any("self-hosted" in job["runs-on"] for job in found["jobs"].values()):
            assert list(found[True]) == ["workflow_dispatch"], path.name  # YAML 1.1 reads `on` as true


@pytest.mark.parametrize(("given", "status"), [("commit", 0), ("main", 1), ("short", 1)])
def test_a_chosen_commit_is_named_by_its_whole_sha(chosen, tmp_path, given, status):
    checkout, check, *_ = chosen["steps"]
    assert checkout["with"]["ref"] == check["env"]["COMMIT"] == "${{ inputs.commit }}"
    for command in (["init", "-qb", "main"], ["commit", "-qm", "One", "--allow-empty"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *command], cwd=tmp_path, check=True)
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    env = os.environ | {"COMMIT": {"commit": sha, "short": sha[:9]}.get(given, given)}
    assert subprocess.run(["bash", "-e", "-c", check["run"]], cwd=tmp_path, env=env).returncode == status


def test_chosen_code_runs_on_a_machine_of_ours_in_a_container_without_rights_and_files(chosen):
    assert "self-hosted" in chosen["runs-on"]
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", chosen["env"]["IMAGE"])
    *_, run, _ = chosen["steps"]
    words = shlex.split(run["run"])  # one command; all else is said inside of the container
    assert words[:3] == ["docker", "run", "--rm"]
    assert words[-4:-1] == ["$IMAGE", "bash", "-euxc"]
    assert subprocess.run(["bash", "-n", "-c", words[-1]]).returncode == 0
    assert {"--cap-drop", "ALL", "no-new-privileges", "--user", "1000:1000", "--gpus"} <= set(words)
    assert [word for word in words if word.startswith("type=")] == ["type=bind,source=$GITHUB_WORKSPACE,target=/checkout,readonly"]
    assert not {"--privileged", "--volume", "-v"} & set(words)
    assert "docker.sock" not in run["run"]
    checkout, *_, clean = chosen["steps"]
    assert checkout["with"]["persist-credentials"] is False
    assert clean["if"] == "always()"


def test_a_gpu_job_leaves_nothing_behind(tmp_path):
    clean = yaml.safe_load((GITHUB / "workflows" / "gpu.yml").read_text(encoding="utf-8"))["jobs"]["check"]["steps"][-1]["run"]
    (tmp_path / "work" / ".git" / "objects").mkdir(parents=True)
    (tmp_path / "work" / ".git" / "objects" / "a").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (tmp_path / "work" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@"\nexit 1\n', encoding="utf-8")  # no such container
    (tmp_path / "docker").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_WORKSPACE": str(tmp_path / "work"), "CONTAINER": "a-name"}
    done = subprocess.run(["bash", "-e", "-c", clean], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "rm --force a-name\n")
    assert list((tmp_path / "work").iterdir()) == []
    assert (tmp_path / "outside" / "kept").exists()


def test_what_is_published_is_attested():
    """The publishing action signs attestations by default, for which it needs the job's identity and no password."""
    job = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]["publish"]
    (step,) = [step for step in job["steps"] if step["uses"].startswith("pypa/gh-action-pypi-publish@")]
    assert job["permissions"] == {"id-token": "write"}
    assert not {"attestations", "password", "user"} & set(step.get("with", {}))

"""README.md and CONTRIBUTING.md say what is so: the table, the commands, the examples, the tree."""

import importlib.util
import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

from lab.compare.schema import COMPARE, as_hydra
from lab.config.errors import UserError
from lab.config.settings import BENCH, load, load_for
from lab.sweep.plan import plan_of

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENTS[name], re.MULTILINE | re.DOTALL)


SHELL = [line for name in DOCUMENTS for block in blocks(name, "sh") for line in block.splitlines() if line]
PYTHON = [(name, block) for name in DOCUMENTS for block in blocks(name, "python")]
QUOTED = [(name, block) for name, block in PYTHON if block.startswith("# ")]


def tools() -> set[str]:
    """Names of the packages that the locked environment is asked to have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    return {re.match(r"[\w-]+", line)[0] for line in asked}


def check_app(script: str, words: list[str]) -> None:
    """The words compose to settings, as the app itself would compose them."""
    if Path(script).name == "bench.py":
        app = runpy.run_path(str(ROOT / script))
        app["chosen"](load_for(BENCH, [app["as_list"](word) for word in words if not word.startswith("-")]).config)
        return
    if Path(script).name == "compare.py":
        load_for(COMPARE, [as_hydra(word) for word in words if word != "--help"])
        return
    settings = [word for word in words if "=" in word and not word.startswith(("checkpoint=", "out=", "split="))]
    if Path(script).name in ("evaluate.py", "predict.py"):
        assert sum(word.startswith("checkpoint=") for word in words) == 1
    plan_of(settings) if {"-m", "--multirun"} & set(words) else load(settings)
    options = {word for word in words if word.startswith("-")}
    known = {"train.py": {"-m", "--multirun", "--cfg", "--help"}}
    assert options <= known.get(Path(script).name, set())


def check(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        if "--package" in words:
            member = words[words.index("--package") + 1]
            assert (ROOT / "packages" / member.removeprefix("lossforge-") / "pyproject.toml").is_file()
            return
        if words[0].endswith(".py"):
            assert (ROOT / words[0]).is_file()
            if words[0].startswith("experiments/"):
                check_app(words[0], words[1:])
                return
            assert set(words[1:]) <= {"--write"}
            return
        if words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2])
            return
        if words[0] == "torchrun":
            script = next(n for n, word in enumerate(words) if word.endswith(".py"))
            check_app(words[script], words[script + 1 :])
            return
        assert words[0] in tools()
    else:
        assert words[0] in ("uv", "git", ".ci/run", "python3")
    for word in words:
        if "/" in word and not word.startswith("-"):
            assert (ROOT / word.partition("::")[0]).exists(), word


@pytest.mark.parametrize("line", SHELL)
def test_command(line):
    check(line)


def test_the_two_commands_are_there():
    commands = {line.partition("#")[0].strip() for line in SHELL}
    assert {"uv run experiments/train.py loss=focal model=resnet50", "uv run pytest packages/", "uv run mlflow ui"} <= commands


@pytest.mark.parametrize(
    "line",
    [
        "uv run experiments/train.py loss=focl",
        "uv run experiments/trane.py",
        "uv run experiments/train.py --multrun loss=ce",
        "uv run pytest pakages/",
        "uv run rufff check .",
        "uv run --package lossforge-lossses python -c 0",
    ],
)
def test_a_command_that_does_not_exist_would_be_noticed(line):
    with pytest.raises((AssertionError, UserError)):
        check(line)


def test_tables_and_pictures_are_the_registrys_and_the_results():
    script = runpy.run_path(str(ROOT / "tools" / "readme_tables.py"))
    assert script["renewed"](DOCUMENTS["README.md"]) == DOCUMENTS["README.md"], "run: uv run tools/readme_tables.py --write"
    assert not script["stale_pictures"](), "run: uv run tools/readme_tables.py --write"


def test_other_results_make_tables_and_pictures_stale(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "tools" / "readme_tables.py"))
    report = json.loads((ROOT / "results" / "bench-h200.json").read_text(encoding="utf-8"))
    row = next(r for r in report["rows"] if r["contender"] == "lossforge")
    row["ms"] = row["graph_ms"] = 12.345
    other = tmp_path / "bench.json"
    other.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setitem(script["renewed"].__globals__, "BENCH", other)
    assert "12.345" in script["renewed"](DOCUMENTS["README.md"])
    _, draw, rows = script["PICTURES"]["time"]
    monkeypatch.setitem(script["PICTURES"], "time", (other, draw, rows))
    assert script["stale_pictures"]() == ["results/time.svg"]


def test_examples_run():
    """In their order, in one namespace, as someone would paste them."""
    names: dict[str, object] = {}
    ran = [block for name, block in PYTHON if name == "README.md" and (name, block) not in QUOTED]
    assert ran
    for block in ran:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize(("name", "block"), QUOTED, ids=[block.splitlines()[0] for _, block in QUOTED])
def test_quoted_code_stands_in_its_file(name, block):
    """A block whose first line names a file quotes it; a line of dots leaves something out."""
    path, _, code = block.removeprefix("# ").partition("\n")
    source = (ROOT / path).read_text(encoding="utf-8")
    for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
        assert part.strip("\n") in source


def test_every_path_of_the_tree_exists():
    (tree,) = blocks("README.md", "text")
    folders: list[str] = []
    for line in tree.splitlines():
        depth, names = (len(line) - len(line.lstrip())) // 2, line.split("  ")
        name = next(part for part in names if part.strip()).strip()
        del folders[depth:]
        for each in name.split(", "):
            assert (ROOT / "/".join([*folders, each])).exists(), "/".join([*folders, each])
        folders.append(name.rstrip("/"))


def test_documents_name_no_place_of_one_machine():
    for text in DOCUMENTS.values():
        assert not re.search(r"(?<![\w.:/])/(work|home|root|usr|opt|tmp)/", text)
        assert not re.search(r"/simple\b|\b(index|find)-(url|links)\b", text)

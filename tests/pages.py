"""The pages of the documentation as tests see them: their code blocks, commands and links."""

import functools
import importlib.util
import os
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from measure import MEASUREMENTS
from packaging.requirements import Requirement

from lab.comparison.runs import COMPARE, as_hydra
from lab.config.settings import BENCH, load, load_for
from lab.sweep.plan import plan_of

ROOT = Path(__file__).resolve().parents[1]
OTHER_WORDS = ("checkpoint=", "out=", "split=", "tta=", "top=", "score=")
"""Words of evaluate.py and predict.py that are no settings."""


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line of code, in the page
    code: str
    page: str

    @property
    def file(self) -> str | None:
        """The file that the block is, or of which it is a part: its first line is `# path/to/file.py`."""
        named = re.match(r"# (\S+\.(?:py|ya?ml))\n", self.code)
        return named[1] if named else None

    @property
    def quotes(self) -> bool:
        """Whether its file is in the repository."""
        return self.file is not None and (ROOT / self.file).is_file()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@functools.cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """The page's code blocks, in their order."""
    text, found = text_of(page), []
    for block in re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```$", text, re.M | re.S):
        found.append(Block(block[1], text.count("\n", 0, block.start(2)) + 1, block[2], page))
    return found


def commands_of(page: str) -> list[str]:
    """The lines of its `sh` blocks; what needs another place or program than the repository's is a `bash` block."""
    lines = [line for block in blocks_of(page) if block.language == "sh" for line in block.code.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def docker_commands_of(page: str) -> list[str]:
    """What the page's docker commands run in their containers, as lines for check_command."""
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    found = []
    for block in blocks_of(page):
        for line in re.findall(r"^docker .*", block.code, re.M) if block.language == "bash" else ():
            words = shlex.split(line, comments=True)
            if words[:4] == ["docker", "compose", "run", "--rm"]:
                found.append([*services[words[4]]["entrypoint"], *words[5:]])
            elif words[:2] == ["docker", "run"]:
                found.append(["uv", "run", *words[words.index("lossforge") + 1 :]])  # the image's entry point
            elif words[:2] == ["docker", "compose"]:
                assert set(words[3:]) - {"-d"} <= {*services}, line
    return [shlex.join(words) for words in found]


def run_python(page: str, folder: Path, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run the page's python blocks in their order, in one namespace, as someone would paste them; return the namespace.

    A block with a `text` block behind it that begins with an error's name must raise that error. Blocks that quote a file, or are one,
    are left out. folder: where the code is written, line by line where the page has it, because @triton.jit reads its source. changes: what
    takes the place of parts of the code, each of which must be there.
    """
    unused = set(changes or ())
    names: dict[str, Any] = {"__name__": "page"}
    for block, error in _with_errors(blocks_of(page)):
        if block.language != "python" or block.file:
            continue
        text = "\n" * (block.line - 1) + block.code
        for old, new in (changes or {}).items():
            if old in text:
                text = text.replace(old, new)
                unused.discard(old)
        path = folder / f"{Path(page).stem}_{block.line}.py"
        path.write_text(text, encoding="utf-8")
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        if error is None:
            exec(code, names)
            continue
        try:
            exec(code, dict(names))
        except Exception as raised:
            said = f"{type(raised).__name__}: {raised}"
            there = re.search(rf" \({re.escape(str(path))}:(\d+)\)$", said)
            if there:
                said = f"{said[: there.start()]} (my_loss.py:{int(there[1]) - block.line + 1})"
            assert said == error, f"{block}: says\n{said}"
        else:
            raise AssertionError(f"{block}: raises nothing, though the page says that it does")
    assert not unused, f"{page} has no {unused}"
    return names


def _with_errors(blocks: list[Block]) -> Iterator[tuple[Block, str | None]]:
    for block, behind in zip(blocks, [*blocks[1:], None], strict=True):
        says = behind is not None and behind.language == "text" and re.match(r"\w+Error: ", behind.code)
        yield block, behind.code.strip() if says and behind is not None else None


def files_of(page: str) -> dict[str, str]:
    """What the blocks hold that are files which the repository has not, by their names."""
    return {block.file: block.code for block in blocks_of(page) if block.file and not block.quotes}


def check_quote(block: Block) -> None:
    """A line of dots leaves something out."""
    assert block.file
    source = (ROOT / block.file).read_text(encoding="utf-8")
    for part in re.split(r"^ *\.\.\.\n", block.code.partition("\n")[2], flags=re.M):
        assert part.strip("\n") in source, f"{block}: does not stand in {block.file}"


def anchors_of(page: str) -> set[str]:
    """What `page.md#anchor` may name: the titles, as the site writes them, and what mkdocstrings documents."""
    outside = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    titles = [re.sub(r"`|\*\*", "", title) for title in re.findall(r"^#+ (.+)$", outside, re.M)]
    written = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    documented = set(re.findall(r"^::: (\S+)$", outside, re.M))
    return written | documented | set(re.findall(r'(?:id|name)="([\w-]+)"', outside))


def check_links(page: str) -> None:
    """Relative links lead to files and titles that are there."""
    outside = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", outside):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        to = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert to.exists(), f"{page}: {link} leads nowhere"
        if anchor and to.suffix == ".md":
            assert anchor in anchors_of(str(to.relative_to(ROOT))), f"{page}: {link}: {path or page} has no such title"


def check_named_files(page: str) -> None:
    """Paths in backticks that begin with one of the repository's folders are there."""
    outside = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    folders = r"conf|docs|docker|examples|experiments|measurements|packages|results|tests|tools|\.ci"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", outside):
        assert (ROOT / path).exists() or path in ("docker/.env",), f"{page}: there is no {path}"


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@functools.cache
def _published() -> dict[str, dict[str, Any]]:
    """Return the projects of `packages/` by the names of their distributions."""
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in (ROOT / "packages").glob("*/pyproject.toml")]
    return {project["name"]: project for project in projects}


@functools.cache
def _installed() -> set[str]:
    """Names of the packages that the locked environment is asked to have."""
    project = _project()
    asked = [*project["project"]["dependencies"], *(line for group in project["dependency-groups"].values() for line in group)]
    return {match[0] for line in asked if (match := re.match(r"[\w-]+", line))}


def _check_app(script: str, words: list[str]) -> None:
    """The words compose to settings, as the app itself would compose them."""
    script = Path(script).name
    if script == "bench.py":
        app = runpy.run_path(str(ROOT / "experiments" / script))
        app["chosen"](load_for(BENCH, [app["as_list"](word) for word in words if not word.startswith("-")]).config)
        return
    if script == "compare.py":
        load_for(COMPARE, [as_hydra(word) for word in words if word != "--help"])
        return
    if script in ("evaluate.py", "predict.py"):
        assert sum(word.startswith("checkpoint=") for word in words) == 1
    settings = [word for word in words if "=" in word and not word.startswith(OTHER_WORDS) and not word.startswith("resume=")]
    options = {word for word in words if word.startswith("-")}
    assert options <= {"train.py": {"-m", "--multirun", "--cfg", "--help"}}.get(script, set())
    plan_of(settings) if {"-m", "--multirun"} & options else load(settings)


def check_command(line: str) -> None:
    """The programs, files and settings that a line names are there.

    Raises:
        UserError, AssertionError: one of them is not.
    """
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if words[:2] == ["pip", "install"]:
        for requirement in map(Requirement, words[2:]):
            assert requirement.name in _published(), requirement.name
            assert requirement.extras <= {*_published()[requirement.name].get("optional-dependencies", ())}, requirement.extras
        return
    if words[:2] != ["uv", "run"]:
        assert words[0] in ("uv", "git", "python3") or os.access(ROOT / words[0], os.X_OK), words[0]
        _check_paths(words)
        return
    words = words[2:]
    while words[0] in ("--group", "--extra"):
        known = _project()["dependency-groups" if words[0] == "--group" else "project"]
        assert words[1] in known.get("optional-dependencies", known), words[1]
        words = words[2:]
    if "--package" in words:
        member = words[words.index("--package") + 1]
        assert member in _published(), member
    elif words[0].endswith(".py"):
        assert (ROOT / words[0]).is_file()
        if words[0].startswith("experiments/"):
            _check_app(words[0], words[1:])
        elif words[0] == "measurements/measure.py":
            assert set(words[1:]) <= {*MEASUREMENTS}, words[1:]
        else:
            options = re.findall(r'"(--[\w-]+)"', (ROOT / words[0]).read_text(encoding="utf-8"))
            assert set(words[1:]) <= {*options}, words[1:]
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2])
        _check_paths([word for word in words if word.partition(":")[0].endswith(".py")])
    elif words[0] == "torchrun":
        script = next(n for n, word in enumerate(words) if word.endswith(".py"))
        _check_app(words[script], words[script + 1 :])
    else:
        assert words[0] in _installed()
        _check_paths(words)


def _check_paths(words: list[str]) -> None:
    for word in words:
        if "/" in word and not word.startswith("-"):
            assert (ROOT / word.partition(":")[0]).exists(), word

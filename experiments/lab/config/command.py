"""Command lines of the apps: options, the user's config folders, Hydra's options that are refused, and text in a terminal's width."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.base.errors import UserError, unknown
from lab.base.process import ABORTED, is_rank_zero, refuse_several

WORDS = 30  # columns that words need at least


def show(text: str) -> None:
    """Print a text; its reader, such as `head`, may stop before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of the text goes there as Python ends


def say_loading() -> None:
    """Tell the user on stderr that PyTorch is loaded now, which takes seconds, unless it is there; stdout may be piped."""
    if "torch" not in sys.modules and is_rank_zero():
        print("loading PyTorch, the model and the data ...", file=sys.stderr, flush=True)


def fitted(text: str) -> str:
    """Return a help text whose long lines are wrapped, if a terminal shows it; a file or a pipe gets it as it is."""
    if not sys.stdout.isatty():
        return text
    joined = re.sub(r"(?<=[^\n.:])\n(?=[a-z])", " ", text)
    return "\n".join(_fitted_line(line, shutil.get_terminal_size().columns) for line in joined.split("\n"))


def _fitted_line(line: str, width: int) -> str:
    """Wrap a line under its second column; without one, or too little room, four columns from its beginning, if that is indented."""
    column = re.match(r" +\S+(?:, \S+)? {2,}", line)
    begin = len(line) - len(line.lstrip())
    under = column is not None and width - column.end() >= WORDS
    indent = " " * (column.end() if column and under else begin and begin + 4)
    if len(line) <= width or width - len(indent) < WORDS:
        return line
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


CONFIG_FOLDERS = "LOSSFORGE_CONFIG_DIR"
SHORT = {"-h": "--help", "-m": "--multirun", "-cd": "--config-dir", "-c": "--cfg"}
NOT_TAKEN = {
    ("--config-path", "-cp", "--config-name", "-cn"): "conf/ stays the first config folder; --config-dir=FOLDER adds one of your own",
    ("--info", "-i"): "--cfg prints the settings, --help everything that can be set",
    ("--package", "-p"): "--cfg prints all settings",
    ("--resolve",): "--cfg prints resolved settings",
    ("--run", "-r"): "leave it out: one run is the default",
    ("--shell-completion", "-sc"): "a shell completes `uv run`, not the script after it; --help lists groups, options and settings",
    ("--experimental-rerun",): "resume=runs/RUN goes on with a run, and the `command` tag of a run says how it was started",
    ("--version",): "`uv version` says which it is",
}


@dataclass
class Command:
    """overrides: arguments that set something. flags: the options, by their long names."""

    overrides: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)


def command(argv: Sequence[str], *flags: str) -> Command:
    """Divide a command line into overrides and options; apply --config-dir to this process and its children.

    Args:
        argv: the arguments without the script's name.
        flags: long names of the app's options besides --help, --cfg and --config-dir.

    Raises:
        UserError: an option is unknown, or lacks its value.
    """
    found, left = Command(), list(argv)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        name = SHORT.get(name, name)
        if name == "--config-dir":
            _add_folder(value if equals else left.pop(0) if left else "")
        elif name == "--cfg":
            found.flags.add(name)
            value = value if equals else left.pop(0) if left and left[0] in ("job", "hydra", "all") else "job"
            if value != "job":
                raise UserError(f"--cfg {value}: Hydra's own settings have no effect here; --cfg prints the app's.")
        elif name in ("--help", *flags):
            found.flags.add(name)
        elif word.startswith("-"):
            raise _refusal(word, name, flags)
        else:
            found.overrides.append(word)
    return found


def run_app(
    name: str, argv: Sequence[str], help_of: Callable[[list[str]], str], load: Callable[[list[str]], tuple[Any, Callable[[], int]]]
) -> int:
    """Run an app of one process by its command line; return the exit status, 1 after an error of the user's input.

    Args:
        name: the app's name.
        argv: the arguments without the script's name.
        help_of: returns the text of --help under these overrides.
        load: checks the overrides; returns the settings, which --cfg prints, and a function that does the work.
    """
    try:
        given = command(argv)
        if "--help" in given.flags:
            show(fitted(help_of(given.overrides)))
            return 0
        refuse_several(f"experiments/{name}.py")
        settings, work = load(given.overrides)
        if "--cfg" in given.flags:
            show(settings.text().rstrip("\n"))
            return 0
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ABORTED


def paths_among(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Divide the words of a command line into paths and overrides; a file may have `=` in its name."""
    given = [Path(word) for word in words if "=" not in word or Path(word).exists()]
    return given, [word for word in words if Path(word) not in given]


def config_folders() -> list[Path]:
    """Return the folders that --config-dir and LOSSFORGE_CONFIG_DIR add to conf/.

    Raises:
        UserError: a folder does not exist.
    """
    folders = [Path(each).expanduser().absolute() for each in os.environ.get(CONFIG_FOLDERS, "").split(os.pathsep) if each]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{CONFIG_FOLDERS} or --config-dir: {folder}: no such folder.")
    return folders


def _add_folder(given: str) -> None:
    if not given:
        raise UserError("--config-dir: a folder is expected, such as --config-dir=my_conf, with groups as conf/ has them.")
    known = [each for each in os.environ.get(CONFIG_FOLDERS, "").split(os.pathsep) if each]
    folder = str(Path(given).expanduser().absolute())
    os.environ[CONFIG_FOLDERS] = os.pathsep.join([*known, folder] if folder not in known else known)


def _refusal(word: str, name: str, flags: Sequence[str]) -> UserError:
    for names, instead in NOT_TAKEN.items():
        if name in names:
            return UserError(f"{word}: Hydra's option is not taken: {instead}.")
    return unknown("option", name, ["--help", "--cfg", "--config-dir", *flags])

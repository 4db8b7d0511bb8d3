"""What the apps' command lines share: options, the user's config folders, and Hydra's options that are refused."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.config.errors import UserError, unknown

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
    """overrides: words that set something. flags: the options, by their long names."""

    overrides: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)


def command(argv: Sequence[str], *flags: str) -> Command:
    """Divide a command line into overrides and options. A folder of --config-dir holds from now on, in child processes too.

    Args:
        argv: without the script.
        flags: long names of the options that the app has beside --help, --cfg and --config-dir.

    Raises:
        UserError: an option is not known, or needs a value.
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


def config_folders() -> list[Path]:
    """Those that --config-dir and LOSSFORGE_CONFIG_DIR name, beside conf/.

    Raises:
        UserError: one is not there.
    """
    folders = [Path(each).expanduser().absolute() for each in os.environ.get(CONFIG_FOLDERS, "").split(os.pathsep) if each]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{CONFIG_FOLDERS} or --config-dir: {folder}: there is no such folder.")
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

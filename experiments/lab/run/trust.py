"""Settings read from a file: who wrote them, and which of a stranger's settings are refused or left out.

A run's settings are signed with this user's key: by themselves, and together with the run's folder. Settings without such a signature are
a stranger's, for example those of a downloaded checkpoint.
"""

import hmac
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lab.base.errors import UserError
from lab.base.files import read_text
from lab.base.yaml_limits import are_plain, is_shallow
from lab.config.schema import OptimConfig, TrainerConfig
from lab.config.settings import given_names
from lab.config.user import has_key, hmac_of
from lab.data.specs import SOURCES
from lab.registry import SCHEMAS

GROUPS = ("task", "model", "loss", "data", "optim", "trainer")
"""Groups that every run's settings have."""
TIMM_FILES = ("model.args.checkpoint_path", "model.args.cache_dir", "model.args.pretrained")
"""Beginnings of arguments by which timm reads, writes or downloads files."""
MARK = "# signature: "


class Origin(IntEnum):
    """Who wrote the settings of a file: a stranger, or this user for a run elsewhere, or this user for a run in the file's folder.

    A user's settings may name code by a relative path, which is another file in another folder; so only settings of a run HERE are obeyed
    in full.
    """

    STRANGER = 0
    USER = 1
    HERE = 2


def signature(tree: Mapping[str, Any], folder: Path) -> str:
    """Return the user's signatures of a run's settings, and of them together with this folder; empty if the user has no key."""
    texts = (json.dumps(each, default=str) for each in (tree, [str(folder.resolve()), tree]))
    return "-".join(hmac_of(text) for text in texts) if has_key() else ""


def origin(tree: Mapping[str, Any], signed: object, folder: Path) -> Origin:
    """Return who wrote these settings, from the signature beside them and the folder of their run."""
    expected = signature(tree, folder).split("-")
    given = signed.split("-") if isinstance(signed, str) else []
    if len(expected) != 2 or len(given) != 2:
        return Origin.STRANGER
    user, here = (hmac.compare_digest(*(text.encode() for text in pair)) for pair in zip(expected, given, strict=True))
    return Origin.HERE if user and here else Origin.USER if user else Origin.STRANGER


def seal_of(place: Mapping[str, str], signed: str) -> str:
    """Return the user's signature of a run's place in MLflow and of its settings' signature; empty if the user has no key."""
    return hmac_of(json.dumps(["place", signed, place], sort_keys=True))


def own_place(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's place in MLflow that a checkpoint holds; empty unless this user wrote it, and for this run."""
    place, given = state.get("tracking"), state.get("seal")
    if state["origin"] is Origin.STRANGER or not place or not isinstance(given, str):
        return {}
    expected = seal_of(place, state["signature"])
    return place if hmac.compare_digest(expected.encode(), given.encode(errors="replace")) else {}


def is_trusted(trust: str | None, path: Path) -> bool:
    """Return whether the user's `trust=` names the file, its folder or a folder above."""
    return bool(trust) and path.resolve().is_relative_to(Path(str(trust)).expanduser().resolve())


def is_foreign(by: Origin, *, trusted: bool) -> bool:
    """Return whether a run counts as a stranger's in a store; without a key nobody can say, and the user's own runs stay whole."""
    return by is Origin.STRANGER and not trusted and has_key()


def are_settings(tree: Any) -> bool:
    """Return whether a file's settings have the form of a run's."""
    return isinstance(tree, dict) and all(isinstance(tree.get(group), dict) for group in GROUPS) and are_plain(tree)


def checked(what: str, tree: dict[str, Any], given: Collection[str], trusted: bool, by: Origin) -> dict[str, Any]:
    """Return the settings of a file, without those that only this user decides: where to track and where to write.

    Args:
        what: the setting that named the file, with its value, for messages.
        tree: the file's settings.
        given: names of settings and groups that the user gives; these may name code.
        trusted: whether the user trusts the file, so that its settings may name code.
        by: who wrote the settings.

    Raises:
        UserError: a setting holds an interpolation, or names code without the user's consent.
    """
    if found := next(((name, value) for name, value in _leaves(tree) if isinstance(value, str) and "${" in value), None):
        raise UserError(f"{what}: sets {found[0]}={found[1]}; a saved setting is a value, and ${{...}} in it is not resolved.")
    if by is Origin.HERE:
        return tree
    refused = [(name, value) for name, value in naming_code(tree) if name not in given and name.partition(".")[0] not in given]
    if refused and not trusted:
        raise UserError(
            f"{what}: is not a run that you made in its folder, and its settings name code, files or addresses:\n"
            + "\n".join(f"  {name}={value}" for name, value in refused)
            + "\nNothing of it was run. Give these settings on the command line, as they are or changed, "
            "or say trust=PATH if you trust who made the file."
        )
    if by is Origin.USER:
        return tree
    tree = {group: dict(value) if isinstance(value, dict) else value for group, value in tree.items()}
    for name in ("tracking", "resume", "trust"):
        tree.pop(name, None)
    tree["trainer"].pop("runs", None)
    tree["data"].pop("images_outside", None)
    if tree["data"].get("root") is not None and (source := SOURCES.get(str(tree["data"].get("name")))) and source.has("download"):
        tree["data"]["download"] = False  # a download would write to a folder of the file's choice
    return tree


def naming_code(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings, with values, that name code, a file, or an address that timm would open."""
    known = code_settings()
    below = (*(f"{each}." for each in known), *TIMM_FILES)
    for name, value in _leaves(tree):
        address = name == "model.name" and any(mark in str(value) for mark in ":/\\")
        if (address or name in known or name.startswith(below)) and value not in (None, [], {}, "", *known.get(name, ())):
            yield name, value


def vouching(tree: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return the overrides that set a setting of these that names code, or that replace its group."""
    named = {part for name, _ in naming_code(tree) for part in (name, name.partition(".")[0])}
    return [word for word in overrides if given_names([word]) & named]


def written(tree: Mapping[str, Any], folder: Path, *, signed: bool = True) -> str:
    """Return the text of a run's config.yaml: its settings, and the user's signature in a comment at the end."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False) + f"{MARK}{signature(tree, folder) if signed else ''}\n"


class _Dumper(yaml.SafeDumper):
    """Write a value that occurs twice in full, because `read_config` refuses references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return a run's settings; None if its folder has no readable ones."""
    path = folder / "config.yaml"
    try:
        text = read_text(path) if path.is_file() else ""
        tree = yaml.load(text, yaml.CSafeLoader) if is_shallow(text) else None
    except Exception:  # a value that is not of the type that it is marked with raises any error
        return None
    return tree if isinstance(tree, dict) and are_plain(tree) else None


def origin_of(folder: Path) -> Origin:
    """Return who wrote the settings of a run's folder."""
    tree = read_config(folder)
    if tree is None:
        return Origin.STRANGER
    *_, last = read_text(folder / "config.yaml").rstrip("\n").splitlines()
    return origin(tree, last.removeprefix(MARK), folder)


@cache
def code_settings() -> dict[str, tuple[str, ...]]:
    """Return all settings that name Python code or an address, as the schemas mark them, each with its values that name none."""
    schemas = {group: list(options.values()) for group, options in SCHEMAS.items()} | {"optim": [OptimConfig], "trainer": [TrainerConfig]}
    return {
        f"{group}.{item.name}": item.metadata.get("words", ())
        for group, each in schemas.items()
        for schema in each
        for item in fields(schema)
        if item.metadata.get("code") or item.metadata.get("address")
    }


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting's dotted name and value, also of lists' members and of keys that are texts, so that no text is missed."""
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(key, str) and "${" in key:
                yield f"{name} has the key", key
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
        return
    yield name, value
    if isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{name}[{number}]")

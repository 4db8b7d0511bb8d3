"""From overrides to checked settings: Hydra composes the YAML files, and the schemas check them."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from lab.base.errors import UserError, nearest, unknown
from lab.base.formats import masked, masked_tree, one_form
from lab.base.paths import ROOT, absolute
from lab.config.command import config_folders
from lab.config.presets import address
from lab.config.schema import SEARCHES, BenchConfig, SweepConfig, TrainConfig, check, range_text
from lab.config.user import chosen_uri, runs_folder
from lab.registry import SCHEMAS, agree, schema_of, tasks_with_box_loss, usual_loss

CONF = ROOT / "conf"
Config = TypeVar("Config")


@dataclass(frozen=True)
class App(Generic[Config]):
    """An app's settings: conf/<name>.yaml and the groups that it lists, checked by `schema`, or by the schema of the chosen option."""

    name: str
    schema: type[Config]
    by_option: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    named_by_group: frozenset[str] = frozenset()
    agree: Callable[[Any], None] = lambda config: None  # raises UserError where settings do not go together


TRAIN = App("train", TrainConfig, SCHEMAS, frozenset({"task.name", "loss.name", "box_loss.name", "data.name"}), agree)
BENCH = App("bench", BenchConfig)
SEARCH = App("search", SweepConfig, {"search": SEARCHES}, frozenset({"search.name"}))


@dataclass
class Settings(Generic[Config]):
    config: Config

    def tree(self) -> dict[str, Any]:
        """Return the resolved settings as plain containers, with credentials masked, because they go into files, tags and messages."""
        return cast(dict[str, Any], masked_tree(asdict(cast(Any, self.config))))

    def text(self, recorded: str | None = None) -> str:
        """Return the resolved settings as YAML, as --cfg prints them, with the places that the environment or the user's file gives.

        recorded: the store of the run that would go on.
        """
        tree, config = self.tree(), cast(Any, self.config)
        owner = tree.get("trainer", tree)
        owner["runs"] = str(runs_folder(owner["runs"]))
        tree["tracking"]["uri"] = masked(chosen_uri(config.tracking.uri, recorded))
        return yaml.safe_dump(tree, sort_keys=False)

    def flat(self) -> dict[str, str]:
        """Return the resolved settings as one level of dotted names."""
        return flat(self.tree())


def flat(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as one level of dotted names."""
    return {key: str(value) for key, value in _flatten(tree).items()}


def value_of(overrides: Sequence[str], key: str) -> str | None:
    """Return the value of `key` in the last override that sets it; None if none does."""
    given = [override.value() for override in parsed(overrides) if override.key_or_group == key and not override.is_sweep_override()]
    return None if not given or given[-1] is None else resolved(f"{key}=", str(given[-1]))


def given_names(overrides: Sequence[str]) -> set[str]:
    """Return the groups and the dotted names of the single settings that the overrides set."""
    known = groups(TRAIN)
    given: set[str] = set()
    for override in parsed(overrides):
        key = override.key_or_group
        given |= {key} if key in known else {name for name in _flatten(override.value(), key) if "." in name}
    return given


def resolved(what: str, text: str) -> str:
    """Resolve `${...}` in a text, such as `${oc.env:HOME}`; an error message names it by `what`."""
    if "${" not in text:
        return text
    with _refusing(what + text):
        return str(OmegaConf.create({"text": text}).text)


def groups(app: App[Any] = TRAIN) -> dict[str, list[str]]:
    """Return each group of the app with its options, from conf/ and the user's config folders.

    Raises:
        UserError: two folders have the same option; only the first would be read.
    """
    defaults = yaml.safe_load((CONF / f"{app.name}.yaml").read_text(encoding="utf-8"))["defaults"]
    found: dict[str, list[str]] = {}
    for name in sorted(name for each in defaults if isinstance(each, dict) for name in each):
        files: dict[str, Path] = {}
        for folder in (CONF, *config_folders()):
            for file in sorted((folder / name).glob("*.yaml")):
                if (first := files.setdefault(file.stem, file)) != file:
                    raise UserError(f"{file}: {first.parent} has a file of this name, which would be read in its place; rename yours.")
        found[name] = sorted(files)
    return found


def option_file(group: str, option: str) -> Path:
    """Return the file of a group's option."""
    return next(file for folder in (CONF, *config_folders()) if (file := folder / group / f"{option}.yaml").is_file())


def load(overrides: Sequence[str]) -> Settings[TrainConfig]:
    """Return the settings of a training run, as `load_for`."""
    return load_for(TRAIN, overrides)


def load_for(app: App[Config], overrides: Sequence[str]) -> Settings[Config]:
    """Compose and check the settings of `app` under these overrides.

    Raises:
        UserError: a name, type or range is wrong; the message holds the valid choices and the nearest spelling.
    """
    return _settled(app, typed(app, overrides))


def typed(app: App[Any], overrides: Sequence[str]) -> Any:
    """Return the settings in their schemas, as OmegaConf nodes, before required values are checked.

    Raises:
        UserError: as `load_for`.
    """
    known = groups(app)
    chosen, values = _sorted(overrides, known)
    with _refusing():
        return _changed(app, _composed(app, chosen), values, known)


def reload(tree: Mapping[str, Any], overrides: Sequence[str]) -> Settings[TrainConfig]:
    """Return the settings of a finished run, changed by these overrides: single settings, or all of a group.

    Raises:
        UserError: as `load_for`.
    """
    known = groups(TRAIN)
    chosen, values = _sorted(overrides, known)
    composed = OmegaConf.create(dict(tree))
    if preset := [word for word in chosen if word.startswith("experiment=")]:
        raise UserError(f"{preset[0]}: a preset would replace the run's own settings; give the settings to change by name.")
    with _refusing():
        if chosen:
            task = f"task={tree['task']['name']}"
            fresh = _composed_as_named(TRAIN, [task, *chosen])
            for word in chosen:
                group = word.partition("=")[0]
                composed[group] = fresh[group]
            if usual := _usual_loss(composed):
                composed.loss = _composed_as_named(TRAIN, [task, f"loss={usual}"]).loss
        return _settled(TRAIN, _changed(TRAIN, composed, values, known))


def _sorted(overrides: Sequence[str], known: dict[str, list[str]]) -> tuple[list[str], list[Any]]:
    """Divide overrides into options of groups and overrides of single settings."""
    chosen, values = [], []
    if (times := sum(word.startswith("data.shards=") for word in overrides)) > 1:
        raise UserError(
            f"data.shards is given {times} times; if the shell expanded {{0..9}}, put quotes around it: 'data.shards=train-{{0..9}}.tar'."
        )
    for override in parsed(overrides):
        key = override.key_or_group
        if key.startswith(("hydra/", "hydra.")):
            raise UserError(
                f"{override.input_line}: Hydra's own settings are hydra/launcher= and hydra.launcher.<setting>=, of a sweep (-m); "
                "a run's folder is made under trainer.runs=."
            )
        if override.is_delete():
            raise UserError(f"{override.input_line}: settings cannot be deleted. Leave it out for its default, or give it another value.")
        if override.is_sweep_override():
            name, _, value = str(override.input_line).partition("=")
            said = f"{override.input_line}: several values are run by --multirun (-m)."
            if override.is_choice_sweep() and "(" not in value:
                said += f" One value with a comma is quoted: {override_of(name, value)}"
            raise UserError(said)
        if key in known:
            option = _option(key, override, known)
            if option != "null":  # experiment=null is the default
                chosen.append(f"{key}={option}")
        else:
            values.append(override)
    return chosen, values


def _composed(app: App[Any], chosen: list[str]) -> Any:
    """Return what Hydra composes of conf/, with the detector's usual loss for loss=auto."""
    found = _composed_as_named(app, chosen)
    usual = _usual_loss(found)
    if usual is None:
        return found
    found = _composed_as_named(app, [*(word for word in chosen if word != "loss=auto"), f"loss={usual}"])
    found.loss.name = usual  # a preset may have written loss.name: auto
    return found


def _usual_loss(found: Any) -> str | None:
    """Return the loss that loss=auto stands for; None where the settings name one, or are not yet what a run takes."""
    parts = [found.get(group) for group in ("task", "model", "loss")]
    return usual_loss(found) if all(map(OmegaConf.is_dict, parts)) and parts[-1].get("name") == "auto" else None


def _composed_as_named(app: App[Any], chosen: list[str]) -> Any:
    own_program = GlobalHydra.instance().hydra  # set if a user's own Hydra app calls us
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            own = [f"hydra.searchpath=[{','.join(quoted(address(folder)) for folder in config_folders())}]"]
            return compose(app.name, overrides=[*own, *chosen] if config_folders() else chosen)
    except HydraException as error:
        raise UserError(f"conf/: {' '.join(str(error).partition('Config search path')[0].split())}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else "conf/"
        raise UserError(f"{where}: is not valid YAML: {' '.join(filter(None, (error.context, error.problem)))}") from None
    except RecursionError:
        raise UserError(f"conf/ with {' '.join(chosen)}: `defaults` name each other without end, or more files than can be read.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"conf/ with {' '.join(chosen)}: a file is not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        GlobalHydra.instance().hydra = own_program


@contextmanager
def _refusing(what: str = "") -> Iterator[None]:
    """Turn OmegaConf's errors into one line; `what` names the text if the error does not."""
    try:
        yield
    except OmegaConfBaseException as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        said = said.rpartition("raised while resolving interpolation: ")[2].strip('"')
        hint = ". Set it, or write ${oc.env:NAME,default}." if said.startswith("Environment variable") else "."
        raise UserError(f"{what or error.full_key or 'conf/'}: {said}{hint}") from None


def _first_line(error: Exception) -> str:
    """Return the first line of OmegaConf's error, without the names of our classes, which nobody can set."""
    return re.sub(r"^Key '.*' not in '.*'$", "no such setting.", str(error).splitlines()[0])


def _changed(app: App[Any], composed: Any, values: list[Any], known: dict[str, list[str]]) -> Any:
    """Return the composed settings in their schemas, with single settings changed."""
    for override in values:
        if override.key_or_group == "task.target" and "task" in composed:  # it decides the schema
            OmegaConf.update(composed, "task.target", override.value(), force_add=True)
    tree = _typed(app, composed)
    for override in values:
        _apply(app, tree, override, known)
    return tree


def _settled(app: App[Config], tree: Any) -> Settings[Config]:
    """Return complete, checked settings."""
    with _refusing():
        if missing := sorted(OmegaConf.missing_keys(tree)):
            raise UserError(f"{', '.join(missing)}: must be given, for example {missing[0]}=...")
        try:
            config = cast(Config, OmegaConf.to_object(tree))
        except InterpolationResolutionError:
            raise
        except OmegaConfBaseException as error:
            raise UserError(f"{error.full_key}: {_first_line(error)}") from None
    _complete(config)
    check(config)
    app.agree(config)
    return Settings(config)


def _complete(config: Any) -> None:
    """Make paths of settings absolute, and give lists of names one form of Unicode."""
    for item in fields(config):
        value, kind = getattr(config, item.name), item.metadata.get("path")
        if is_dataclass(value):
            _complete(value)
        elif isinstance(value, str) and value and kind and (kind == "always" or absolute(value, "").exists()):
            setattr(config, item.name, str(absolute(value, "")))
        elif isinstance(value, list) and item.metadata.get("distinct"):
            setattr(config, item.name, [one_form(each) for each in value])


def each_value(override: Any) -> list[str]:
    """Return the overrides of one value each that a sweep override stands for."""
    if not override.is_sweep_override():
        return [override.input_line]
    try:
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        raise UserError(f"{override.input_line}: its values cannot be listed; give a,b,c or range(start,stop), or search=optuna.") from None


def quoted(text: object) -> str:
    """Quote a value, so that the grammar of overrides takes it literally."""
    return "'" + str(text).replace("'", "\\'") + "'"


def override_of(name: str, value: object) -> str:
    """Return an override as a shell takes it, quoted where the grammar of overrides or the shell needs it."""
    plain = re.fullmatch(r"[\w./:@%+\\-]+", str(value), re.ASCII)
    word = f"{name}={value if plain else quoted(value)}"
    return word if plain else shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'


def parsed(overrides: Sequence[str]) -> list[Any]:
    """Parse overrides by Hydra's grammar."""
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise UserError(f"{word!r}: expected name=value, such as loss=focal or optim.lr=1e-3 (--help lists the groups).")
    parser, found = OverridesParser.create(), []
    for word in overrides:
        try:
            found += parser.parse_overrides([_with_equals(word)])
        except HydraException as error:
            name, _, value = word.partition("=")
            said = f"{word}: a value with such characters is quoted, in the shell too: {override_of(name, value)}"
            if value.startswith(("[", "{", "'", '"')):
                cure = "Within a list a text with such characters is quoted: ['a (1)',b]"
                said = f"{word}: cannot be read: {str(error).splitlines()[0]}. {cure}"
            raise UserError(said) from None
    return found


def _with_equals(word: str) -> str:
    """Quote a plain value that holds `=`, such as a folder's name, or `{0..9}`, because the grammar refuses it otherwise."""
    name, _, value = word.partition("=")
    rest = re.sub(r"\{\d+\.\.\d+\}", "", value)
    return f"{name}={quoted(value)}" if ("=" in value or rest != value) and not re.search(r"""['"\\,()\[\]{}$]""", rest) else word


def _option(group: str, override: Any, known: Mapping[str, list[str]]) -> str:
    """Return the option that an override names; it must be one of the group's."""
    given = override.value()
    value = resolved(f"{group}=", given) if isinstance(given, str) else override.get_value_element_as_str()
    if value in known[group] or (group == "experiment" and value == "null"):
        return value
    error = unknown(f"{group}={value}", value, known[group])
    if others := [name for name, options in known.items() if value in options]:
        said = f"{group}={value}: is an option of {' and of '.join(others)}; give {' or '.join(f'{name}={value}' for name in others)}"
        tasks = tasks_with_box_loss(value) if others == ["box_loss"] else []
        error = UserError(f"{said}{', with ' if tasks else ''}{' or '.join(f'task={task}' for task in tasks)}.")
    raise error


def _typed(app: App[Any], composed: Any) -> Any:
    """Return the composed YAML in its schema; a name or type that the schema does not have is an error."""
    schema = OmegaConf.structured(app.schema)
    for group, schemas in app.by_option.items():
        if not OmegaConf.is_dict(composed.get(group)):
            raise UserError(f"conf/ sets {group}: {composed.get(group)}: settings by name are expected; an option is chosen in `defaults`.")
        schema[group] = OmegaConf.structured(schema_of(group, schemas, composed[group]))
    try:
        return OmegaConf.merge(schema, composed)
    except OmegaConfBaseException as error:
        key = error.full_key or "?"
        near = nearest(key, _names(schema))
        hint = f"\nDid you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"conf/ sets {key}: {_first_line(error)}{hint}") from None


def _apply(app: App[Any], tree: Any, override: Any, known: dict[str, list[str]]) -> None:
    key = override.key_or_group.replace("/", ".")
    if key in app.named_by_group:
        group = key.removesuffix(".name")
        try:
            option = _option(group, override, known)
        except UserError as error:
            if asked := sorted(OmegaConf.missing_keys(tree[group])):
                error = UserError(f"{error}\n{group}={tree[group].name} asks for {', '.join(asked)}.")
            raise error from None
        raise UserError(f"{override.input_line}: write {group}={option}; the name decides which settings {group} has.")
    owner, item = _locate(tree, key)
    if item is None and (owner is None or is_dataclass(OmegaConf.get_type(owner))):  # else it is an entry of a map
        _refuse_name(app, tree, key, known)
    value = override.value()
    if isinstance(value, (int, float)) and item is not None and item.type in (str, str | None):
        value = (override.input_line or "").partition("=")[2]  # commit=3319e81 is a text, not a number
    try:
        OmegaConf.update(tree, key, value, force_add=True)
    except OmegaConfBaseException as error:
        wanted = _wanted(item) if item is not None else "another type"
        if value is None and item is not None:
            raise UserError(f"{key}=null: {wanted} is expected: {item.metadata.get('meaning')}.") from None
        raise UserError(f"{override.input_line}: {wanted} is expected.\n{_first_line(error)}") from None


def _locate(tree: Any, key: str) -> tuple[Any, Any]:
    """Return the node that holds `key`, and its field in the schema (None if it has no such field)."""
    head, _, last = key.rpartition(".")
    owner = OmegaConf.select(tree, head) if head else tree
    if not isinstance(owner, DictConfig):
        return None, None
    kind: Any = OmegaConf.get_type(owner)
    return owner, next((item for item in fields(kind) if item.name == last), None) if is_dataclass(kind) else None


def _refuse_name(app: App[Any], tree: Any, key: str, known: dict[str, list[str]]) -> None:
    head, _, last = key.rpartition(".")
    while head and not isinstance(OmegaConf.select(tree, head), DictConfig):
        head, _, last = head.rpartition(".")
    if not head:
        error = unknown(key, last or key, {*known, *(str(name) for name in tree)})
        if within := _within_groups(app, tree, last):
            error = UserError(f"{error}\nThere is also {', '.join(within)}.")
        raise error
    siblings = [str(name) for name in OmegaConf.select(tree, head)]
    error = unknown(key, last, siblings)
    elsewhere = [
        f"{head}.{match} of {head}={option}"
        for option, schema in app.by_option.get(head, {}).items()
        for match in nearest(last, {item.name for item in fields(schema)} - set(siblings), 1)
    ][:3]
    if last in tree:
        elsewhere.append(f"plain {last}")
    raise UserError(f"{error}\nThere is also {', '.join(elsewhere)}.") if elsewhere else error


def _within_groups(app: App[Any], tree: Any, last: str) -> list[str]:
    """Return settings of groups whose own name is `last`, else those with the nearest spelling."""
    here = {name: name.rpartition(".")[2] for name in _names(tree) if "." in name}
    others = {
        f"{group}.{item.name} of {group}={option}": item.name
        for group, schemas in app.by_option.items()
        for option, schema in schemas.items()
        for item in fields(schema)
    }
    for names in (here, others):
        if found := [full for full, name in names.items() if name == last]:
            return found[:3]
    near = nearest(last, set(here.values()), 1)
    return [full for full, name in here.items() if name in near][:3]


def _wanted(item: Any) -> str:
    if choices := item.metadata.get("choices"):
        return " or ".join(choices)
    kind = getattr(item.type, "__name__", None) if isinstance(item.type, type) else None
    kinds = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
    text = kinds.get(kind or "", f"{item.type}".replace("float", "number").replace(" | None", " or null"))
    limits = range_text(item.metadata)
    return f"{text} ({limits})" if limits else text


def _names(tree: Any) -> list[str]:
    return [key for key in _flatten(OmegaConf.to_container(tree, resolve=False)) if key]


def _flatten(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or (not tree and path):
        return {path: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{path}.{key}" if path else str(key))
    return flat

"""Every setting with its value, range and meaning, for `--help` and the documentation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.base.errors import unknown
from lab.config.command import fitted
from lab.config.schema import range_text
from lab.config.settings import SEARCH, TRAIN, App, groups, option_file, typed
from lab.registry import SCHEMAS, TASKS, schema_of
from lab.tasks.spec import TaskSpec

EVALUATE_USAGE = (
    "usage: uv run experiments/evaluate.py checkpoint=RUN [split=val|test|train|all]\n"
    "       [tta=flip|five_crop] [export.format=onnx] [export.precision=fp16]\n"
    "       [group=option ...] [group.setting=value ...] [--cfg]"
)
PREDICT_USAGE = "usage: uv run experiments/predict.py checkpoint=RUN [out=FOLDER] [top=N] [score=X] IMAGE ..."


@dataclass(frozen=True)
class Entry:
    """One setting; value: its current value, `???` if it must be given."""

    name: str
    value: str
    takes: str
    meaning: str

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


def entries(app: App[Any], overrides: Sequence[str] = ()) -> list[Entry]:
    """Return all settings of an app, under these overrides.

    Raises:
        UserError: an override is wrong.
    """
    return [each for each in walked(typed(app, overrides)) if each.name not in app.named_by_group]


def walked(tree: Any, path: str = "") -> Iterator[Entry]:
    """Yield the settings of a typed config, those of configs within it too."""
    for item in fields(cast(Any, OmegaConf.get_type(tree))):
        name = f"{path}{item.name}"
        node = None if OmegaConf.is_missing(tree, item.name) else tree[item.name]
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            yield from walked(node, f"{name}.")
        else:
            missing = OmegaConf.is_missing(tree, item.name)
            yield Entry(name, "???" if missing else _text(node), takes(item), item.metadata.get("meaning", ""))


def takes(item: Any) -> str:
    """Describe the values that a field takes: its choices, or its type and range."""
    if choices := item.metadata.get("choices"):
        return " | ".join(choices)
    kind = getattr(item.type, "__name__", str(item.type)) if isinstance(item.type, type) else str(item.type)
    for python, word in (("typing.Any", "value"), ("float", "number"), ("int", "integer"), ("bool", "true | false"), ("str", "text")):
        kind = kind.replace(python, word)
    kind = kind.replace("None", "null")
    return ", ".join(filter(None, (kind, range_text(item.metadata))))


def _text(value: Any) -> str:
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return "null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain)


def settings_text(app: App[Any], overrides: Sequence[str], *, options: bool = False) -> str:
    """Return the part of `--help` that lists settings; overrides without `=` name the groups or settings to list.

    options: whether to list the options of these groups, too.

    Raises:
        UserError: an override is wrong.
    """
    chosen = [word for word in overrides if "=" not in word]
    found = entries(app, [word for word in overrides if "=" in word])
    shown = [each for each in found if not chosen or any(each.name == word or each.name.startswith(f"{word}.") for word in chosen)]
    known = groups(app)
    listed = {word: known[word] for word in chosen if options and word in known}
    if not shown and not listed:
        raise unknown(f"--help {' '.join(chosen)}", chosen[0], {each.group for each in found} | set(known))
    texts = [options_text(group, options) for group, options in listed.items()]
    if shown and listed:
        texts.append(f"settings; those of another option: --help {' '.join(f'{group} {group}=NAME' for group in listed)}")
    rows = [f"  {f'{each.name}={each.value}':<38}  {each.meaning} ({each.takes})" for each in shown]
    return fitted("\n".join([*texts, *rows]))


def options_text(group: str, options: Sequence[str]) -> str:
    """Return the options of a group: by the tasks that take them, or each with the comment of its file."""
    files = {option: option_file(group, option) for option in options}
    if group in ("loss", "box_loss", "model", "data"):
        tasks = {name: [option for option, file in files.items() if _takes(spec, group, option, file)] for name, spec in TASKS.items()}
        rows = [f"  {f'task={name}':<20}  {', '.join(names)}" for name, names in tasks.items() if names]
    else:
        rows = [f"  {option:<20}  {_comment(file)}".rstrip() for option, file in files.items()]
    return "\n".join([f"{group}=NAME, one of:", *rows, ""])


def _takes(spec: TaskSpec, group: str, option: str, file: Path) -> bool:
    """Return whether a task takes an option of one of these groups."""
    if group == "loss":
        return option in spec.losses
    if group == "box_loss":
        return option in spec.boxes
    given = OmegaConf.load(file)
    try:
        kind = schema_of(group, SCHEMAS[group], given)
    except (KeyError, OmegaConfBaseException):  # a user's file that only changes another option
        return False
    return issubclass(kind, spec.model if group == "model" else spec.data)


def _comment(file: Path) -> str:
    """Return the comment that a file begins with."""
    lines = file.read_text(encoding="utf-8").splitlines()
    said = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    return " ".join(line for line in said if not line.startswith("@package"))


def train_help(script: str, overrides: Sequence[str]) -> str:
    """Return train.py's `--help`; with overrides, only the settings under them.

    Raises:
        UserError: as `settings_text`.
    """
    settings = settings_text(TRAIN, overrides, options=True)
    if overrides:
        return settings
    options = "\n".join(f"  {name:<11} {', '.join(each)}" for name, each in groups().items())
    return f"""usage: {script} [group=option ...] [group.setting=value ...]
       -m, --multirun     a sweep: run every combination of comma-separated values; the same command again goes on where it ended
       --config-dir=PATH  options of your own, in groups as conf/ has them
       --cfg              print the resolved settings and stop
       --help             this text; --help loss lists one group, --help task=detection the settings of another option

groups and their options (conf/):
{options}

of a sweep:
  search          {", ".join(groups(SEARCH)["search"])}
  hydra/launcher  basic; with uv sync --extra sweeps: joblib, submitit_local, submitit_slurm

settings, each with its value and what it takes:
{settings}

examples:
  {script} loss=focal model=resnet50
  {script} loss=ce loss.label_smoothing=0.1 optim.lr=3e-4 trainer.epochs=20
  {script} model=timm model.name=regnety_004 data=folder data.root=/path/to/images
  {script} data=table data.file=labels.csv data.image=path data.label=species
  {script} data=webdataset 'data.shards=train-{{000..009}}.tar'
  {script} task=regression loss=huber
  {script} experiment=fair_digits
  {script} -m loss=ce,focal,mae model=resnet18,resnet50 seed=0,1,2
  {script} -m search=optuna 'optim.lr=tag(log,interval(1e-4,1e-2))' loss=ce,focal
  {script} loss=focal export.format=onnx   # for ONNX Runtime, too
  {script} resume=runs/RUN   # go on with a run that was interrupted"""


def own_help(usage: str, about: str | None, overrides: Sequence[str]) -> str:
    """Return `--help` of an app that takes a run's settings as train.py does; with overrides, only the settings under them.

    Raises:
        UserError: as `settings_text`.
    """
    if overrides:
        return settings_text(TRAIN, overrides, options=True)
    return f"""{usage}

{(about or "").strip()}

settings, each with train.py's default and what it takes; a run that is named has its own values:
{settings_text(TRAIN, [])}"""

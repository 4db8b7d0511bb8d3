"""Configs, schemas and the losses' registry agree."""

import dataclasses
import subprocess
import sys

import pytest

from lab.compare.schema import CompareConfig
from lab.config.choices import DATA, SCHEMAS, TASKS
from lab.config.detection_schema import DETECTION_DATA
from lab.config.errors import UserError
from lab.config.loss_schema import LOSSES
from lab.config.schema import BenchConfig, TrainConfig
from lab.config.settings import CONF, ROOT, groups, load
from lab.sweep.schema import SEARCHES
from lab.tasks.detection.loss import DECODED, ENCODED
from lab.tasks.detection.spec import BOX_LOSSES
from lab.tasks.segmentation.spec import SPEC as SEGMENTATION

REGIONS = [name for name, schema in LOSSES.items() if schema.takes == "regions"]


def test_every_loss_has_a_config_a_schema_and_a_registry_entry():
    from lossforge.losses.registry import LOSSES as REGISTRY

    regions = {name for name, loss in REGISTRY.items() if loss.template == "overlap"}
    trainable = {name for name, loss in REGISTRY.items() if loss.given} | regions
    assert trainable >= {"ce", "mae", "focal", "preference_bce"}
    assert set(groups()["loss"]) == set(LOSSES) == {*trainable, "custom", "bradley_terry"}
    assert set(TASKS["classification"].losses) == {*trainable - regions, "custom"}


def test_what_is_written_of_the_losses_is_current():
    done = subprocess.run([sys.executable, ROOT / "tools" / "loss_configs.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_setting_has_a_line_of_meaning():
    options = [schema for each in SCHEMAS.values() for schema in each.values()]
    schemas = [TrainConfig, BenchConfig, CompareConfig, *SEARCHES.values(), *options]
    settings = [(schema, item) for schema in schemas for item in meant(schema)]
    assert len(settings) > 300
    dumb = [f"{schema.__name__}.{item.name}" for schema, item in settings if not 0 < len(item.metadata.get("meaning", "")) <= 100]
    assert not dumb


def meant(schema):
    """The fields that say a setting: all but an option's own name, and those that hold further settings."""
    for item in dataclasses.fields(schema):
        inner = item.default_factory() if item.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(inner):
            yield from meant(inner)
        elif item.name != "name":
            yield item


def test_the_settings_page_is_current():
    done = subprocess.run([sys.executable, ROOT / "tools" / "settings_page.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_loss_settings_and_their_ranges_are_the_signatures():
    from lossforge.losses.registry import LOSSES as REGISTRY

    boxes = {name: REGISTRY.get(f"box_{name}") or REGISTRY[name] for name in BOX_LOSSES if name not in ("auto", "custom")}
    for name, loss in {**{name: REGISTRY[name] for name in LOSSES if name in REGISTRY}, **boxes}.items():
        schema = BOX_LOSSES[name] if loss.template == "boxes" else LOSSES[name]
        ours = {item.name: item.default for item in dataclasses.fields(schema)}
        assert loss.hyper.items() <= ours.items(), name
    limits = {
        item.name: (item.type, {key: value for key, value in item.metadata.items() if value is not None and key != "meaning"})
        for item in dataclasses.fields(LOSSES["focal"])
    }
    assert limits["alpha"] == (float, {"least": -1, "most": 1})
    assert limits["gamma"] == (float, {"least": 0})
    assert {item.name: item.type for item in dataclasses.fields(LOSSES["ce"])}["softcap"] == float | None


@pytest.mark.parametrize(("group", "option"), [(group, option) for group, options in groups().items() for option in options])
def test_every_option_composes(group, option):
    required = {(name, "custom"): [f"{name}.target=my_loss:loss"] for name in ("loss", "box_loss", "model", "data", "optim")} | {
        ("model", m): ["model.name=resnet18"] for m in ("timm", "fcos", "retinanet")
    }
    required |= {(group, "distillation"): ["task.teacher=last.pt"] for group in ("task", "experiment")}
    required[("task", "custom")] = ["task.target=lab.tasks.classification.spec:SPEC"]
    required |= {("model", "segmenter"): ["model.name=resnet18"], ("data", "mask_folder"): ["data.classes=[a,b]"]}
    required |= {("loss", "bradley_terry"): ["task=preference"], ("data", "digit_pairs"): ["task=preference"]}
    extra = required.get((group, option), [])
    if option.startswith("segmenter") or option in {"data": SEGMENTATION.data_schemas, "loss": REGIONS}.get(group, ()):
        extra = ["task=segmentation", *extra]
    if option.startswith(("fcos", "retinanet")) or option in {"data": DETECTION_DATA, "box_loss": BOX_LOSSES}.get(group, ()):
        extra = ["task=detection", *extra]
    tree = load([f"{group}={option}", *extra]).tree()
    if group in ("task", "loss", "box_loss", "data"):
        assert tree[group]["name"] == option
    assert set(DATA) == set(groups()["data"])


def test_schema_and_yaml_give_the_same_defaults():
    for name, schema in LOSSES.items():
        fresh = schema()
        words = {"custom": ["loss.target=my_loss:loss"], "bradley_terry": ["task=preference"]}.get(name, [])
        words = ["task=segmentation"] if schema.takes == "regions" else words
        defaults = dataclasses.asdict(fresh) | {"name": name} | ({"target": "my_loss:loss"} if name == "custom" else {})
        assert load([f"loss={name}", *words]).tree()["loss"] == defaults


def test_the_command_line_wins_over_an_experiment():
    tree = load(["experiment=fair_digits", "loss.group_weight=[3,1]", "trainer.epochs=2"]).tree()
    assert tree["loss"]["name"] == "preference_bce"
    assert tree["loss"]["group_weight"] == [3.0, 1.0]
    assert tree["trainer"]["epochs"] == 2


def test_no_config_holds_a_machines_path():
    assert not [path for path in CONF.rglob("*.yaml") if "/work" in path.read_text() or "/home" in path.read_text()]


def test_detections_losses_are_those_of_the_detectors():
    assert set(TASKS["detection"].losses) <= set(LOSSES)
    assert set(groups()["box_loss"]) == set(BOX_LOSSES) == {"auto", "custom", *ENCODED, *DECODED}
    assert set(groups()["task"]) == {*TASKS, "custom"}
    assert all(set(spec.losses) <= set(LOSSES) for spec in TASKS.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task=detection", "model=resnet18"], "task=detection takes a detector"),
        (["model=fcos_tiny"], "task=classification takes a classifier"),
        (["task=detection", "data=digits"], "takes digit_scenes, coco"),
        (["data=coco"], "takes digits, folder"),
        (["task=detection", "loss=ce"], "loss=ce with task=detection"),
        (["box_loss=giou"], "only task=detection has boxes"),
        (["task=detection", "model.anchor_sizes=[8]"], "anchor_sizes of model=retinanet"),
        (["task=detection", "box_loss.name=giou"], "write box_loss=giou"),
    ],
)
def test_what_does_not_go_together_is_refused(words, said):
    with pytest.raises(UserError) as caught:
        load(words)
    assert said in str(caught.value)

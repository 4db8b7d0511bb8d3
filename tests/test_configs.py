"""Configs, schemas and the losses' registry agree."""

import dataclasses

import pytest

from lab.choices import DATA, DETECTION_LOSSES, TASKS
from lab.detection_loss import DECODED, ENCODED
from lab.detection_schema import DETECTION_DATA
from lab.detector_schema import BOX_LOSSES
from lab.errors import UserError
from lab.loss_schema import LOSSES
from lab.settings import CONF, combinations, groups, load


def test_every_loss_has_a_config_a_schema_and_a_registry_entry():
    from lossforge.losses.registry import LOSSES as REGISTRY

    binary = {
        "bce",
        "bce_smoothed",
        "quality_focal",
        "varifocal",
        "focal",
        "asymmetric",
        "poly_bce",
        "preference_bce",
        "preference_bce_probability",
    }
    rows = {"ce", "softmax_focal", "poly_ce", "generalized_ce", "logit_adjusted_ce", "asymmetric_single_label"}
    trainable = {*rows, "mae", "mse", "huber", "smooth_l1", *binary}
    assert set(groups()["loss"]) == set(LOSSES) == {*trainable, "custom"}
    assert trainable <= set(REGISTRY)


def test_loss_defaults_are_the_registrys():
    from lossforge.losses.registry import LOSSES as REGISTRY

    for name, schema in LOSSES.items():
        if name == "custom":
            continue
        ours = {item.name: item.default for item in dataclasses.fields(schema)}
        for hyper, default in REGISTRY[name].hyper.items():
            if hyper in ours:
                assert ours[hyper] == default, f"{name}.{hyper}"


@pytest.mark.parametrize(("group", "option"), [(group, option) for group, options in groups().items() for option in options])
def test_every_option_composes(group, option):
    required = {(name, "custom"): [f"{name}.target=my_loss:loss"] for name in ("loss", "box_loss")} | {
        ("model", m): ["model.name=resnet18"] for m in ("timm", "fcos", "retinanet")
    }
    extra = required.get((group, option), [])
    if option.startswith(("fcos", "retinanet")) or (option in (*DETECTION_DATA, *BOX_LOSSES) and group in ("data", "box_loss")):
        extra = ["task=detection", *extra]
    tree = load([f"{group}={option}", *extra]).tree()
    if group in ("task", "loss", "box_loss", "data"):
        assert tree[group]["name"] == option
    assert set(DATA) == set(groups()["data"])


def test_schema_and_yaml_give_the_same_defaults():
    for name, schema in LOSSES.items():
        fresh = schema()
        words = ["loss.target=my_loss:loss"] if name == "custom" else []
        defaults = dataclasses.asdict(fresh) | {"name": name} | ({"target": "my_loss:loss"} if words else {})
        assert load([f"loss={name}", *words]).tree()["loss"] == defaults


def test_the_command_line_wins_over_an_experiment():
    tree = load(["experiment=fair_digits", "loss.group_weight=[3,1]", "trainer.epochs=2"]).tree()
    assert tree["loss"]["name"] == "preference_bce"
    assert tree["loss"]["group_weight"] == [3.0, 1.0]
    assert tree["trainer"]["epochs"] == 2


def test_combinations_of_a_multirun():
    assert combinations(["loss=ce,focal", "trainer.seed=0,1", "model=resnet18"]) == [
        ["loss=ce", "trainer.seed=0", "model=resnet18"],
        ["loss=ce", "trainer.seed=1", "model=resnet18"],
        ["loss=focal", "trainer.seed=0", "model=resnet18"],
        ["loss=focal", "trainer.seed=1", "model=resnet18"],
    ]


def test_no_config_holds_a_machines_path():
    assert not [path for path in CONF.rglob("*.yaml") if "/work" in path.read_text() or "/home" in path.read_text()]


def test_detections_losses_are_those_of_the_detectors():
    assert set(DETECTION_LOSSES) <= set(LOSSES)
    assert set(groups()["box_loss"]) == set(BOX_LOSSES) == {"auto", "custom", *ENCODED, *DECODED}
    assert set(groups()["task"]) == set(TASKS)


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

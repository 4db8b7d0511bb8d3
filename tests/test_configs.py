"""Configs, schemas and the losses' registry agree."""

import dataclasses

import pytest

from lab.comparison.runs import CompareConfig
from lab.config.loss_schema import LOSSES
from lab.config.schema import SEARCHES, BenchConfig, TrainConfig
from lab.config.settings import CONF, groups
from lab.data.specs import SOURCES
from lab.registry import SCHEMAS, TASKS


def test_every_loss_has_a_config_a_schema_and_a_registry_entry():
    from lossforge.losses.registry import LOSSES as REGISTRY

    regions = {name for name, loss in REGISTRY.items() if loss.template.name == "overlap"} | {"lovasz_softmax"}
    of_classes = {name for name, loss in REGISTRY.items() if loss.given} | {"arcface", "cosface", "ldam", "multi_margin"}
    assert of_classes >= {"ce", "mae", "focal", "preference_bce"}
    distances = {"generalized_dice", "mcc", "boundary", "hausdorff"}
    features = {"info_nce", "nt_xent", "vicreg", "barlow_twins", "supcon", "multi_similarity", "circle", "proxy_anchor"}
    others = {"custom", "bradley_terry", "seesaw", "clip", "siglip", "zlpr", "two_way"}
    assert {*groups()["loss"]} - {"auto"} == set(LOSSES) == of_classes | regions | distances | features | others
    assert set(TASKS["classification"].losses) == {*of_classes - regions, "custom", "seesaw"}
    assert {*REGISTRY} - {*LOSSES} == NOT_TRAINED | {name for name, loss in REGISTRY.items() if loss.template.name in ("boxes", "rotated")}


NOT_TRAINED = {  # losses of the registry that no task has as `loss=`, and what they need
    *("nll", "kl_div", "bce_probability"),  # the output of a softmax or a sigmoid, whose logits other losses take
    *("gaussian_nll", "poisson_nll"),  # a variance, or rates: a model of other numbers than the targets
    *("soft_margin", "hinge_embedding", "margin_ranking", "cosine_embedding", "triplet_margin"),  # targets of 1 and -1, pairs or triplets
    "multilabel_margin",  # lists of classes
    *("distribution_focal", "lovasz_hinge"),  # sides of boxes, which a YOLO has beside loss=; one channel of a mask
    *("kl", "js", "total_variation", "cosine_distance", "topk_kl", "dino", "draft"),  # a teacher's logits: task.divergence= has four
}


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


@pytest.mark.parametrize("task", ["contrastive", "regression"])
def test_a_task_needs_its_folder_and_its_record_alone(task):
    for path in CONF.parent.joinpath("experiments").rglob("*.py"):
        if task not in path.parts:
            assert f"tasks.{task}" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("source", SOURCES.values(), ids=lambda source: source.name)
def test_a_data_source_names_settings_and_functions_that_exist(source):
    from lab.config.objects import find_object

    named = {*source.parts, *source.splits, *source.files, *source.digested, source.titled_by, source.source} - {None}
    assert not [name for name in named if not source.has(name)]
    assert source.read is None or callable(find_object(source.read))
    assert (CONF / "data" / f"{source.name}.yaml").is_file()

"""Configs, schemas and the losses' registry agree."""

import dataclasses

import pytest

from lab.comparison.schema import CompareConfig
from lab.config.choices import SCHEMAS, TASKS
from lab.config.loss_schema import LOSSES
from lab.config.schema import BenchConfig, TrainConfig
from lab.config.settings import CONF, groups
from lab.config.sweep_schema import SEARCHES
from lab.data.specs import SOURCES

REGIONS = [name for name, schema in LOSSES.items() if schema.takes == "regions"]


def test_every_loss_has_a_config_a_schema_and_a_registry_entry():
    from lossforge.losses.registry import LOSSES as REGISTRY

    regions = {name for name, loss in REGISTRY.items() if loss.template.name == "overlap"} | {"lovasz_softmax"}
    trainable = {name for name, loss in REGISTRY.items() if loss.given} | regions
    assert trainable >= {"ce", "mae", "focal", "preference_bce"}
    assert set(groups()["loss"]) == set(LOSSES) == {*trainable, "custom", "bradley_terry", "seesaw", "clip", "siglip"}
    assert set(TASKS["classification"].losses) == {*trainable - regions, "custom", "seesaw"}


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


@pytest.mark.parametrize("source", SOURCES.values(), ids=lambda source: source.name)
def test_a_data_source_names_settings_and_functions_that_exist(source):
    from lab.config.objects import find_object

    named = {*source.parts, *source.splits, *source.files, *source.digested, source.titled_by, source.source} - {None}
    assert not [name for name in named if not source.has(name)]
    assert source.open is None or callable(find_object(source.open))
    assert (CONF / "data" / f"{source.name}.yaml").is_file()

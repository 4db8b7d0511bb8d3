"""A plugin of pytest: write as JSON which cases each tier takes and which it leaves out, with the values of their parameters."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIERS = {"default": {}, "ci": {"ci": True}, "all": {"all": True}}
LEFT_OUT: list[pytest.Item] = []


def described(item: pytest.Item) -> dict[str, Any]:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    each = item.get_closest_marker("each")
    if each and item.config.option.ci and not each.kwargs.get("ci"):
        each = None
    of_loss = {name: getattr(value, "loss", value) for name, value in given.items() if not each or name in each.args}
    if each and "template" in each.args:
        of_loss["template"] = given["loss"].template.name
    return {
        "id": item.nodeid,
        "slow": item.get_closest_marker("slow") is not None,
        "test": item.nodeid.partition("[")[0].removeprefix("packages/"),
        "values": {name: str(getattr(value, "name", value)) for name, value in of_loss.items()},
    }


def pytest_deselected(items: list[pytest.Item]) -> None:
    LEFT_OUT.extend(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Let the other plugins choose among the same cases once a tier: to collect them takes far longer."""
    this = config.pluginmanager.get_plugin(__name__)
    choose = config.pluginmanager.subset_hook_caller("pytest_collection_modifyitems", remove_plugins=[this])
    found = {}
    for tier, options in TIERS.items():
        taken = list(items)
        vars(config.option).update({"ci": False, "all": False} | options)
        choose(session=session, config=config, items=taken)
        found[tier] = {"taken": [described(item) for item in taken], "left out": [described(item) for item in LEFT_OUT]}
        LEFT_OUT.clear()
    Path(os.environ["COLLECTED_CASES"]).write_text(json.dumps(found), encoding="utf-8")
    return (yield)

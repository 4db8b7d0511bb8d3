"""A plugin of pytest: write as JSON which cases a command line takes and which it leaves out, with the values of their parameters."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT: list[pytest.Item] = []


def described(item: pytest.Item) -> dict[str, Any]:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    each = None if item.config.option.ci else item.get_closest_marker("each")
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


def pytest_collection_finish(session: pytest.Session) -> None:
    cases = {"taken": [described(item) for item in session.items], "left out": [described(item) for item in LEFT_OUT]}
    Path(os.environ["COLLECTED_CASES"]).write_text(json.dumps(cases), encoding="utf-8")

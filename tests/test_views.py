"""MLflow's view of results has the figure of every task, so that no run stands there without one."""

import importlib
from pathlib import Path

import lab.tasks
from lab.tracking.views import FIGURES


def test_every_tasks_figure_is_a_column():
    monitors = set()
    for path in Path(lab.tasks.__file__).parent.glob("*/task.py"):
        found = vars(importlib.import_module(f"lab.tasks.{path.parent.name}.task")).values()
        monitors |= {each.monitor for each in found if isinstance(each, type) and isinstance(getattr(each, "monitor", None), str)}
    assert len(monitors) >= 5
    assert {f"best_{name}" for name in monitors} <= set(FIGURES)

"""MLflow's view of results has the figure of every task, so that no run stands there without one."""

import importlib
from pathlib import Path

import lab.tasks
from lab.tracking.views import FIGURES, rounded


def test_every_tasks_figure_is_a_column():
    monitors = set()
    for path in Path(lab.tasks.__file__).parent.glob("*/task.py"):
        found = vars(importlib.import_module(f"lab.tasks.{path.parent.name}.task")).values()
        monitors |= {each.monitor for each in found if isinstance(each, type) and isinstance(getattr(each, "monitor", None), str)}
    assert len(monitors) >= 5
    assert {f"best_{name}" for name in monitors} <= {source for sources in FIGURES.values() for source in sources}


def test_figures_are_shown_in_three_digits():
    given = {"best_top1": 0.52777, "best_loss": 1.7821, "train/peak_process_mib": 1116.52, "loss_ms": 12.916, "val/top1": 0.5}
    assert rounded(given) == {"result/top1": 0.528, "result/loss": 1.78, "result/peak_mib": 1120.0, "result/loss_ms": 12.9}
    assert rounded(given | {"train/peak_allocated_mib": 512.3})["result/peak_mib"] == 512.0

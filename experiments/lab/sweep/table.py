"""The final table of a sweep: a line a job."""

import os
from pathlib import Path

from lab.runs.formats import visible
from lab.sweep.plan import Job
from lab.sweep.run_record import RunRecord
from lab.training.console import clock

Outcome = tuple[Job, RunRecord | None]


def show(sweep: Path, status: str, outcomes: list[Outcome], best: tuple[Job, RunRecord] | None, mlflow: str) -> None:
    """Print the jobs with the settings that vary, how each ended, its best metric and its time, and where all of it is."""
    from rich.console import Console
    from rich.table import Table

    rich = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not rich.is_terminal:
        rich.width = 140
    keys = list(outcomes[0][0].varied) if outcomes else []
    metric = next((run.monitor for _, run in outcomes if run and run.monitor), "metric")
    table = Table(title=f"{sweep.name}: {status.lower()}", title_justify="left")
    for key in keys or ["job"]:
        table.add_column(key)
    table.add_column("status")
    table.add_column(f"best {metric}", justify="right")
    table.add_column("time", justify="right")
    for job, run in outcomes:
        settings = [job.varied[key] for key in keys] or [job.name]
        table.add_row(*map(visible, settings), *_reached(run), style="bold" if best and job is best[0] else None)
    rich.print(table)
    for job, run in outcomes:
        if run and run.error:
            rich.print(f"{job.name}: {run.error}\n  {os.path.relpath(run.folder)}")
    if best:
        rich.print(f"best: {best[0].name}, {os.path.relpath(best[1].folder)}")
    rich.print(f"sweep folder: {os.path.relpath(sweep)}")
    if mlflow:
        rich.print(f"MLflow: {mlflow}")


def _reached(run: RunRecord | None) -> tuple[str, str, str]:
    if run is None:
        return "not begun", "", ""
    score = f"{run.score:.4f}" if run.score is not None else ""
    ended = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted"}
    return ended.get(run.status or "KILLED", ""), score, clock(run.seconds) if run.seconds is not None else ""

"""Run `train.py -m`: many runs from one command line, nested under one run in MLflow; started again, the sweep continues.

A sweep's folder holds `sweep.yaml` (its overrides and jobs), its runs' folders, `results.csv`, and `metrics.jsonl`, which is sent to the
sweep's own run in MLflow. Which jobs are finished is read only from the run folders.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lab.base.errors import UserError
from lab.base.files import write_text
from lab.base.formats import markdown_code, markdown_text, masked, masked_tree, visible
from lab.base.records import History
from lab.config.settings import groups, override_of
from lab.run.active import command, in_lines, source_tags
from lab.run.folder import RunFolder
from lab.run.frames import write_rows
from lab.sweep.job import PLAN
from lab.sweep.launch import launch, launcher_name, make_launcher
from lab.sweep.plan import Job, Plan, plan_of, runs_of
from lab.sweep.search import search_of
from lab.sweep.stop import Stop
from lab.tracking.store import EXPERIMENT, NOTE
from lab.tracking.uploader import VARIABLE, MlflowUploader, checked_uri, read_state
from lab.tracking.views import DIGITS, FIGURES, TRAINING, pages_hint, view
from lab.training.console import clock

MOST_ROWS = 50  # of the table in the sweep's description, a tag of at most 5000 characters
STATUSES = ("FINISHED", "FAILED", "KILLED")


def run_sweep(overrides: Sequence[str]) -> int:
    """Check all jobs, run the unfinished ones, and show the results.

    Returns:
        The exit status: 0 if every job is finished, 130 if the sweep was stopped, else 1.

    Raises:
        UserError: a setting is wrong; nothing was started.
    """
    plan = plan_of(overrides)
    make_launcher(plan.launcher, plan.folder)
    sweep = Sweep(plan)
    stop = Stop(sweep.path)
    status = "FAILED"
    try:
        with stop.by_signals():
            sweep.start_uploading()
            sweep.run(stop)
            if stop.requested:
                status = "KILLED"
            elif all(is_finished(sweep.reached(job)) for job in sweep.jobs):
                status = "FINISHED"
    finally:
        sweep.close(status)
    if sweep.uploader and sweep.uploader.interrupted:
        return 130
    return {"FINISHED": 0, "KILLED": 130}.get(status, 1)


class Sweep:
    """A running sweep and its folder."""

    def __init__(self, plan: Plan) -> None:
        """Open the sweep's folder, and lock it.

        Raises:
            UserError: the folder cannot be written, the sweep is running already, the store's credentials are missing, or it is refused.
        """
        tracking = plan.first.tracking
        self.uri = checked_uri(tracking) if tracking.enabled else None
        if self.uri and masked(self.uri) != self.uri:
            os.environ[VARIABLE] = self.uri  # for the jobs, whose overrides are in a file without credentials
        self.plan, self.path, self.search = plan, plan.folder, search_of(plan)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"trainer.runs={self.path.parent}: cannot be written: {error.strerror}") from None
        self.folder = RunFolder.reopen(self.path)
        self.jobs = self.search.jobs()
        self.uploader: MlflowUploader | None = None

    def start_uploading(self) -> None:
        tracking = self.plan.first.tracking
        tags = {"sweep": self.path.name, "sweep.words": " ".join(self.plan.overrides), "command": command(), NOTE: self._description()}
        tags |= source_tags("train")
        if self.folder.history.start is None:
            params = {word.partition("=")[0]: word.partition("=")[2] for word in self.plan.overrides}
            self.folder.record("start", app="sweep", name=self.path.name, params=params, tags=tags | tracking.tags)
        else:
            self.folder.record("resume", step=0, tags=tags)
        if self.uri is not None:
            self.uploader = MlflowUploader(self.path, self.uri, tracking)
            self.uploader.start()

    def run(self, stop: Stop) -> None:
        for batch in self.search.batches(self.reached):
            self._add(batch)
            numbers = [self.jobs.index(job) for job in batch]
            todo = [number for number in numbers if not is_finished(self.reached(self.jobs[number]))]
            if done := len(numbers) - len(todo):
                print(f"{done} of {len(self.jobs)} jobs finished before", flush=True)
            if todo and not stop.requested:
                if (name := launcher_name(self.plan.launcher)) != "basic":
                    print(f"{len(todo)} jobs by {name}; their output is in {self.path / 'logs'}", flush=True)
                launch(todo, self.plan.launcher, self.path, stop)
            if stop.requested:
                return

    def reached(self, job: Job) -> History | None:
        """Return the job's finished run, else its last one."""
        runs = runs_of(self.path, job.name, job.tree)
        return next((run for run in runs if is_finished(run)), runs[-1] if runs else None)

    def close(self, status: str) -> None:
        """Record the results, wait until MLflow has them, and show them."""
        outcomes = [(job, self.reached(job)) for job in self.jobs]
        scored = [(job, run) for job, run in outcomes if run and is_finished(run) and run.score is not None]
        best = max(scored, key=lambda each: each[1].rank, default=None)
        counts = Counter(run.status or "KILLED" for _, run in outcomes if run)  # without jobs that never began
        figures = {f"sweep_{name.lower()}": float(counts[name]) for name in STATUSES} | {"sweep_jobs": float(len(self.jobs))}
        tags = {"sweep.counts": ", ".join(f"{counts[name]} {name.lower()}" for name in STATUSES) + f" of {len(self.jobs)} jobs"}
        if best:
            job, run = best
            figures[f"best_{run.monitor}"] = run.score or 0.0
            tags |= {"sweep.best": job.name, "sweep.best_settings": " ".join(job.overrides)}
            tags |= {"monitor": run.monitor, "monitor_goal": run.goal}
            tags |= {"sweep.best_run": read_state(run.path).get("run_id") or run.path.name}
        self.folder.summary(figures)
        self.folder.record("tags", values=tags | {NOTE: self._description(outcomes, best)})
        self.folder.record("view", key=self.path.name, state=self._view(best[1] if best else None))
        names, rows = ("status", "metric", "best", "seconds", "folder", "error"), []
        for job, last in outcomes:
            ended: list[Any] = [""] * len(names)
            if last:
                ended = [last.status or "KILLED", last.monitor, last.score, _seconds(last), last.path.name, last.error]
            rows.append({"job": job.name} | job.varied | dict(zip(names, ended, strict=True)))
        write_rows(self.path / "results.csv", rows)
        for name in (PLAN, "results.csv"):
            self.folder.artifact(self.path / name)
        self.folder.close(status)
        show(self.path, status, outcomes, best, self.uploader)

    def _description(self, outcomes: Sequence[tuple[Job, History | None]] = (), best: tuple[Job, History] | None = None) -> str:
        """Return the sweep's description in Markdown: the best job, the way to all, the command, and a table of the jobs."""
        view = f"[all runs with their figures](#/experiments/{EXPERIMENT}/runs?viewStateShareKey={self.path.name}&{TRAINING})"
        parts = [view if best is None else f"Best: {markdown_text(best[0].name)}, {best[1].monitor} **{best[1].score:.{DIGITS}g}**; {view}"]
        parts.append(markdown_code(in_lines(f"uv run {command()}"), "sh"))
        if outcomes:
            keys = list(outcomes[0][0].varied)
            metric = next((run.monitor for _, run in outcomes if run and run.monitor), "metric")
            rows = [[*keys, "status", f"best {metric}", "time"]]
            rows += [[*(job.varied[key] for key in keys), *_reached(run)] for job, run in outcomes[:MOST_ROWS]]
            cells = [f"| {' | '.join(map(markdown_text, row))} |" for row in rows]
            parts.append("\n".join([cells[0], "| --- " * len(rows[0]) + "|", *cells[1:]]))
        return "\n\n".join(parts)

    def _view(self, best: History | None) -> dict[str, Any]:
        """Return a view of the sweep's runs: the settings that vary and the figures, the best run first."""
        known = groups()
        varied = [f"{axis.key}.name" if axis.key in known else axis.key for axis in self.plan.axes]
        order = f"best_{best.monitor}" if best and best.monitor else None
        return view(varied, list(FIGURES), sweep=self.path.name, order=order, rising=bool(best and best.goal == "min"))

    def _add(self, batch: list[Job]) -> None:
        """Write the jobs to the file that launchers read."""
        self.jobs += [job for job in batch if job not in self.jobs]
        plan: dict[str, Any] = {
            "words": masked_tree(self.plan.overrides),
            "search": self.plan.search.name,
            "experiment": self.plan.first.tracking.experiment,
            "jobs": [{"name": job.name, "words": masked_tree(job.overrides)} for job in self.jobs],
        }
        write_text(self.path / PLAN, yaml.safe_dump(plan, sort_keys=False, width=140))


def is_finished(run: History | None) -> bool:
    return run is not None and run.status == "FINISHED"


def show(
    sweep: Path,
    status: str,
    outcomes: list[tuple[Job, History | None]],
    best: tuple[Job, History] | None,
    uploader: MlflowUploader | None,
) -> None:
    """Print the jobs with the settings that vary, how each ended, its best metric and time, and the places of its files."""
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
            rich.print(visible(f"{job.name}: {run.error}") + f"\n  {os.path.relpath(run.path)}")
    if best:
        rich.print(f"best: {best[0].name}, {os.path.relpath(best[1].path)}")
    rich.print(f"sweep folder: {os.path.relpath(sweep)}")
    if uploader:
        rich.print(f"MLflow: {uploader.closed()}")
        if pages := uploader.pages(sweep.name):
            rich.print(f"the runs with their figures in MLflow's UI{pages_hint(uploader.place)}: {pages[1]}")
    if best and uploader:
        rich.print(f"to compare them: uv run experiments/compare.py {override_of('sweep', sweep.name)}")


def _reached(run: History | None) -> tuple[str, str, str]:
    if run is None:
        return "not begun", "", ""
    ended = {"FINISHED": "finished", "FAILED": "failed"}.get(run.status or "", "interrupted")
    return ended, f"{run.score:.{DIGITS}g}" if run.score is not None else "", clock(_seconds(run))


def _seconds(run: History) -> float:
    return float(run.last.get("seconds", run.seconds))

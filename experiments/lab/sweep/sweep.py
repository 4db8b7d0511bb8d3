"""`train.py -m`: many runs from one command line, nested under one run in MLflow; started again, it goes on where it ended.

A sweep's folder holds `sweep.yaml` (its words and jobs), its runs' folders, `results.csv`, and `metrics.jsonl`, from which its own run in
MLflow is fed. What is finished is read from the run folders alone.
"""

import csv
import io
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from lab.config.errors import UserError
from lab.runs.files import write_text
from lab.runs.folder import RunFolder
from lab.runs.formats import csv_cell
from lab.runs.masks import masked, masked_tree
from lab.runs.run import source_tags
from lab.sweep.job import PLAN
from lab.sweep.launch import launch, launcher_name, make_launcher
from lab.sweep.plan import Job, Plan, plan_of
from lab.sweep.run_record import RunRecord, runs_of
from lab.sweep.search import search_of
from lab.sweep.stop import Stop
from lab.sweep.table import show
from lab.tracking.uploader import VARIABLE, MlflowUploader, read_state, tracking_uri

STATUSES = ("FINISHED", "FAILED", "KILLED")


def run_sweep(overrides: Sequence[str]) -> int:
    """Check all, run what is not finished, show what came of it.

    Returns:
        The exit status: 0 if every job is finished, 130 if the sweep was stopped, else 1.

    Raises:
        UserError: nothing was started.
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
            counts = sweep.counts()
            if stop.requested:
                status = "KILLED"
            elif counts["FINISHED"] == len(sweep.jobs):
                status = "FINISHED"
    finally:
        sweep.close(status)
    if sweep.uploader and sweep.uploader.interrupted:
        return 130
    return {"FINISHED": 0, "KILLED": 130}.get(status, 1)


class Sweep:
    """A sweep's folder and what happens in it."""

    def __init__(self, plan: Plan) -> None:
        """
        Raises:
            UserError: the folder cannot be written, the sweep is running already, or the store's credentials are missing.
        """
        tracking = plan.first.tracking
        self.uri = tracking_uri(tracking) if tracking.enabled else None
        if self.uri and masked(self.uri) != self.uri:
            os.environ[VARIABLE] = self.uri  # for the jobs, whose words are kept in a file without it
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
        said = " ".join(["experiments/train.py", *sys.argv[1:]])
        tags = {"sweep": self.path.name, "sweep.words": " ".join(self.plan.overrides), "command": said}
        tags |= source_tags("train")
        if self.folder.history.start is None:
            params = {word.partition("=")[0]: word.partition("=")[2] for word in self.plan.overrides}
            self.folder.record("start", app="sweep", name=self.path.name, params=params, tags=tags | tracking.tags)
        else:
            self.folder.record("resume", step=0, tags=tags)
        if self.uri is not None:
            self.uploader = MlflowUploader(self.path, self.uri, tracking.experiment, tracking.patience_seconds)
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
                    print(f"{len(todo)} jobs by {name}; what they say is in {self.path / 'logs'}", flush=True)
                launch(todo, self.plan.launcher, self.path, stop)
            if stop.requested:
                return

    def reached(self, job: Job) -> RunRecord | None:
        """The job's finished run, else its last one."""
        runs = runs_of(self.path, job.name, job.tree)
        return next((run for run in runs if is_finished(run)), runs[-1] if runs else None)

    def counts(self) -> Counter[str]:
        """How many jobs have which status; those that never began have none."""
        return Counter(run.status or "KILLED" for job in self.jobs if (run := self.reached(job)))

    def close(self, status: str) -> None:
        """Record what came of it, wait until MLflow has it, show it."""
        outcomes = [(job, self.reached(job)) for job in self.jobs]
        scored = [(job, run) for job, run in outcomes if run and is_finished(run) and run.score is not None]
        best = max(scored, key=lambda each: each[1].rank, default=None)
        counts = self.counts()
        figures = {f"sweep_{name.lower()}": float(counts[name]) for name in STATUSES} | {"sweep_jobs": float(len(self.jobs))}
        tags = {"sweep.counts": ", ".join(f"{counts[name]} {name.lower()}" for name in STATUSES) + f" of {len(self.jobs)} jobs"}
        if best:
            job, run = best
            figures[f"best_{run.monitor}"] = run.score or 0.0
            tags |= {"sweep.best": job.name, "sweep.best_settings": " ".join(job.overrides)}
            tags |= {"monitor": run.monitor, "monitor_goal": run.goal}
            tags |= {"sweep.best_run": read_state(run.folder).get("run_id") or run.folder.name}
        self.folder.summary(figures)
        self.folder.record("tags", values=tags)
        self._write_results(outcomes)
        for name in (PLAN, "results.csv"):
            self.folder.artifact(self.path / name)
        self.folder.close(status)
        show(self.path, status, outcomes, best, self.uploader.closed() if self.uploader else "")

    def _add(self, batch: list[Job]) -> None:
        """Write the jobs where launchers read them."""
        self.jobs += [job for job in batch if job not in self.jobs]
        plan: dict[str, Any] = {
            "words": masked_tree(self.plan.overrides),
            "search": self.plan.search.name,
            "experiment": self.plan.first.tracking.experiment,
            "jobs": [{"name": job.name, "words": masked_tree(job.overrides)} for job in self.jobs],
        }
        write_text(self.path / PLAN, yaml.safe_dump(plan, sort_keys=False, width=140))

    def _write_results(self, outcomes: list[tuple[Job, RunRecord | None]]) -> None:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        keys = [axis.key for axis in self.plan.axes]
        table.writerow(map(csv_cell, ["job", *keys, "status", "metric", "best", "seconds", "folder", "error"]))
        for job, run in outcomes:
            reached = [run.status or "KILLED", run.monitor, run.score, run.seconds, run.folder.name, run.error] if run else [""] * 6
            table.writerow(map(csv_cell, [job.name, *(job.varied[key] for key in keys), *reached]))
        write_text(self.path / "results.csv", text.getvalue())


def is_finished(run: RunRecord | None) -> bool:
    return run is not None and run.status == "FINISHED"

"""Choose the jobs of a sweep: every combination, or by Optuna from the results of earlier jobs.

Hydra's own sweeper for Optuna begins a trial anew that was interrupted; here it goes on from its checkpoint.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from lab.base.errors import UserError
from lab.base.paths import sqlite_uri
from lab.base.records import History
from lab.config.schema import OptunaConfig
from lab.sweep.plan import Axis, Job, Plan
from lab.training.monitor import Monitor

DATABASE = "optuna.db"
Reached = Callable[[Job], History | None]


def search_of(plan: Plan) -> "Grid":
    return Optuna(plan, plan.search) if isinstance(plan.search, OptunaConfig) else Grid(plan)


class Grid:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def jobs(self) -> list[Job]:
        """Return the jobs that are known so far."""
        return list(self.plan.jobs)

    def batches(self, reached: Reached) -> Iterator[list[Job]]:
        """Yield lists of jobs to run in parallel; ask for the next list when these have ended, or when the sweep is continued."""
        yield self.plan.jobs


class Optuna(Grid):
    """Choose jobs by Optuna; trials are kept in an SQLite file of the sweep's folder, so that a search can be continued.

    Raises:
        UserError: Optuna is not installed.
    """

    def __init__(self, plan: Plan, config: OptunaConfig) -> None:
        try:
            import optuna
        except ImportError:
            raise UserError("search=optuna: Optuna is installed by: uv sync --extra sweeps") from None
        super().__init__(plan)
        self.optuna, self.config = optuna, config
        self.space = {axis.key: self._distribution(axis) for axis in plan.axes}

    def jobs(self) -> list[Job]:
        return [self._job(trial.number, trial.params) for trial in self._study().get_trials(deepcopy=False)]

    def batches(self, reached: Reached) -> Iterator[list[Job]]:
        study = self._study()
        running = self.optuna.trial.TrialState.RUNNING
        begun: set[int] = set()  # a killed job is not started twice by the same process, because it may be killed again
        while True:
            still_open = study.get_trials(deepcopy=False, states=(running,))
            trials = [(trial.number, trial.params) for trial in still_open if trial.number not in begun]
            left = self.config.trials - len(study.get_trials(deepcopy=False))
            while len(trials) < self.config.parallel and left > 0:
                trial = study.ask(self.space)
                trials.append((trial.number, trial.params))
                left -= 1
            if not trials:
                return
            jobs = {number: self._job(number, params) for number, params in trials}
            begun |= set(jobs)
            yield list(jobs.values())
            for number, job in jobs.items():
                self._tell(study, number, reached(job))

    def _study(self) -> Any:
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        storage = sqlite_uri(self.plan.folder / DATABASE)
        trainer = self.plan.first.trainer
        lower = Monitor(trainer, "").goal == "min"
        direction: Literal["minimize", "maximize"] = "minimize" if lower else "maximize"
        study = self.optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
        # the sampler's state is not kept; with the same seed it would choose the same random trials again
        study.sampler = self.optuna.samplers.TPESampler(seed=self.config.seed + len(study.get_trials(deepcopy=False)))
        return study

    def _tell(self, study: Any, number: int, run: History | None) -> None:
        """Report a trial's result; a trial that was interrupted stays open, to be continued."""
        if run is None or run.status in (None, "KILLED"):
            return
        if run.status == "FINISHED" and run.score is not None and run.score == run.score:
            same = study.direction.name.lower() == f"{run.goal}imize"  # a custom task may have a metric with another goal
            study.tell(number, run.score if same else -run.score)
        else:
            study.tell(number, state=self.optuna.trial.TrialState.FAIL)

    def _distribution(self, axis: Axis) -> Any:
        if axis.interval is None:
            return self.optuna.distributions.CategoricalDistribution(axis.values)
        low, high = axis.interval
        if isinstance(low, int) and isinstance(high, int):
            return self.optuna.distributions.IntDistribution(low, high, log=axis.log)
        return self.optuna.distributions.FloatDistribution(low, high, log=axis.log)

    def _job(self, number: int, params: dict[str, Any]) -> Job:
        return self.plan.job([str(params[axis.key]) for axis in self.plan.axes], f"trial-{number:03}")

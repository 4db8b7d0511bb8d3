"""Runs of known figures in a real MLflow store, as train.py logs them."""

from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient


class Journal:
    """An SQLite store; its runs are numbered by the second they start in."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self.client = MlflowClient(tracking_uri=self.uri)
        self.folder = folder
        self.count = 0
        self.experiments: dict[str, str] = {}

    def experiment_id(self, name: str) -> str:
        if name not in self.experiments:
            self.experiments[name] = self.client.create_experiment(name, artifact_location=(self.folder / "artifacts" / name).as_uri())
        return self.experiments[name]

    def run(
        self,
        loss: str,
        model: str = "resnet18",
        seed: int | None = 0,
        top1: float | None = None,
        *,
        status: str = "FINISHED",
        settings: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        metrics: dict[str, float] | None = None,
        curve: dict[int, float] | None = None,
        experiment: str = "lossforge",
        name: str = "",
    ) -> str:
        """Log a run and return its id. curve: val/top1 by update."""
        self.count += 1
        started = 1_700_000_000_000 + 1000 * self.count
        number = self.experiment_id(experiment)
        run = self.client.create_run(number, started, tags or {}, name or f"{loss}-{model}-{self.count}").info.run_id
        params = {"loss.name": loss, "model.name": model, "data.name": "digits", "task.name": "classification", "optim.lr": "0.001"}
        params |= {} if seed is None else {"seed": str(seed)}
        params |= {key: str(value) for key, value in (settings or {}).items()}
        values = metrics or {}
        if top1 is not None:
            values = {"best_top1": top1, "val/top1": top1} | values
        points = [Metric(key, value, started, 0) for key, value in values.items() if not (curve and key == "val/top1")]
        points += [Metric("val/top1", value, started + step, step) for step, value in (curve or {}).items()]
        self.client.log_batch(run, points, [Param(key, value) for key, value in params.items()], [RunTag("host", "here")])
        if status != "RUNNING":
            self.client.set_terminated(run, status, started + 60_000)
        return run

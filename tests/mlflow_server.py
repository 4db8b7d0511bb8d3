"""A real MLflow server for tests: started, killed, started again; and what it holds, asked over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from lab.base.paths import ROOT


class Server:
    """`mlflow server` on a port of its own, which it keeps when it is killed and started again."""

    def __init__(self, folder: Path, store: str | None = None, **env: str) -> None:
        self.folder = folder
        self.store = store or f"sqlite:///{folder / 'server.db'}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
        self.env = kept | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"} | env

    def start(self) -> "Server":
        artifacts = self.folder / "artifacts"
        artifacts.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", self.store, "--artifacts-destination", str(artifacts)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env, cwd=ROOT, start_new_session=True)
        deadline = time.monotonic() + 300
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text(encoding="utf-8")[-4000:])
            time.sleep(0.1)
        return self

    def kill(self) -> None:
        """SIGKILL, to all its processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def get(self, method: str, /, **query: Any) -> dict[str, Any]:
        address = f"{self.uri}/api/2.0/mlflow/{method}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return json.load(answer)

    def runs(self, experiment: str = "lossforge", view: str = "ACTIVE_ONLY") -> list[dict[str, Any]]:
        number = self.get("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        body = json.dumps({"experiment_ids": [number], "run_view_type": view}).encode()
        request = urllib.request.Request(f"{self.uri}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer).get("runs", [])

    def history(self, run: dict[str, Any]) -> Counter[tuple[str, int, float]]:
        """How often the store has each (metric, step, value)."""
        points: Counter[tuple[str, int, float]] = Counter()
        for metric in run["data"].get("metrics", []):
            query = {"run_id": run["info"]["run_id"], "metric_key": metric["key"], "max_results": 25000}
            for point in self.get("metrics/get-history", **query)["metrics"]:
                points[point["key"], int(point.get("step", 0)), float(point["value"])] += 1
        return points

    def artifacts(self, run: dict[str, Any], path: str = "") -> set[str]:
        answer = self.get("artifacts/list", run_id=run["info"]["run_id"], path=path)
        return {file["path"] for file in answer.get("files", [])}


def written(folder: Path) -> Counter[tuple[str, int, float]]:
    """How often the run folder has each (metric, step, value)."""
    points: Counter[tuple[str, int, float]] = Counter()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] in ("metrics", "summary"):
            points.update((name, record.get("step", 0), float(value)) for name, value in record["values"].items())
    return points

"""A sweep and the batch script of docs/learn/slurm.md on a real Slurm of one node."""

import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from interrupted_runs import records
from slurm import Slurm, SlurmError, free_ports, lacking

ROOT = Path(__file__).resolve().parents[1]
WORDS = "model=tiny_resnet trainer.device=cpu data.image_size=16 trainer.max_updates=6 trainer.log_every=1"

# at its third update a run waits as long as there is a file, or until it is asked to stop
HOLD = """
def _held(self, group, update=Trainer.update):
    from pathlib import Path
    while self.done == 2 and Path("hold").exists() and not self.stop.wanted:
        Path("held").touch()
        time.sleep(0.05)
    return update(self, group)
import time
Trainer.update = _held
"""


@pytest.fixture(scope="module")
def slurm():
    if absent := lacking():
        pytest.skip(f"not installed: {', '.join(absent)}")
    try:
        running = Slurm().start()
    except SlurmError as error:
        pytest.skip(f"Slurm does not start here: {error}")
    yield running
    running.stop()


@pytest.fixture
def cluster(slurm, clone):
    """A clone on the cluster, where `uv run` takes the environment that the tests run in."""
    for name in ("pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, clone.path)
    clone.env |= {"SLURM_CONF": slurm.env["SLURM_CONF"], "PATH": slurm.env["PATH"], "OMP_NUM_THREADS": "1"}
    clone.env |= {"UV_NO_SYNC": "1", "UV_OFFLINE": "1", "UV_PROJECT_ENVIRONMENT": sys.prefix}
    yield clone
    slurm.cancel()


class Stored(NamedTuple):
    """A run in MLflow, with one of its tags."""

    number: str
    status: str
    tag: str | None


def stored(clone: Any, tag: str) -> dict[str, Stored]:
    """The runs of the clone's MLflow, by name."""
    query = "select name, runs.run_uuid, status, value from runs left join tags on tags.run_uuid = runs.run_uuid and key = ?"
    with sqlite3.connect(clone.path / "mlflow.db") as database:
        return {name: Stored(*values) for name, *values in database.execute(query, (tag,))}


@pytest.mark.slow
def test_a_sweep_by_submitit(cluster, slurm):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs uv sync --extra sweeps")
    launcher = [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=gpu",
        "hydra.launcher.gpus_per_node=1",
        "hydra.launcher.timeout_min=9",
    ]
    done = cluster.run("-m", *WORDS.split(), "seed=0,1", *launcher, timeout=300)
    assert done.status == 0, done.output
    (sweep,) = (path for path in cluster.run_folders() if (path / "sweep.yaml").exists())
    found = stored(cluster, "mlflow.parentRunId")
    above = found.pop(sweep.name)
    assert above.status == "FINISHED"
    assert set(found) == {"seed0", "seed1"}
    assert {(run.status, run.tag) for run in found.values()} == {("FINISHED", above.number)}
    ours = [job for job in slurm.jobs() if job["StdOut"].startswith(str(sweep))]
    assert [(job["JobState"], job["Partition"], job["TimeLimit"]) for job in ours] == 2 * [("COMPLETED", "gpu", "00:09:00")]


def scripts() -> tuple[str, str]:
    """The batch script of docs/learn/slurm.md, and the same for several hosts, with the lines that the page has for them."""
    text = (ROOT / "docs" / "learn" / "slurm.md").read_text(encoding="utf-8")
    one, lines = re.findall(r"^```bash\n((?:#!/bin/bash\n)?#SBATCH.*?)^```$", text, re.MULTILINE | re.DOTALL)
    several = one
    for line in (r"^#SBATCH --job-name.*\n", r"^srun (?:.*\\\n)*.*\n"):
        (old,), (new,) = (re.findall(line, each, re.MULTILINE) for each in (one, lines))
        several = several.replace(old, new)
    return one, several


ONE = {"--nproc-per-node=4": "--nproc-per-node=2"}
SEVERAL = {"--nodes=2": "--nodes=1", "--gpus-per-node=8": "--gpus-per-node=4", "--cpus-per-task=64": "--cpus-per-task=32"}
SEVERAL |= {"--nproc-per-node 8": "--nproc-per-node 2", ":29500": f":{free_ports(1)[0]}"}


class Job:
    """One of the scripts, with fewer and smaller things in it, as a job whose training waits at its third update."""

    def __init__(self, slurm: Slurm, clone: Any, script: str, smaller: dict[str, str], *options: str) -> None:
        self.slurm, self.folder = slurm, clone.path
        smaller = {**smaller, "http://mlflow.example.org:5000": f"sqlite:///{clone.path}/mlflow.db", "model=resnet50": WORDS}
        for old, new in smaller.items():
            assert script.count(old) == 1, (old, script)
            script = script.replace(old, new)
        (self.folder / "job.sh").write_text(script, encoding="utf-8")
        with (self.folder / "experiments/lab/training/trainer.py").open("a", encoding="utf-8") as file:
            file.write(HOLD)
        (self.folder / "hold").touch()
        self.number = slurm.run("sbatch", "--parsable", *options, "job.sh", folder=self.folder, env=clone.env).strip()

    def until(self, what: Callable[[], Any], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert self.shown["JobState"] not in ("FAILED", "TIMEOUT", "NODE_FAIL"), self.said
            assert time.monotonic() < deadline, f"{self.shown}\n{self.said}"
            time.sleep(0.2)

    @property
    def shown(self) -> dict[str, str]:
        (job,) = self.slurm.jobs(self.number)
        return job

    @property
    def said(self) -> str:
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @property
    def held(self) -> bool:
        return (self.folder / "held").exists()

    @property
    def run(self) -> Path:
        (run,) = (self.folder / "runs").iterdir()
        return run

    def statuses(self) -> list[str]:
        """How each turn of the run ended."""
        return [record["status"] for record in records(self.run, "end")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="the script starts uv")
def test_a_job_whose_time_is_over_goes_on_in_its_next_turn(cluster, slurm):
    # every 30 s Slurm tells the jobs that will have less than these 45 s when it looks next: 45 to 75 s after the start
    job = Job(slurm, cluster, scripts()[0], ONE, "--time=2", "--signal=B:USR1@45")
    job.until(lambda: job.held)
    step = slurm.run("scontrol", "--oneliner", "show", "step", f"{job.number}.0")
    assert "CPUs=32 " in step
    job.until(lambda: job.shown["JobState"] == "COMPLETED")
    assert int(job.shown["Restarts"]) >= 1
    assert job.statuses() == ["KILLED", "FINISHED"]
    assert [record["step"] for record in records(job.run, "resume")] == [3]
    assert [record["step"] for record in records(job.run, "metrics") if "train/loss" in record["values"]] == [1, 2, 3, 4, 5, 6]
    assert [(each.status, each.tag) for each in stored(cluster, "resumed").values()] == [("FINISHED", "after update 3")]
    assert "resume=auto: no unfinished run" in job.said  # what the first turn said
    assert "after update 3 of 6" in job.said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="the script starts uv")
def test_a_job_that_is_cancelled_leaves_a_checkpoint_and_stays_away(cluster, slurm):
    job = Job(slurm, cluster, scripts()[1], SEVERAL)
    job.until(lambda: job.held)
    slurm.run("scancel", job.number)
    job.until(lambda: job.shown["JobState"] == "CANCELLED", 60)
    assert job.shown["Restarts"] == "0"
    assert (job.run / "checkpoints" / "last.pt").is_file()
    assert job.statuses() == ["KILLED"]

"""Hydra's launchers (basic, joblib, submitit_local, submitit_slurm), given the jobs of a sweep by their numbers.

A launcher composes conf/sweep.yaml for each job and calls a function with it, here or in another process; the jobs' overrides are in the
sweep's folder. The training settings never pass through the launcher: train.py reads and checks them as for any run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from lab.base.errors import UserError, unknown
from lab.base.paths import ROOT
from lab.config.settings import CONF, quoted
from lab.sweep.job import run_job
from lab.sweep.stop import Stop

BASIC = "basic"


def launcher_name(overrides: Sequence[str]) -> str:
    """Return the launcher that `hydra/launcher=` names."""
    return next((word.partition("=")[2] for word in overrides if word.startswith("hydra/launcher=")), BASIC)


def launch(numbers: Sequence[int], overrides: Sequence[str], sweep: Path, stop: Stop) -> None:
    """Run jobs of a sweep; return when all have ended, or when `stop` says not to wait for them.

    The launcher has its own process and session, because Ctrl-C in a terminal would also reach its workers, and end them before the jobs.
    """
    command = [sys.executable, "-P", "-m", "lab.sweep.launch", str(sweep), ",".join(map(str, numbers)), *overrides]
    # so that processes find `lab`, including those that a launcher starts
    path = os.pathsep.join(filter(None, [str(ROOT / "experiments"), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    while process.poll() is None:
        if stop.requested == "leave":
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)


def run_jobs(numbers: Sequence[int], overrides: Sequence[str], sweep: Path) -> None:
    """Run jobs of a sweep by the launcher of these overrides.

    Raises:
        UserError: the launcher itself failed.
    """
    launcher = make_launcher(overrides, sweep)
    try:
        returned = launcher.launch([[f"job={number}"] for number in numbers], initial_job_idx=0)
    except Exception as error:
        raise UserError(f"hydra/launcher={launcher_name(overrides)} failed: {type(error).__name__}: {error}") from error
    for each in returned:
        _ = each.return_value  # raises the job's own exception


def make_launcher(overrides: Sequence[str], sweep: Path) -> Any:
    """Return Hydra's launcher for the jobs of a sweep.

    Raises:
        UserError: the launcher is not installed, or does not have one of these settings.
    """
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import HydraContext, RunMode

    name = launcher_name(overrides)
    gpus = [] if name in (BASIC, "submitit_slurm") else visible_gpus()
    task = partial(run_job, str(sweep), gpus, name == BASIC, name != "submitit_slurm")
    composed = [f"hydra.sweep.dir={quoted(sweep)}", *overrides]
    if name.startswith("submitit"):  # it unpickles results, so they get a folder whose name nobody knew before
        composed.insert(1, f"hydra.launcher.submitit_folder={quoted(sweep / '.submitit' / uuid4().hex / '%j')}")
    if name == "joblib" and gpus and not any(word.startswith("hydra.launcher.n_jobs=") for word in overrides):
        composed.append(f"hydra.launcher.n_jobs={len(gpus)}")  # its default is one job a processor core
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="lossforge"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            config = hydra.compose_config("sweep", composed, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
            context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks())
            return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        except HydraException as error:
            _check_launcher(overrides, name, hydra.config_loader)
            said = " ".join(str(each).splitlines()[0] for each in (error, error.__cause__) if each)
            raise UserError(f"{' '.join(overrides)}: {said}") from None


def _check_launcher(overrides: Sequence[str], name: str, loader: Any) -> None:
    """Raise UserError for a launcher that is not installed, or for a setting that it does not have."""
    from hydra.types import RunMode

    installed = loader.get_group_options("hydra/launcher")
    if name not in installed:
        hint = "joblib, submitit_local and submitit_slurm are installed by: uv sync --extra sweeps"
        raise UserError(f"{unknown(f'hydra/launcher={name}', name, installed)}\n{hint}")
    launcher = loader.load_configuration("sweep", [f"hydra/launcher={name}"], run_mode=RunMode.MULTIRUN).hydra.launcher
    settings = [str(key) for key in launcher if not str(key).startswith("_")]
    for word in overrides:
        setting = word.partition("=")[0].removeprefix("hydra.launcher.")
        if not word.startswith("hydra/launcher=") and setting.partition(".")[0] not in settings:
            if not settings:
                raise UserError(
                    f"{word}: hydra/launcher={name} has no settings; choose a launcher that has, such as hydra/launcher=joblib."
                )
            raise unknown(f"{word} of hydra/launcher={name}", setting, settings)


def visible_gpus() -> list[str]:
    """Return this host's GPUs as CUDA_VISIBLE_DEVICES names them, without importing torch, which is slow."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [each.strip() for each in given.split(",") if each.strip()]
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        import pynvml

        pynvml.nvmlInit()
        return [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
    return []


if __name__ == "__main__":
    try:
        run_jobs([int(number) for number in sys.argv[2].split(",")], sys.argv[3:], Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"error: {error}")

"""The machine of a run: device, precision, code version, system load."""

import contextlib
import os
import platform
import re
import resource
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch

from lab.base.errors import UserError, unknown
from lab.base.paths import ROOT
from lab.base.process import Background, launched, launched_here, local_rank
from lab.config.schema import TrainConfig
from lab.processes import distributed
from lab.run.active import command
from lab.run.folder import RunFolder

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, amp: str) -> torch.autocast:
    return torch.autocast(device.type, AMP.get(amp, torch.bfloat16), enabled=amp in AMP)


def pick_device(wanted: str, setting: str = "trainer.device") -> torch.device:
    """Return the device of a setting; 'auto' takes a GPU if there is one; each of torchrun's processes gets another GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if launched() > 1 and wanted != "cpu":
        _check_one_gpu_each(wanted, setting, gpus)
    mine = torch.device("cuda", local_rank())
    if wanted == "auto":
        return mine if gpus else torch.device("cpu")
    if wanted.startswith("cuda") and not gpus:
        raise UserError(
            f"{setting}={wanted}: torch {torch.__version__} sees no GPU: {_why_no_gpu()} Without one use {setting}=cpu, or auto."
        )
    choices = ["auto", "cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    if wanted not in choices:
        raise unknown(f"{setting}={wanted}", wanted, choices)
    return mine if wanted == "cuda" else torch.device(wanted)


def _why_no_gpu() -> str:
    """Return why torch sees no GPU, and what to do."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "it is a CPU build; install one for CUDA."
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all of them; unset it."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().splitlines()[0].rstrip(".")
        return f"{said}{f' (CUDA_VISIBLE_DEVICES={visible})' if visible is not None else ''}."
    return f"CUDA_VISIBLE_DEVICES={visible!r} names none that is here." if visible is not None else "there is none."


def _check_one_gpu_each(wanted: str, setting: str, gpus: int) -> None:
    if wanted.startswith("cuda:"):
        raise UserError(f"{setting}={wanted}: each process takes the GPU of its own number; use {setting}=cuda, or auto.")
    started = launched_here()
    if gpus and started > gpus:
        raise UserError(
            f"{setting}={wanted}: torchrun started {started} processes on this host, which has {gpus} GPUs, and each needs one.\n"
            f"Use --nproc-per-node {gpus}, or {setting}=cpu."
        )


def seed_all(config: TrainConfig) -> None:
    """Seed every generator, and choose precision and determinism of torch's operations.

    `trainer.deterministic` uses the deterministic variant of each operation that has one; torch warns about operations without one.
    """
    import random

    import numpy

    random.seed(config.seed)
    numpy.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.trainer.deterministic, warn_only=True)
    torch.backends.cudnn.benchmark = not config.trainer.deterministic
    torch.backends.cudnn.allow_tf32 = config.trainer.tf32
    torch.set_float32_matmul_precision("high" if config.trainer.tf32 else "highest")


def seed_rank(config: TrainConfig) -> None:
    """Seed each rank differently, for dropout and the like; call it after the model is made, which is equal on all ranks."""
    if distributed.rank() > 0:
        torch.manual_seed(distributed.own_seed(config.seed))


def describe(device: torch.device) -> dict[str, str]:
    """Return tags of a run: versions, hardware, commit."""
    import timm

    tags = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)",
        "processes": str(distributed.ranks()),
        "host": platform.node(),
        "command": command(),
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = _git("rev-parse", "HEAD")
        dirty = bool(_git("status", "--porcelain"))
        tags |= {"git.commit": commit, "git.dirty": str(dirty).lower(), "mlflow.source.git.commit": commit}
        tags["mlflow.source.git.branch"] = _git("rev-parse", "--abbrev-ref", "HEAD")
    return tags


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def forget_peaks() -> None:
    """Reset the memory peaks, because an earlier training in this process may have had higher ones."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def _peak_of_process() -> float:
    """Return the process's peak memory in MiB; unlike getrusage's, it can be reset."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return int(found[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(device: torch.device) -> dict[str, float]:
    """Return the memory peaks since the run's start, in MiB."""
    values = {"train/peak_process_mib": _peak_of_process()}
    if device.type == "cuda":
        values["train/peak_allocated_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
        values["train/peak_reserved_mib"] = torch.cuda.max_memory_reserved(device) / 2**20
    return values


class SystemSampler(Background):
    """Write the machine's load into the run folder every few seconds: what MLflow's own recorder collects, under its names.

    MLflow would send the load itself, and lose it while a server is down.
    """

    modules = ("pandas",)  # by MLflow

    def __init__(self, folder: RunFolder, seconds: float, device: torch.device) -> None:
        super().__init__("system")
        self.folder, self.seconds, self.device = folder, seconds, device
        self.stopped = threading.Event()
        self.step = folder.history.next_step("system/")

    def stop(self) -> None:
        self.stopped.set()
        self.join(5)

    def run(self) -> None:
        pause = min(self.seconds, 1.0)
        monitors: list[Any] | None = None
        while not self.stopped.wait(pause):
            monitors, pause = self._monitors() if monitors is None else monitors, self.seconds
            values: dict[str, float] = {}
            for monitor in monitors:
                with contextlib.suppress(Exception):  # a load that cannot be read is left out
                    monitor.collect_metrics()
                    values |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
                    monitor.clear_metrics()
            try:
                self.folder.metrics(self.step, values)
            except UserError:
                return  # the run's next record raises the same error
            self.step += 1

    def _monitors(self) -> list[Any]:
        try:
            from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, gpu_monitor, network_monitor
        except Exception:  # such as where memory is exhausted, which the run reports itself: record no load
            return []
        kinds: list[Any] = [cpu_monitor.CPUMonitor, disk_monitor.DiskMonitor, network_monitor.NetworkMonitor]
        kinds += [gpu_monitor.GPUMonitor] if self.device.type == "cuda" else []
        found = []
        for kind in kinds:
            with contextlib.suppress(Exception):  # not every machine has each
                found.append(kind())
        return found

"""The doctor on this machine, on machines that lack something, and on those that compute wrongly."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.utils import collect_env

from lossforge.kernels.plans import PLANS
from lossforge.losses import doctor
from lossforge.losses.check.report import Report
from lossforge.losses.engine.linear import engine
from lossforge.losses.registry import LOSSES

GPU = torch.cuda.is_available()
RUN = "import sys, runpy; sys.argv[1:] = {words!r}; runpy.run_module('lossforge.losses.doctor', run_name='__main__')"
WITHOUT_TRITON = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
sys.modules["triton"] = None
"""


def consult(*words, before="", **environment):
    """The doctor's status and what it prints, without the interpreter that the tests' own process may have."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    command = [sys.executable, "-c", before + RUN.replace("{words!r}", repr(list(words)))]
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True)
    assert done.stderr == "" or done.returncode == 0, done.stderr[-3000:]
    return done.returncode, done.stdout


@pytest.mark.slow
def test_on_this_machine():
    status, printed = consult()
    assert status == 0, printed
    assert printed.endswith("Nothing is wrong.\n")
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}, built for", printed, re.MULTILINE)
    assert re.search(rf"^  system +{re.escape(collect_env.get_os(collect_env.run))}, ", printed, re.MULTILINE)
    assert len(re.findall(r"^  ok ", printed, re.MULTILINE)) == len(doctor.TRIED) + (not GPU)
    assert ("compiled ahead of time" in printed) is not GPU
    assert f"{'cuda' if GPU else 'cpu'} tensors" in printed


@pytest.mark.slow
def test_for_machines_without_a_compiler():
    """Without a GPU nothing needs it: a kernel is compiled ahead of time by Triton's own tools."""
    status, printed = consult("--json", PATH="")
    found = json.loads(printed)
    assert found["installed"]["C compiler"].startswith("not found")
    assert [each["passed"] for each in found["checks"]] == [True] * len(found["checks"]) or GPU
    assert status == (1 if GPU else 0)
    missing = ["Triton finds no C compiler that works, and needs one to launch a kernel"]
    assert [each["what"] for each in found["problems"]][:1] == (missing if GPU else [])


@pytest.mark.slow
def test_without_triton():
    status, printed = consult(before=WITHOUT_TRITON)
    assert re.search(r"^  triton +not installed$", printed, re.MULTILINE)
    assert re.search(r"^  cpu tensors +plain PyTorch, because Triton is not installed$", printed, re.MULTILINE)
    assert "compiled ahead of time" not in printed
    assert len(re.findall(r"^  ok ", printed, re.MULTILINE)) == len(doctor.TRIED)
    assert status == (1 if GPU else 0)


@pytest.mark.slow
def test_an_old_triton_is_a_problem():
    status, printed = consult(before="import triton; triton.__version__ = '3.4.0'\n")
    assert status == 1
    assert "lossforge needs triton>=3.5,<3.10, found triton 3.4.0" in printed
    assert 'to do: pip install "triton>=3.5,<3.10"' in printed


def change(monkeypatch, changes):
    """Replace attributes, named with their modules, and environment variables."""
    for name, value in changes.items():
        if "." in name:
            monkeypatch.setattr(name, value)
        else:
            monkeypatch.setenv(name, value)


@pytest.fixture
def sound(monkeypatch, tmp_path):
    """A GPU machine that lacks nothing."""
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    changes = {
        "torch.version.cuda": "13.0",
        "torch.utils.collect_env.get_nvidia_driver_version": lambda run: "580.95",
        "lossforge.kernels.TRITON": True,
        "lossforge.kernels.INTERPRETED": False,
        "lossforge.losses.doctor._gpus": lambda: (["NVIDIA H100, sm_90, 79 GiB"], [], ""),
        "lossforge.losses.doctor._compiler": lambda: "/usr/bin/gcc (gcc 12)",
        "sysconfig.get_path": lambda *of: str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    change(monkeypatch, changes)


def wrong():
    return [fact for fact in doctor.look() if fact.what]


def no_gpu(why):
    return {"lossforge.losses.doctor._gpus": lambda: ([], [], why)}


V100 = ["Tesla V100, sm_70, 16 GiB"] * 2
UNKNOWN = {"torch.utils.collect_env.get_nvidia_driver_version": lambda run: None, "lossforge.losses.doctor.DRIVER": Path(__file__)}
LACKS = {
    "compiler": ({"lossforge.losses.doctor._compiler": lambda: None}, "no C compiler", "install gcc"),
    "headers": ({"sysconfig.get_path": lambda *of: "/nowhere"}, "Python.h is not there", "python3-dev"),
    "cache": ({"TRITON_CACHE_DIR": f"{__file__}/cache"}, "cannot write its cache", "TRITON_CACHE_DIR"),
    "triton": ({"lossforge.kernels.TRITON": False}, "no Triton", "pip install"),
    "interpreted": ({"lossforge.kernels.INTERPRETED": True}, "TRITON_INTERPRET is set", "unset TRITON_INTERPRET"),
    "old": ({"lossforge.losses.doctor._gpus": lambda: (V100, V100, "")}, "Tesla V100", "plain_torch()"),
    "CPU build": (
        {**no_gpu("Torch not compiled with CUDA enabled"), "torch.version.cuda": None},
        "sees no GPU: Torch not",
        "build of torch for CUDA",
    ),
    "names": (
        {**no_gpu("No CUDA GPUs are available"), "CUDA_VISIBLE_DEVICES": "7"},
        "sees no GPU: No CUDA",
        "CUDA_VISIBLE_DEVICES='7'",
    ),
    "driver": (no_gpu("The NVIDIA driver on your system is too old"), "too old", "newer driver"),
    "nvidia-smi": ({**no_gpu("Error 804"), **UNKNOWN}, "NVIDIA's driver of unknown version is here", "newer driver"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_gpu_machine_lacks(sound, monkeypatch, lack):
    assert wrong() == []
    changes, what, remedy = LACKS[lack]
    change(monkeypatch, changes)
    (found,) = wrong()
    assert what in found.what
    assert remedy in found.remedy
    shown = doctor.text(doctor.look(), Report("cuda"), [found])
    assert shown.endswith(f"1 problem\n  {found.what}\n    to do: {found.remedy}")


def test_hidden_gpus_are_no_problem(sound, monkeypatch):
    change(monkeypatch, {**no_gpu("No CUDA GPUs are available"), "CUDA_VISIBLE_DEVICES": ""})
    assert wrong() == []


@pytest.fixture
def no_compilation(monkeypatch):
    """Nothing is compiled ahead of time, because Triton cannot be used."""
    unusable = doctor.Fact("triton", "cannot be used", "Triton cannot be used: an error")
    monkeypatch.setattr(doctor, "_triton", lambda gpu: unusable)


def test_a_loss_that_cannot_run_is_a_problem(no_compilation, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("Failed to find\n  C compiler")

    for name in ("focal", "giou"):
        monkeypatch.setitem(LOSSES, name, replace(LOSSES[name], function=fails))
    report = doctor.attempts()
    assert [finding.name for finding in report.failures] == ["focal", "giou"]
    (found,) = doctor.failures(report, "report it")
    assert found.what == f"focal, giou on {report.subject}: RuntimeError: Failed to find C compiler"
    assert found.remedy == "report it"


def test_a_fused_loss_that_fails_is_a_problem(no_compilation, monkeypatch):
    monkeypatch.delattr(engine.Chunks, "along")
    PLANS.clear()
    report = doctor.attempts()
    assert [finding.name for finding in report.failures] == [doctor.FUSED]
    (found,) = doctor.failures(report, "")
    assert found.what.startswith(f"{doctor.FUSED} on {report.subject}: AttributeError: ")


def test_a_wrong_result_is_a_problem(no_compilation, monkeypatch):
    right = LOSSES["focal"].function

    def off(x, *args, **kwargs):
        return right(x, *args, **kwargs) * (1.001 if x.dtype == torch.float32 else 1.0)

    monkeypatch.setitem(LOSSES, "focal", replace(LOSSES["focal"], function=off))
    report = doctor.attempts()
    assert [finding.name for finding in report.failures] == ["focal"]
    (found,) = doctor.failures(report, "")
    assert re.match(rf"focal on {report.subject}: value off by \de-0[34], gradient by \de-0[34]$", found.what)


def test_packages_are_named_as_pip_names_them():
    assert [metadata.version(fact.name) for fact in doctor._packages()] == [fact.value for fact in doctor._packages()]


def test_mixed_versions_are_a_problem(monkeypatch):
    monkeypatch.setattr("lossforge.kernels.__version__", "0.0.9")
    (found,) = wrong()
    assert found.what.startswith("the packages have different versions: lossforge-kernels 0.0.9, lossforge ")


def test_a_driver_without_gpus_is_a_problem(monkeypatch, tmp_path):
    """collect_env asks nvidia-smi for the driver. It could also list packages, which takes seconds: conda is not run."""
    answers = {"nvidia-smi": 'echo "| NVIDIA-SMI 580.95  Driver Version: 580.95.05  CUDA Version: 13.0 |"', "conda": "touch conda-was-run"}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f'#!/bin/sh\ncd "{tmp_path}" && {answer}\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    change(monkeypatch, no_gpu("No CUDA GPUs are available"))
    change(monkeypatch, {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CONDA_EXE": str(tmp_path / "conda"), "CUDA_VISIBLE_DEVICES": "99"})
    (found,) = wrong()
    assert found.what.startswith(f"NVIDIA's driver 580.95.05 is here, but torch {torch.__version__} sees no GPU: ")
    assert [fact.value for fact in doctor.look() if fact.name == "driver"] == ["580.95.05"]
    assert not (tmp_path / "conda-was-run").exists()


def test_what_compiles_no_kernel_is_a_problem():
    report = Report("cpu")
    report.add("compiled ahead of time", "for sm_90", None, "Triton could not compile here: ptxas is not found")
    (found,) = doctor.failures(report, "report it")
    assert found.what.endswith("compiles no kernel: Triton could not compile here: ptxas is not found")

"""The doctor on this machine, on machines that lack something, and on those that compute wrongly: each in a process of its own."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lossforge.losses import doctor
from lossforge.losses.check.report import Report
from lossforge.losses.registry import LOSSES

GPU = torch.cuda.is_available()
RUN = "import sys, runpy; sys.argv[1:] = {words!r}; runpy.run_module('lossforge.losses.doctor', run_name='__main__')"
WITHOUT_TRITON = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
sys.modules["triton"] = None
"""
WRONG_FOCAL = """
import torch
from lossforge.losses.formulas import FORMULAS, Formula
import lossforge.losses
right = FORMULAS["focal"]
FORMULAS["focal"] = Formula(lambda x, *rest: right.reference(x, *rest) * (1.001 if x.dtype == torch.float32 else 1.0), right.load)
"""


def consult(*words, before="", **environment):
    """The doctor's status and what it prints, without the interpreter that the tests' own process may have."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    command = [sys.executable, "-c", before + RUN.replace("{words!r}", repr(list(words)))]
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True)
    assert done.stderr == "" or done.returncode == 0, done.stderr[-3000:]
    return done.returncode, done.stdout


def test_on_this_machine():
    status, printed = consult()
    assert status == 0, printed
    assert printed.endswith("Nothing is wrong.\n")
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}, built for", printed, re.MULTILINE)
    assert len(re.findall(r"^  ok ", printed, re.MULTILINE)) == len(doctor.TRIED) + (not GPU)
    assert ("compiled ahead of time" in printed) is not GPU
    assert f"{'cuda' if GPU else 'cpu'} tensors" in printed


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:  gcc version 11.4.0\n",
            "535.183.01",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)  Tue May 5\n", "580.159.04"),
        ("NVRM version: unknown\n", None),
    ],
    ids=["closed", "open", "unknown"],
)
def test_the_drivers_version(text, version):
    assert doctor.driver_in(text) == version


def test_for_machines_without_a_compiler():
    """Without a GPU nothing needs it: a kernel is compiled ahead of time by Triton's own tools."""
    status, printed = consult("--json", PATH="")
    found = json.loads(printed)
    assert found["installed"]["compiler"] is None
    assert [each["passed"] for each in found["checks"]] == [True] * len(found["checks"]) or GPU
    assert status == (1 if GPU else 0)
    missing = ["Triton finds no C compiler that works, and needs one to launch a kernel"]
    assert [each["what"] for each in found["problems"]][:1] == (missing if GPU else [])


def test_without_triton():
    status, printed = consult(before=WITHOUT_TRITON)
    assert re.search(r"^  triton +not installed$", printed, re.MULTILINE)
    assert re.search(r"^  cpu tensors +plain PyTorch, because Triton is not installed$", printed, re.MULTILINE)
    assert "compiled ahead of time" not in printed
    assert len(re.findall(r"^  ok ", printed, re.MULTILINE)) == len(doctor.TRIED)
    assert status == (1 if GPU else 0)


def test_a_fused_loss_that_fails_is_a_problem():
    broken = "from lossforge.losses.linear import engine\ndel engine.Chunks.by_rows\n"
    status, printed = consult("--json", before=broken, CUDA_VISIBLE_DEVICES="")
    found = json.loads(printed)
    assert status == 1
    assert [each["name"] for each in found["checks"] if not each["passed"]] == [doctor.FUSED]
    (problem,) = found["problems"]
    assert problem["what"].startswith(f"{doctor.FUSED} on cpu: AttributeError: ")


def test_an_old_triton_is_a_problem():
    status, printed = consult(before="import triton; triton.__version__ = '3.4.0'\n")
    assert status == 1
    assert "lossforge needs triton>=3.5,<3.10, found triton 3.4.0" in printed
    assert 'to do: pip install "triton>=3.5,<3.10"' in printed


def test_a_wrong_result_and_mixed_versions_are_problems():
    mixed = "import lossforge.kernels\nlossforge.kernels.__version__ = '0.0.9'\n"
    status, printed = consult("--json", before=WRONG_FOCAL + mixed, CUDA_VISIBLE_DEVICES="")
    found = json.loads(printed)
    assert status == 1
    assert [each["name"] for each in found["checks"] if not each["passed"]] == ["focal"]
    versions, focal = found["problems"]
    assert versions["what"].startswith("the packages have different versions: lossforge-kernels 0.0.9, lossforge-losses ")
    assert re.match(r"focal on cpu: value off by \de-0[34], gradient by \de-0[34]$", focal["what"])


@pytest.fixture(scope="module")
def sound():
    """A GPU machine that lacks nothing."""
    return replace(
        doctor.look(),
        cuda="13.0",
        triton="3.6.0",
        triton_problem=None,
        driver="580.95",
        gpus=["NVIDIA H100, sm_90, 79 GiB"],
        old_gpus=[],
        hidden=None,
        no_gpu="",
        compiler="/usr/bin/gcc (gcc 12)",
        headers="/usr/include/python3.11/Python.h",
        cache_writable=True,
        interpreted=False,
        backends={"cuda": "triton", "cpu": "torch"},
    )


LACKS = {
    "compiler": ({"compiler": None}, "no C compiler", "install gcc"),
    "headers": ({"headers": None}, "Python.h is not there", "python3-dev"),
    "cache": ({"cache_writable": False}, "cannot write its cache", "TRITON_CACHE_DIR"),
    "triton": ({"triton": None}, "no Triton", "pip install"),
    "interpreted": ({"interpreted": True}, "TRITON_INTERPRET is set", "unset TRITON_INTERPRET"),
    "old": ({"old_gpus": ["Tesla V100, sm_70, 16 GiB"]}, "Tesla V100", "plain_torch()"),
    "CPU build": (
        {"gpus": [], "cuda": None, "no_gpu": "Torch not compiled with CUDA enabled"},
        "sees no GPU: Torch not",
        "build of torch for CUDA",
    ),
    "names": ({"gpus": [], "hidden": "7", "no_gpu": "No CUDA GPUs are available"}, "sees no GPU: No CUDA", "CUDA_VISIBLE_DEVICES='7'"),
    "driver": ({"gpus": [], "no_gpu": "The NVIDIA driver on your system is too old"}, "too old", "newer driver"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_gpu_machine_lacks(sound, lack):
    assert doctor.problems(sound) == []
    change, what, remedy = LACKS[lack]
    (found,) = doctor.problems(replace(sound, **change))
    assert what in found.what
    assert remedy in found.remedy
    shown = doctor.text(replace(sound, **change), Report("cuda"), [found])
    assert shown.endswith(f"1 problem\n  {found.what}\n    to do: {found.remedy}")


def test_hidden_gpus_are_no_problem(sound):
    assert doctor.problems(replace(sound, gpus=[], hidden="", no_gpu="No CUDA GPUs are available")) == []


def test_a_loss_that_cannot_run_is_a_problem(sound, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("Failed to find\n  C compiler")

    for name in ("focal", "giou"):
        monkeypatch.setitem(LOSSES, name, replace(LOSSES[name], function=fails))
    machine = replace(sound, gpus=[], triton=None, compiler=None)
    report = doctor.attempts(machine)
    assert [finding.name for finding in report.failures] == ["focal", "giou"]
    (found,) = doctor.failures(report, machine)
    assert found.what == "focal, giou on cpu: RuntimeError: Failed to find C compiler"


def test_what_compiles_no_kernel_is_a_problem(sound):
    report = Report("cpu")
    report.add("compiled ahead of time", "for sm_90", None, "Triton could not compile here: ptxas is not found")
    (found,) = doctor.failures(report, replace(sound, gpus=[]))
    assert found.what.endswith("compiles no kernel: Triton could not compile here: ptxas is not found")

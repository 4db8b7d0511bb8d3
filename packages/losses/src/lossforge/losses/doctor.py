"""Say what computes the losses on this machine, whether it is right, and what to do where something is wrong.

`python -m lossforge.losses.doctor` prints what is installed, tries a few losses against float64, and ends with status 1 where it finds a
problem. `--json` prints the same for machines. An issue report begins with what it prints.
"""

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, version

from lossforge import kernels
from lossforge.losses.check.report import Report
from lossforge.losses.functional.linear import linear_cross_entropy
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.state import backend
from lossforge.losses.testing import Sample, error, plain_sample, run
from lossforge.losses.types import Reduction

FUSED = "ce of a linear layer"
TRIED = ("ce", "focal", "dice", "giou", FUSED)
"""One loss of each of four templates, which differ in their kernels, and one that is fused with its linear layer."""
SECTION = "value and gradient against float64"
BOUND = 1e-5
"""How far from float64 a result in float32 may be. Rounding leaves it below 1e-6 on CPUs and 3e-6 on GPUs; a wrong kernel is far off."""
OLDEST_GPU = (8, 0)
"""The oldest compute capability for which the kernels' tests compile them."""


@dataclass(frozen=True)
class Machine:
    """What is installed. None: not found, or not asked because nothing needs it."""

    lossforge: dict[str, str]
    python: str
    system: str
    torch: str
    cuda: str | None
    triton: str | None
    triton_problem: str | None
    driver: str | None
    gpus: list[str]
    old_gpus: list[str]
    hidden: str | None
    no_gpu: str
    compiler: str | None
    headers: str | None
    cache: str
    cache_writable: bool
    interpreted: bool
    backends: dict[str, str]


@dataclass(frozen=True)
class Problem:
    what: str
    remedy: str


def look() -> Machine:
    """Look at what this process and its machine have."""
    gpus, old, why = _gpus()
    triton, triton_problem = _triton()
    devices = ("cuda", "cpu") if gpus else ("cpu",)
    cache = os.environ.get("TRITON_CACHE_DIR") or str(Path(os.environ.get("TRITON_HOME") or "~").expanduser() / ".triton" / "cache")
    return Machine(
        lossforge={name: importlib.import_module(f"lossforge.{name}").__version__ for name in ("kernels", "losses")},
        python=f"{platform.python_version()}, {sys.executable}",
        system=platform.platform(),
        torch=str(version.__version__),
        cuda=version.cuda,
        triton=triton,
        triton_problem=triton_problem,
        driver=_driver(),
        gpus=gpus,
        old_gpus=old,
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
        no_gpu=why,
        compiler=_compiler(),
        headers=_headers(),
        cache=cache,
        cache_writable=_writable(Path(cache)),
        interpreted=kernels.INTERPRETED,
        backends={device: "torch" if triton_problem else backend(torch.empty(0, device=device)) for device in devices},
    )


def _gpus() -> tuple[list[str], list[str], str]:
    """Return the GPUs that torch sees, those among them that are too old, and why it sees none."""
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as reason:
            return [], [], str(reason).strip().splitlines()[0].rstrip(".")
        return [], [], "torch finds no CUDA device"
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]
    return named, [name for name, gpu in zip(named, found, strict=True) if (gpu.major, gpu.minor) < OLDEST_GPU], ""


def _triton() -> tuple[str | None, str | None]:
    """Return Triton's version, and why it cannot be used."""
    if not kernels.TRITON:
        return None, None
    try:
        import triton
    except Exception as found:  # an import of a broken installation may raise anything
        return None, f"import triton failed: {type(found).__name__}: {found}"
    try:
        kernels.load("math")
    except ImportError as found:
        return triton.__version__, str(found)
    return triton.__version__, None


def _driver() -> str | None:
    """Return the version of NVIDIA's driver."""
    try:
        found = driver_in(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found or _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def driver_in(text: str) -> str | None:
    """Return the driver's version from what the kernel says of it."""
    found = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else None


def _compiler() -> str | None:
    """Return the C compiler that Triton would call, CC, else gcc, else clang, if it makes a library."""
    path = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    version = _first_line(path, "--version") if path else None
    return f"{path} ({version})" if path and version and _links(path) else None


def _links(compiler: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "made.c")
        source.write_text("int made(void) { return 0; }\n", encoding="utf-8")
        command = [compiler, str(source), "-shared", "-fPIC", "-o", str(source.with_suffix(".so"))]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _first_line(*command: str) -> str | None:
    """Return the first line that a program prints; None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _headers() -> str | None:
    """Return the path of Python.h, where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    path = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]) / "Python.h"
    return str(path) if path.is_file() else None


def _writable(folder: Path) -> bool:
    """Try to write a file where Triton would make its cache."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


def computed(machine: Machine) -> dict[str, str]:
    """Say which backend computes the losses of tensors on each kind of device, and why."""
    said = {}
    for device, found in machine.backends.items():
        if found == "triton":
            why = "the Triton kernels, for float32, bfloat16 and float16; float64 by plain PyTorch"
        elif found == "triton-interpreted":
            why = "the Triton kernels in Triton's interpreter, which is slow, because TRITON_INTERPRET is set"
        elif machine.triton is None:
            why = "plain PyTorch, because Triton is not installed"
        else:
            why = "plain PyTorch, because the kernels run on GPUs"
        said[f"{device} tensors"] = why
    return said


def problems(machine: Machine) -> list[Problem]:
    """Return what is wrong with what is installed."""
    found = []
    if len(set(machine.lossforge.values())) > 1:
        versions = ", ".join(f"lossforge-{name} {version}" for name, version in machine.lossforge.items())
        newest = machine.lossforge["losses"]
        found.append(Problem(f"the packages have different versions: {versions}", f"pip install lossforge-kernels=={newest}"))
    if machine.triton_problem:
        found.append(Problem(machine.triton_problem, 'pip install "triton>=3.5,<3.10", in the version that your torch asks for'))
    if machine.driver and not machine.gpus and machine.hidden not in ("", "-1"):
        found.append(_no_gpu(machine))
    if machine.old_gpus:
        what = f"{machine.old_gpus[0]} is older than the kernels are made for, sm_{OLDEST_GPU[0]}{OLDEST_GPU[1]}"
        found.append(Problem(what, "call the losses within lossforge.losses.plain_torch(), or take a newer GPU"))
    if not machine.gpus:
        return found
    if machine.triton is None and machine.triton_problem is None:
        found.append(Problem("there is a GPU, but no Triton: plain PyTorch computes every loss", 'pip install "triton>=3.5,<3.10"'))
    elif machine.interpreted:
        found.append(Problem("TRITON_INTERPRET is set: the kernels run on the CPU, slowly", "unset TRITON_INTERPRET"))
    else:
        found += _to_compile(machine)
    return found


def _no_gpu(machine: Machine) -> Problem:
    what = f"NVIDIA's driver {machine.driver} is here, but torch {machine.torch} sees no GPU: {machine.no_gpu}"
    if machine.cuda is None:
        return Problem(what, "install a build of torch for CUDA: https://pytorch.org/get-started/locally")
    if machine.hidden is not None:
        return Problem(what, f"CUDA_VISIBLE_DEVICES={machine.hidden!r} may name GPUs that are not here: unset it")
    return Problem(what, f"see whether nvidia-smi lists a GPU; CUDA {machine.cuda} may need a newer driver, or an older torch")


def _to_compile(machine: Machine) -> list[Problem]:
    """Return what Triton lacks to compile a kernel and its launcher."""
    found = []
    if machine.compiler is None:
        what = "Triton finds no C compiler that works, and needs one to launch a kernel"
        found.append(Problem(what, "install gcc (Debian, Ubuntu: apt-get install gcc libc6-dev), or set CC to a compiler"))
    if machine.headers is None:
        what = "Python.h is not there, and Triton needs Python's headers to launch a kernel"
        found.append(Problem(what, "install them (Debian, Ubuntu: apt-get install python3-dev), or take a Python from uv or conda"))
    if not machine.cache_writable:
        found.append(Problem(f"Triton cannot write its cache, {machine.cache}", "set TRITON_CACHE_DIR to a folder that you may write"))
    return found


def attempts(machine: Machine) -> Report:
    """Compute a few losses and their gradients, and compare them with plain torch in float64; compile a formula where no kernel ran."""
    device = "cuda" if machine.gpus else "cpu"
    report = Report(device)
    with ThreadPoolExecutor(1 if kernels.INTERPRETED else len(TRIED)) as threads:  # what each compiles takes seconds
        for name, (passed, detail) in zip(TRIED, threads.map(lambda name: attempt(name, device), TRIED), strict=True):
            report.add(SECTION, name, passed, detail)
    if machine.triton and not machine.triton_problem and not machine.gpus:
        from lossforge.losses.check.ahead import check_ahead

        check_ahead(LOSSES["focal"], report)
    return report


def attempt(name: str, device: str) -> tuple[bool, str]:
    """Return whether a loss and its gradient are right, and how far they are off or what failed."""
    loss = LOSSES["ce" if name == FUSED else name]
    sample, reduction = plain_sample(loss, device), loss.reductions[0]
    function, reference = _fused(loss, sample) if name == FUSED else (loss.function, loss.reference)
    try:
        ours = run(function, sample, reduction=reduction)
        exact = run(reference, sample, dtype=torch.float64, reduction=reduction)
    except Exception as found:  # a compiler, a driver or a launch may fail in any way, and which is what the user must see
        text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "…", " ".join(str(found).split()))  # the same of all losses
        return False, f"{type(found).__name__}: {text[:300]}"
    assert ours.gradient is not None
    assert exact.gradient is not None
    off, slope_off = error(ours.value, exact.value), error(ours.gradient, exact.gradient)
    return max(off, slope_off) <= BOUND, f"value off by {off:.0e}, gradient by {slope_off:.0e}"


def _fused(loss: Loss, sample: Sample) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return cross entropy fused with a linear layer that takes the sample's x, and the same of logits in plain torch."""
    classes = sample.x.shape[1]
    head = torch.linspace(-1, 1, classes * classes, dtype=torch.float64, device=sample.x.device).view(classes, classes)

    def ours(x: Tensor, target: Tensor, reduction: Reduction) -> Tensor:
        return linear_cross_entropy(x, head.to(x.dtype), target, reduction=reduction)

    return ours, lambda x, target, reduction: loss.reference(F.linear(x, head), target, reduction=reduction)


def failures(report: Report, machine: Machine) -> list[Problem]:
    """Return what the attempts found wrong: one problem for all losses that fail in the same way."""
    losses: dict[str, list[str]] = {}
    found = []
    for finding in report.findings:
        if finding.section == SECTION and not finding.passed:
            losses.setdefault(finding.detail, []).append(finding.name)
        elif not finding.passed:
            found.append(Problem(f"Triton {machine.triton} compiles no kernel: {finding.detail}", "install torch and triton anew"))
    remedy = "report it with this text; until then compute the losses within lossforge.losses.plain_torch()"
    if problems(machine):
        remedy = "mend what is said above first"
    return [Problem(f"{', '.join(names)} on {report.subject}: {detail}", remedy) for detail, names in losses.items()] + found


def rows(machine: Machine) -> dict[str, str]:
    """Return what is installed as lines to print."""
    needed = "not found; a GPU would need it" if not machine.gpus else "not found"
    return {
        **{f"lossforge-{name}": version for name, version in machine.lossforge.items()},
        "python": machine.python,
        "system": machine.system,
        "torch": f"{machine.torch}, {f'built for CUDA {machine.cuda}' if machine.cuda else 'built for CPUs'}",
        "triton": machine.triton or "not installed",
        "driver": machine.driver or "no NVIDIA driver found",
        **({f"GPU {i}": gpu for i, gpu in enumerate(machine.gpus)} or {"GPU": "none"}),
        "C compiler": machine.compiler or needed,
        "Python headers": machine.headers or needed,
        "Triton's cache": f"{machine.cache}{'' if machine.cache_writable else ', which cannot be written'}",
    }


def text(machine: Machine, report: Report, wrong: list[Problem]) -> str:
    lines = ["installed"]
    lines += [f"  {name:<18}{value}" for name, value in rows(machine).items()]
    lines += ["", "computed by", *(f"  {name:<18}{why}" for name, why in computed(machine).items())]
    lines += str(report).splitlines()[1:-2]
    if not wrong:
        return "\n".join([*lines, "", "Nothing is wrong."])
    lines += ["", "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"]
    for problem in wrong:
        lines += [f"  {problem.what}", f"    to do: {problem.remedy}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lossforge.losses.doctor",
        description="Say what computes the losses on this machine and whether it is right; status 1 where something is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    given = parser.parse_args()
    machine = look()
    report = attempts(machine)
    wrong = problems(machine) + failures(report, machine)
    if given.json:
        found = {
            "installed": asdict(machine),
            "computed": computed(machine),
            "checks": [asdict(each) for each in report.findings],
            "problems": [asdict(each) for each in wrong],
        }
        print(json.dumps(found, indent=2))
    else:
        print(text(machine, report, wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

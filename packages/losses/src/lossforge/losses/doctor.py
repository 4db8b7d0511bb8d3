"""Print what computes the losses on this machine, and whether it is right. Exit with status 1 if something is wrong.

`python -m lossforge.losses.doctor` prints what is installed, tries a few losses against float64, and says what to do about each problem.
`--json` prints the same as JSON. Paste the output into an issue report.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, version
from torch.utils import collect_env

from lossforge import kernels, losses
from lossforge.losses.base.option_types import Reduction
from lossforge.losses.check.report import Report
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import error, plain_sample, run

FUSED = "ce of a linear layer"
TRIED = ("ce", "focal", "dice", "giou", FUSED)
"""One loss from each of four templates, because their kernels differ, and one that is fused with its linear layer."""
SECTION = "value and gradient against float64"
BOUND = 1e-5
"""Largest error of a float32 result, relative to float64. Rounding causes below 1e-6 on CPUs and 3e-6 on GPUs; a wrong kernel, far more."""
OLDEST_GPU = (8, 0)
"""Oldest compute capability for which the tests compile the kernels."""
DRIVER = Path("/proc/driver/nvidia/version")
COMPUTED = {
    "triton": "the Triton kernels, for float32, bfloat16 and float16; float64 by plain PyTorch",
    "triton-interpreted": "the Triton kernels in Triton's interpreter, which is slow, because TRITON_INTERPRET is set",
    "torch": "plain PyTorch, because the kernels run on GPUs",
}


@dataclass(frozen=True)
class Fact:
    """Something that is installed or missing. If it is a problem, `what` says what is wrong and `remedy` what to do."""

    name: str
    value: str
    what: str = ""
    remedy: str = ""


def look() -> list[Fact]:
    """Look at the machine, as torch's collect_env sees it, and at what the kernels need."""
    gpus, old_gpus, reason = _gpus()
    return [*_packages(), *_machine(), _triton(bool(gpus)), _driver(reason), *_gpu_facts(gpus, old_gpus), *_build_tools(bool(gpus))]


def _packages() -> Iterator[Fact]:
    ours = losses.__version__
    for name, found in {"lossforge": ours, "lossforge-kernels": kernels.__version__}.items():
        what = f"the packages have different versions: {name} {found}, lossforge {ours}" if found != ours else ""
        yield Fact(name, found, what, f"pip install lossforge-kernels=={ours}")


def _machine() -> Iterator[Fact]:
    """Ask collect_env fact by fact, because its `get_env_info` also lists all packages: with conda this takes seconds."""
    cpu = re.search(r"(?:Model name|Name|brand_string): *(.+)", collect_env.get_cpu_info(collect_env.run))
    yield Fact("python", f"{sys.version.split()[0]}, {sys.executable}")
    yield Fact("system", f"{collect_env.get_os(collect_env.run)}, {collect_env.get_python_platform()}")
    yield Fact("CPU", cpu[1] if cpu else "unknown")
    yield Fact("torch", f"{version.__version__}, {f'built for CUDA {version.cuda}' if version.cuda else 'built for CPUs'}")


def _gpus() -> tuple[list[str], list[str], str]:
    """Return the GPUs that torch sees, those of them that are too old, and why it sees none."""
    try:
        torch.cuda.init()
    except Exception as reason:  # torch built for CPUs, no driver, an old driver, no GPU: each raises another class
        return [], [], str(reason).strip().splitlines()[0].rstrip(".")
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]
    return names, [name for name, gpu in zip(names, found, strict=True) if (gpu.major, gpu.minor) < OLDEST_GPU], ""


def _gpu_facts(gpus: list[str], old: list[str]) -> Iterator[Fact]:
    oldest, remedy = "sm_{}{}".format(*OLDEST_GPU), "call the losses within lossforge.losses.plain_torch(), or take a newer GPU"
    for i, gpu in enumerate(gpus):
        what = f"{gpu} is older than the kernels are made for, {oldest}" if gpu in old and gpu not in gpus[:i] else ""
        yield Fact(f"GPU {i}", gpu, what, remedy)
    if not gpus:
        yield Fact("GPU", "none")


def _driver(no_gpu: str) -> Fact:
    """Find NVIDIA's driver, also if nvidia-smi, which collect_env asks, is missing or does not match the driver."""
    found = collect_env.get_nvidia_driver_version(collect_env.run) or ("of unknown version" if DRIVER.exists() else "")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not found or not no_gpu or hidden in ("", "-1"):
        return Fact("driver", found or "no NVIDIA driver found")
    if version.cuda is None:
        remedy = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
    elif hidden is not None:
        remedy = f"CUDA_VISIBLE_DEVICES={hidden!r} may name GPUs that are not here: unset it"
    else:
        remedy = f"see whether nvidia-smi lists a GPU; CUDA {version.cuda} may need a newer driver, or an older torch"
    return Fact("driver", found, f"NVIDIA's driver {found} is here, but torch {version.__version__} sees no GPU: {no_gpu}", remedy)


def _triton(gpu: bool) -> Fact:
    remedy = 'pip install "triton>=3.5,<3.10", in the version that your torch asks for'
    if not kernels.TRITON:
        return Fact("triton", "not installed", "there is a GPU, but no Triton: plain PyTorch computes every loss" if gpu else "", remedy)
    try:
        kernels.load("math")
    except Exception as found:  # the import of a broken installation may raise any exception
        return Fact("triton", "cannot be used", f"Triton cannot be used: {type(found).__name__}: {found}", remedy)
    what = "TRITON_INTERPRET is set: the kernels run on the CPU, slowly" if gpu and kernels.INTERPRETED else ""
    return Fact("triton", sys.modules["triton"].__version__, what, "unset TRITON_INTERPRET")


def _build_tools(gpu: bool) -> Iterator[Fact]:
    """Look for what Triton needs to compile a kernel and its launcher: a C compiler, Python's headers, and its cache."""
    missing, needed = "not found" if gpu else "not found; a GPU would need it", gpu and kernels.TRITON and not kernels.INTERPRETED
    what = "Triton finds no C compiler that works, and needs one to launch a kernel"
    remedy = "install gcc (Debian, Ubuntu: apt-get install gcc libc6-dev), or set CC to a compiler"
    compiler = _compiler()
    yield Fact("C compiler", compiler or missing, what if needed and not compiler else "", remedy)
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # where Triton looks for them
    what = "Python.h is not there, and Triton needs Python's headers to launch a kernel"
    remedy = "install them (Debian, Ubuntu: apt-get install python3-dev), or take a Python from uv or conda"
    found = headers.is_file()
    yield Fact("Python headers", str(headers) if found else missing, what if needed and not found else "", remedy)
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or "~").expanduser() / ".triton" / "cache")
    writable = os.access(next(path for path in (cache, *cache.parents) if os.access(path, os.F_OK)), os.W_OK | os.X_OK)
    what = f"Triton cannot write its cache, {cache}" if needed and not writable else ""
    value = f"{cache}{'' if writable else ', which cannot be written'}"
    yield Fact("Triton's cache", value, what, "set TRITON_CACHE_DIR to a folder that you may write")


def _compiler() -> str | None:
    """Return the C compiler that Triton would call, which is CC, else gcc, else clang. None if it cannot make a library."""
    path = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
    with tempfile.TemporaryDirectory() as folder:
        status, *_ = collect_env.run(f"echo 'int made;' | {shlex.quote(path)} -x c - -shared -fPIC -o {shlex.quote(folder)}/made.so")
    name = collect_env.run_and_return_first_line(collect_env.run, f"{shlex.quote(path)} --version")
    return f"{path} ({name})" if status == 0 else None


def computed() -> dict[str, str]:
    """Say which backend computes the losses of tensors on each kind of device, and why."""
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    why = COMPUTED if kernels.TRITON else {**COMPUTED, "torch": "plain PyTorch, because Triton is not installed"}
    return {f"{device} tensors": why[losses.backend(torch.empty(0, device=device))] for device in devices}


def attempts() -> Report:
    """Compute a few losses and their gradients, and compare them with plain torch in float64. Compile a formula if no kernel ran."""
    report = Report("cuda" if torch.cuda.is_available() else "cpu")
    with ThreadPoolExecutor(1 if kernels.INTERPRETED else len(TRIED)) as threads:  # because each takes seconds to compile
        for name, (passed, detail) in zip(TRIED, threads.map(lambda name: attempt(name, report.subject), TRIED), strict=True):
            report.add(SECTION, name, passed, detail)
    if kernels.TRITON and not torch.cuda.is_available() and not _triton(gpu=False).what:
        from lossforge.losses.check.ahead import check_ahead

        check_ahead(LOSSES["focal"], report)
    return report


def attempt(name: str, device: str) -> tuple[bool, str]:
    """Return whether a loss and its gradient are right, and their errors or what failed."""
    loss = LOSSES["ce" if name == FUSED else name]
    function = _fused if name == FUSED else loss.function
    sample, reduction = plain_sample(loss, device), loss.reductions[0]
    try:
        ours = run(function, sample, reduction=reduction)
        with losses.plain_torch():
            exact = run(function, sample, dtype=torch.float64, reduction=reduction)
        errors = [error(getattr(ours, part), getattr(exact, part)) for part in ("value", "gradient")]
    except Exception as found:  # a compiler, a driver or a launch may fail in any way, and the user must see how
        text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "…", " ".join(str(found).split()))  # equal for all losses
        return False, f"{type(found).__name__}: {text[:300]}"
    return all(each <= BOUND for each in errors), "value off by {:.0e}, gradient by {:.0e}".format(*errors)


def _fused(x: Tensor, target: Tensor, reduction: Reduction) -> Tensor:
    head = torch.linspace(-1, 1, x.shape[1] ** 2, dtype=x.dtype, device=x.device).view(x.shape[1], -1)
    return losses.linear_cross_entropy(x, head, target, reduction=reduction)


def failures(report: Report, remedy: str) -> Iterator[Fact]:
    """Return what the attempts found wrong: one problem for all losses that fail in the same way."""
    failed = [finding for finding in report.findings if not finding.passed]
    for detail in dict.fromkeys(finding.detail for finding in failed if finding.section == SECTION):
        names = ", ".join(finding.name for finding in failed if finding.detail == detail)
        yield Fact(names, detail, f"{names} on {report.subject}: {detail}", remedy)
    for finding in failed:
        if finding.section != SECTION:
            yield Fact(finding.name, finding.detail, f"Triton compiles no kernel: {finding.detail}", "install torch and triton anew")


def text(facts: list[Fact], report: Report, wrong: list[Fact]) -> str:
    lines = ["installed", *(f"  {fact.name:<18}{fact.value}" for fact in facts)]
    lines += ["", "computed by", *(f"  {name:<18}{why}" for name, why in computed().items()), *str(report).splitlines()[1:-2], ""]
    lines += [f"{len(wrong)} problem{'s' if len(wrong) > 1 else ''}" if wrong else "Nothing is wrong."]
    return "\n".join([*lines, *(f"  {problem.what}\n    to do: {problem.remedy}" for problem in wrong)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lossforge.losses.doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    as_json, facts, report = parser.parse_args().json, look(), attempts()
    wrong = [fact for fact in facts if fact.what]
    remedy = "report it with this text; until then compute the losses within lossforge.losses.plain_torch()"
    wrong += failures(report, "repair what is said above first" if wrong else remedy)
    problems = [{"what": problem.what, "remedy": problem.remedy} for problem in wrong]
    found = {"installed": {fact.name: fact.value for fact in facts}, "computed": computed(), "checks": list(map(asdict, report.findings))}
    print(json.dumps({**found, "problems": problems}, indent=2) if as_json else text(facts, report, wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

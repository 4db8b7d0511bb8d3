"""Renew results/linear-h200.json: losses fused with their linear layer, by every contender, on one GPU.

`python tools/measure_linear.py [FILE [COMMIT]]`; COMMIT where the sources are not a git checkout. What contenders compile is compiled by
many processes at once first. Then one process measures case after case and saves the file after each. Where a contender brings the GPU or
the process down, another process goes on with the next case; a case whose process died is measured again without the other libraries.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from lossforge.bench.cases import CASES, CONTENDERS, FUSED
from lossforge.bench.linear import check
from lossforge.bench.linear.contenders import contenders
from lossforge.bench.linear.inputs import make_inputs
from lossforge.bench.measure import Measurement
from lossforge.bench.report import load
from lossforge.bench.run import current_commit, new_report, run

ROOT = Path(__file__).resolve().parents[1]
FUSED_CASES = [case for case in CASES if case.suite in FUSED]
MILLISECONDS = {"linear": 300.0, "precision": 5.0}
COMPILED = ("quack-scaled", "quack", "liger", "cut-cross-entropy", "torch.compile", "lossforge")
LIBRARIES = ("liger", "cut-cross-entropy", "quack", "quack-scaled")
COMPILE_SECONDS = 90.0
BROKEN = 3
"""Exit status where a contender left the GPU unusable for the process."""


def compile_all(number: int, of: int, device: torch.device) -> None:
    """Call what compiles once, in forward and backward; what fails is said by the measurement."""
    pairs = [(case, name) for name in COMPILED for case in FUSED_CASES if case.suite == "linear" and contenders(case, device, {name})]
    for case, name in pairs[number::of]:
        try:
            inputs = make_inputs(case, device)
            for contender in contenders(case, device, {name}):
                check.step(contender, inputs)
        except Exception as problem:
            print(f"{case.key}, {name}: {type(problem).__name__}", file=sys.stderr)
        inputs = None
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(file: Path, commit: str, first: int, without: bool, device: torch.device) -> int:
    """Measure from the case `first` on. without: that one without the other libraries."""
    began = time.monotonic()
    report = load(file) if file.exists() else new_report(device, commit, {"suite": list(FUSED), "milliseconds": MILLISECONDS})
    before = report.seconds
    for number, case in enumerate(FUSED_CASES[first:], first):
        names = [name for name in CONTENDERS if not (without and number == first and name in LIBRARIES)]

        def progress(done: int, rows: object, number: int = number) -> None:
            report.settings["cases"] = number + 1
            report.seconds = before + time.monotonic() - began
            report.save(file)

        run(report, [case], names, device, Measurement(MILLISECONDS[case.suite]), progress)
        print(f"{time.monotonic() - began:6.1f} s  {case.suite} {case.key}", flush=True)
        if device.type == "cuda" and not usable():
            return BROKEN
    return 0


def usable() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *map(str, words)])


def main(arguments: list[str]) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments[:1] == ["--compile"]:
        compile_all(*map(int, arguments[1:]), device)
        return 0
    if arguments[:1] == ["--measure"]:
        file, commit, first, without = arguments[1:]
        status = measure(Path(file), commit, int(first), without == "True", device)
        os._exit(status)  # without the end of a process whose GPU is unusable
    file = Path(arguments[0]) if arguments else ROOT / "results" / "linear-h200.json"
    commit = arguments[1] if len(arguments) > 1 else current_commit()
    if device.type != "cuda":
        print("error: the bench's report is of a CUDA GPU, and torch sees none", file=sys.stderr)
        return 1
    file.unlink(missing_ok=True)
    processes, began = max(1, (os.cpu_count() or 2) - 2), time.monotonic()
    for process in [start("--compile", number, processes) for number in range(processes)]:
        try:
            process.wait(max(1.0, began + COMPILE_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"{time.monotonic() - began:6.1f} s  compiled", flush=True)
    return measure_all(file, commit)


def measure_all(file: Path, commit: str) -> int:
    """Start processes until every case was measured or given up."""
    first, without = 0, False
    while first < len(FUSED_CASES):
        status = start("--measure", file, commit, first, without).wait()
        if not status:
            return 0
        done = int(load(file).settings.get("cases", 0)) if file.exists() else 0
        if status == BROKEN:
            first, without = done, False
        elif done > first or not without:
            first, without = max(done, first), True
        else:
            first, without = first + 1, False
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

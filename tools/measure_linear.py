"""Renew results/linear-h200.json: losses fused with their linear layer, by every contender, on one GPU.

`python tools/measure_linear.py [FILE [COMMIT]]`; COMMIT where the sources are not a git checkout. What contenders compile is compiled by
many processes at once first. Then one process measures case after case and saves the file after each. Where a contender brings the process
or its use of the GPU down, or stalls, another process goes on from that case without this contender.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from lossforge.bench.cases import CASES, CONTENDERS, FUSED
from lossforge.bench.linear import check, measure_case
from lossforge.bench.linear.contenders import contenders
from lossforge.bench.linear.inputs import make_inputs
from lossforge.bench.measure import Measurement, synchronize
from lossforge.bench.report import Row, load
from lossforge.bench.run import current_commit, new_report

ROOT = Path(__file__).resolve().parents[1]
FUSED_CASES = [case for case in CASES if case.suite in FUSED]
MILLISECONDS = {"linear": 400.0, "precision": 5.0}
COMPILED = ("quack-scaled", "quack", "liger", "cut-cross-entropy", "torch.compile", "lossforge", "lossforge-backward")
COMPILE_SECONDS, STALLED_SECONDS = 75.0, 60.0
BROKEN = 3
"""Exit status of a process for which a contender left the GPU unusable."""


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


def measure(file: Path, commit: str, left_out: list[str], device: torch.device) -> None:
    """Measure from the first case on that the file does not have."""
    began = time.monotonic()
    report = load(file) if file.exists() else new_report(device, commit, {"suite": list(FUSED), "milliseconds": MILLISECONDS})
    report.settings["left_out"] = left_out
    before, first = report.seconds, len({(row.suite, row.case) for row in report.rows})
    names = [name for name in CONTENDERS if name not in left_out]

    def begin(name: str) -> None:
        if not usable(device):
            os._exit(BROKEN)
        now(file).write_text(name, encoding="utf-8")

    for case in FUSED_CASES[first:]:
        try:
            report.rows += measure_case(case, names, device, report, Measurement(MILLISECONDS[case.suite]), begin)
        except Exception as error:  # of the inputs or the reference
            row = Row(case.suite, case.loss, case.variant, case.use, list(case.shape), case.dtype, "lossforge")
            row.fail(error)
            report.rows.append(row)
        if not usable(device):
            os._exit(BROKEN)
        report.seconds = before + time.monotonic() - began
        report.save(file)
        print(f"{report.seconds:6.1f} s  {case.suite} {case.key}", flush=True)


def now(file: Path) -> Path:
    """Holds the name of the contender that is being measured."""
    return file.with_name(f"{file.name}.now")


def usable(device: torch.device) -> bool:
    try:
        synchronize(device)
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
        file, commit, *left_out = arguments[1:]
        measure(Path(file), commit, left_out, device)
        return 0
    file = Path(arguments[0]) if arguments else ROOT / "results" / "linear-h200.json"
    commit = arguments[1] if len(arguments) > 1 else current_commit()
    if device.type != "cuda":
        print("error: the bench's report is of a CUDA GPU, and torch sees none", file=sys.stderr)
        return 1
    file.parent.mkdir(parents=True, exist_ok=True)
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
    """Start processes until every case was measured, or one fails before it calls a contender."""
    left_out: list[str] = []
    while True:
        now(file).unlink(missing_ok=True)
        if not watched(start("--measure", file, commit, *left_out), file):
            now(file).unlink(missing_ok=True)
            return 0
        if not now(file).exists():
            return 1
        left_out.append(now(file).read_text(encoding="utf-8"))
        print(f"without {left_out[-1]} from here on", flush=True)


def watched(process: subprocess.Popen[bytes], file: Path) -> int:
    """Wait for a process, and end it when it measures one contender for too long."""
    while True:
        try:
            return process.wait(5.0)
        except subprocess.TimeoutExpired:
            if now(file).exists() and time.time() - now(file).stat().st_mtime > STALLED_SECONDS:
                process.kill()
                return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

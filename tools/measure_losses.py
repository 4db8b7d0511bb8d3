"""Renew results/bench-h200.json: every case of the bench but the scaling ones, by every contender, on all GPUs of this machine.

`python tools/measure_losses.py [FILE [COMMIT]]`; COMMIT where the sources are not a git checkout. What contenders compile is compiled by
many processes at once first. Then one process a GPU measures its share of the cases, each case with all its contenders on one GPU; at
last the first GPU alone the small cases, whose time is the host's.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lossforge.bench import check
from lossforge.bench.cases import CASES, CONTENDERS, Case
from lossforge.bench.contenders import contenders
from lossforge.bench.inputs import make_inputs
from lossforge.bench.measure import Measurement
from lossforge.bench.report import load
from lossforge.bench.run import current_commit, new_report, run

ROOT = Path(__file__).resolve().parents[1]
LARGE, SMALL = ("table", "losses", "variants"), ("small",)
MILLISECONDS = 30.0


def share(suites: Sequence[str], number: int = 0, of: int = 1) -> list[Case]:
    return [case for case in CASES if case.suite in suites][number::of]


def compile_all(number: int, of: int) -> None:
    """Call every contender once, in forward and backward; what fails is said by the measurement."""
    device = torch.device("cuda", 0)
    for case in share((*LARGE, *SMALL), number, of):
        inputs = make_inputs(case, device)
        for contender in contenders(case, device, set(CONTENDERS)):
            if contender.installed:
                try:
                    check.step(contender, case, check.fresh(contender, inputs), inputs.others, check.upstream_of(case, inputs))
                except Exception as problem:
                    print(f"{case.key}, {contender.name}: {type(problem).__name__}", file=sys.stderr)
            inputs.x.grad = None
        del inputs
        torch.cuda.empty_cache()


def measure(suites: Sequence[str], number: int, of: int, file: Path, commit: str) -> None:
    device, began = torch.device("cuda", 0), time.monotonic()
    settings = {"suite": [*LARGE, *SMALL], "milliseconds": MILLISECONDS, "gpus": of}
    report = new_report(device, commit, settings)

    def progress(done: int, rows: object) -> None:
        report.seconds = time.monotonic() - began
        report.save(file)

    run(report, share(suites, number, of), list(CONTENDERS), device, Measurement(MILLISECONDS), progress)


def start(gpu: int, *words: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen([sys.executable, __file__, *map(str, words)], env=environment)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--compile"]:
        compile_all(*map(int, arguments[1:]))
        return 0
    if arguments[:1] == ["--measure"]:
        suites, number, of, file, commit = arguments[1:]
        measure(suites.split(","), int(number), int(of), Path(file), commit)
        return 0
    file = Path(arguments[0]) if arguments else ROOT / "results" / "bench-h200.json"
    commit = arguments[1] if len(arguments) > 1 else current_commit()
    gpus = torch.cuda.device_count()
    if not gpus:
        print("error: the bench's report is of a CUDA GPU, and torch sees none", file=sys.stderr)
        return 1
    processes = max(1, (os.cpu_count() or 2) - 2)
    for process in [start(number % gpus, "--compile", number, processes) for number in range(processes)]:
        process.wait()
    parts = [file.with_name(f"{file.stem}-{number}.json") for number in range(gpus + 1)]
    *large, small = parts
    running = [start(gpu, "--measure", ",".join(LARGE), gpu, gpus, part, commit) for gpu, part in enumerate(large)]
    found = [process.wait() for process in running]
    found.append(start(0, "--measure", ",".join(SMALL), 0, 1, small, commit).wait())
    reports = [load(part) for part in parts]
    report, places = reports[0], {(case.suite, case.key): place for place, case in enumerate(share((*LARGE, *SMALL)))}
    report.copy_bytes_per_second = statistics.mean(r.copy_bytes_per_second or 0.0 for r in reports)
    report.read_bytes_per_second = statistics.mean(r.read_bytes_per_second or 0.0 for r in reports)
    report.rows = sorted((row for r in reports for row in r.rows), key=lambda row: places[row.suite, row.label])
    report.seconds = max(r.seconds for r in reports[:-1]) + reports[-1].seconds
    report.save(file)
    for part in parts:
        part.unlink(missing_ok=True)
    return max(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

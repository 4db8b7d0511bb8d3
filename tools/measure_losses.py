"""Renew results/bench-h200.json: every case of the bench but the scaling ones, by every contender, on all GPUs of this machine.

`python tools/measure_losses.py [FILE [COMMIT]]`; COMMIT where the sources are not a git checkout. What contenders compile is compiled by
many processes at once first. Then one process a GPU measures its share of the cases, each case with all its contenders on one GPU.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from lossforge.bench import check
from lossforge.bench.cases import CASES, CONTENDERS, Case
from lossforge.bench.contenders import contenders
from lossforge.bench.inputs import make_inputs
from lossforge.bench.report import load
from lossforge.bench.run import Measurement, current_commit, new_report, run

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("table", "losses", "variants", "small")
MILLISECONDS = 30.0


def share(number: int, of: int) -> list[Case]:
    return [case for case in CASES if case.suite in SUITES][number::of]


def compile_all(number: int, of: int) -> None:
    """Call every contender once, in forward and backward; what fails is said by the measurement."""
    device = torch.device("cuda", 0)
    for case in share(number, of):
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


def measure(number: int, of: int, file: Path, commit: str) -> None:
    device, began = torch.device("cuda", 0), time.monotonic()
    settings = {"suite": list(SUITES), "milliseconds": MILLISECONDS, "gpus": of}
    report = new_report(device, commit, settings)

    def progress(done: int, rows: object) -> None:
        report.seconds = time.monotonic() - began
        report.save(file)

    run(report, share(number, of), list(CONTENDERS), device, Measurement(MILLISECONDS), progress)


def start(gpu: int, *words: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen([sys.executable, __file__, *map(str, words)], env=environment)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--compile"]:
        compile_all(*map(int, arguments[1:]))
        return 0
    if arguments[:1] == ["--measure"]:
        number, of, file, commit = arguments[1:]
        measure(int(number), int(of), Path(file), commit)
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
    parts = [file.with_name(f"{file.stem}-{gpu}.json") for gpu in range(gpus)]
    found = [process.wait() for process in [start(gpu, "--measure", gpu, gpus, part, commit) for gpu, part in enumerate(parts)]]
    reports = [load(part) for part in parts]
    report, places = reports[0], {(case.suite, case.key): place for place, case in enumerate(share(0, 1))}
    report.copy_bytes_per_second = statistics.mean(r.copy_bytes_per_second or 0.0 for r in reports)
    report.read_bytes_per_second = statistics.mean(r.read_bytes_per_second or 0.0 for r in reports)
    report.rows = sorted((row for r in reports for row in r.rows), key=lambda row: places[row.suite, row.label])
    report.seconds = max(r.seconds for r in reports)
    report.save(file)
    for part in parts:
        part.unlink(missing_ok=True)
    return max(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

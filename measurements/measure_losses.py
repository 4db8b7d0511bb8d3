"""Measure the cases of the bench by every contender.

`losses`: all cases but the scaling and the fused ones. Each GPU of the machine measures a share of them; then the first GPU alone measures
the small ones, whose time is the host's. `linear`: losses fused with their linear layer, on one GPU. `objectives`: cross entropy by how
its logits are kept, and objectives of language models, each beside its peers and its products alone, on one GPU in some minutes.
`drafts`: losses of draft models, top-K distillation and multi-token prediction from hidden states, beside torch.compile and the
products alone, on one GPU in four minutes.
`first_page`: the cases of the README's table that are the bench's, in one run on one GPU.

First many processes compile what the contenders compile. Then one process a GPU measures case after case and saves its file after each.
Where a contender of a fused loss breaks the process or its use of the GPU, or stalls, another process goes on from that case without it,
and its rows say so. Last, it prints which targets of the records are met.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compared import FIRST_PAGE
from measuring import Request

from lossforge.bench import check, contenders, inputs
from lossforge.bench.cases import CASES, CONTENDERS, FUSED, Case
from lossforge.bench.measure import Measurement, synchronize
from lossforge.bench.report import Row, load, tables
from lossforge.bench.report import linear as fused_tables
from lossforge.bench.run import measure_case, new_report

LARGE, SMALL = ("table", "losses", "variants"), ("small",)
LAYERS, OBJECTIVES, DRAFTS = ("linear", "features"), ("exact", "objectives"), ("drafts",)
MILLISECONDS, FUSED_MILLISECONDS = 30.0, {"linear": 400.0, "features": 400.0, "exact": 200.0, "objectives": 200.0, "drafts": 200.0}
COMPILE_SECONDS, FUSED_COMPILE_SECONDS, STALLED_SECONDS = 900.0, 75.0, 300.0
AT_ONCE = {"drafts": 5}
"""How many processes compile the cases of a suite: as many as one GPU has memory for. By default one a core."""
NAMES = {"drafts": ("lossforge", "lossforge-lean", "products", "torch.compile")}
"""The contenders of a suite. By default all."""
BROKEN = 3
"""Exit status of a process for which a contender left the GPU unusable."""


class Share(NamedTuple):
    """What one GPU measures: of the cases of these suites (and losses, and keys) number `number`, and every `of`-th after it."""

    file: Path
    commit: str
    suites: tuple[str, ...]
    losses: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    number: int = 0
    of: int = 1

    def cases(self) -> list[Case]:
        return chosen(self.suites, self.losses, self.keys)[self.number :: self.of]

    def now(self) -> Path:
        """Return the file with the name of the contender that is being measured."""
        return self.file.with_name(f"{self.file.name}.now")


def chosen(suites: tuple[str, ...], losses: tuple[str, ...], keys: tuple[str, ...] = ()) -> list[Case]:
    """Return the cases of these suites, losses and keys; of all where none is named."""
    of_losses = [case for case in CASES if case.suite in suites and (not losses or case.loss in losses)]
    return [case for case in of_losses if not keys or f"{case.suite} {case.key}" in keys]


def losses(request: Request) -> int:
    if not known(request, LARGE + SMALL):
        return 2
    gpus = torch.cuda.device_count()
    compile_all(LARGE + SMALL, COMPILE_SECONDS, request.losses)
    with tempfile.TemporaryDirectory() as place:
        large = [Share(Path(place, f"{gpu}.json"), request.commit, LARGE, request.losses, (), gpu, gpus) for gpu in range(gpus)]
        return measure_all(request, [large, [Share(Path(place, "small.json"), request.commit, SMALL, request.losses)]])


def linear(request: Request) -> int:
    return measure_fused(request, LAYERS)


def objectives(request: Request) -> int:
    return measure_fused(request, OBJECTIVES)


def drafts(request: Request) -> int:
    return measure_fused(request, DRAFTS)


def first_page(request: Request) -> int:
    keys = tuple([shown.key for shown in FIRST_PAGE if shown.file == request.out.stem])
    compile_all(LAYERS + LARGE + SMALL, FUSED_COMPILE_SECONDS, keys=keys)
    with tempfile.TemporaryDirectory() as place:
        shares = [Share(Path(place, f"{suites[0]}.json"), request.commit, suites, (), keys) for suites in (LAYERS, LARGE, SMALL)]
        return measure_all(request, [[share] for share in shares])


def measure_fused(request: Request, suites: tuple[str, ...]) -> int:
    if not known(request, suites):
        return 2
    compile_all(suites, FUSED_COMPILE_SECONDS, request.losses)
    with tempfile.TemporaryDirectory() as place:
        return measure_all(request, [[Share(Path(place, "0.json"), request.commit, suites, request.losses)]])


def known(request: Request, suites: tuple[str, ...]) -> bool:
    """Return whether each loss that was asked for has a case; print an error for one without."""
    unknown = [name for name in request.losses if not chosen(suites, (name,))]
    if unknown:
        print(f"error: --losses {unknown[0]}: no case of this name", file=sys.stderr)
    return not unknown


def start(work: Any, *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    return process


def compile_all(suites: tuple[str, ...], seconds: float, losses: tuple[str, ...] = (), keys: tuple[str, ...] = ()) -> None:
    """Compile in many processes, and end those that take longer."""
    cores, began = max(1, (os.cpu_count() or 2) - 2), time.monotonic()
    given, count = chosen(suites, losses, keys), min([cores, *(AT_ONCE.get(suite, cores) for suite in suites)])
    for process in [start(compile_part, given, number, count, number % torch.cuda.device_count()) for number in range(count)]:
        process.join(max(1.0, began + seconds - time.monotonic()))
        process.kill()
        process.join()
    print(f"{time.monotonic() - began:6.1f} s  compiled", flush=True)


def names_of(case: Case) -> Sequence[str]:
    """Return the contenders that are measured on a case."""
    return NAMES.get(case.suite, list(CONTENDERS))


def compile_part(cases: Sequence[Case], number: int, of: int, gpu: int) -> None:
    """Call contenders once, forward and backward. The measurement reports what fails."""
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    work = [(case, name) for name in reversed(CONTENDERS) for case in cases if name in names_of(case)]
    for case, name in work[number::of]:
        try:
            call_once(case, name, device)
        except Exception as problem:
            print(f"{case.key}, {name}: {type(problem).__name__}", file=sys.stderr)
        torch.cuda.empty_cache()


def call_once(case: Case, name: str, device: torch.device) -> None:
    for contender in contenders.contenders(case, device, {name}):
        if not contender.refuses:
            given = inputs.make_inputs(case, device)
            check.step(contender, case, check.fresh(contender, given), check.upstream_of(case, given))


def measure_all(request: Request, phases: list[list[Share]]) -> int:
    """Measure phase after phase, the shares of a phase at once on a GPU each, and join their reports."""
    began, status, reports = time.monotonic(), 0, []
    for shares in phases:
        with ThreadPoolExecutor() as pool:
            status = max(status, *pool.map(measure_share, shares))
        reports += [load(share.file) for share in shares if share.file.exists()]
    if not reports:
        return 1
    report, places = reports[0], {(case.suite, case.key): place for place, case in enumerate(CASES)}
    report.seconds = time.monotonic() - began
    report.copy_bytes_per_second = statistics.mean(r.copy_bytes_per_second or 0.0 for r in reports)
    report.read_bytes_per_second = statistics.mean(r.read_bytes_per_second or 0.0 for r in reports)
    report.rows = sorted((row for r in reports for row in r.rows), key=lambda row: places[row.suite, row.label])
    report.save(request.out)
    print(fused_tables.targets(report) if phases[0][0].suites[0] in FUSED else tables.targets(report))
    return status


def measure_share(share: Share) -> int:
    """Start processes until every case of a share was measured, or one fails before it calls a contender."""
    left_out: list[str] = []
    while True:
        share.now().unlink(missing_ok=True)
        status = wait(start(measure, share, left_out, f"cuda:{share.number}"), share.now())
        if not status or not share.now().exists():
            share.now().unlink(missing_ok=True)
            return int(bool(status))
        left_out.append(share.now().read_text(encoding="utf-8"))
        print(f"without {left_out[-1]} from here on", flush=True)


def wait(process: BaseProcess, now: Path) -> int | None:
    """Wait for a process, and end it when it measures one contender for too long."""
    while process.exitcode is None:
        process.join(5.0)
        if now.exists() and time.time() - now.stat().st_mtime > STALLED_SECONDS:
            process.kill()
            process.join()
    return process.exitcode


def measure(share: Share, left_out: list[str], where: str) -> None:
    """Measure from the first case on that the file does not have."""
    device, began, fused = torch.device(where), time.monotonic(), share.suites[0] in FUSED
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settings = {"suite": share.suites, "milliseconds": FUSED_MILLISECONDS if fused else MILLISECONDS, "gpus": share.of}
    report = load(share.file) if share.file.exists() else new_report(device, share.commit, settings)
    before, first = report.seconds, len({(row.suite, row.case) for row in report.rows})

    def begin(name: str) -> None:
        if fused:
            end_if_broken(device)
            share.now().write_text(name, encoding="utf-8")

    for case in share.cases()[first:]:
        how = Measurement(FUSED_MILLISECONDS.get(case.suite, MILLISECONDS))
        try:
            report.rows += measure_case(case, names_of(case), device, report, how, begin, left_out)
        except Exception as error:  # of the inputs or the reference
            row = Row.of(case, "lossforge")
            row.fail(error)
            report.rows.append(row)
        end_if_broken(device)
        report.seconds = before + time.monotonic() - began
        report.save(share.file)
        print(f"{report.seconds:6.1f} s  {case.suite} {case.key}", flush=True)


def end_if_broken(device: torch.device) -> None:
    """End this process where a contender left the GPU unusable."""
    try:
        synchronize(device)
    except RuntimeError:
        os._exit(BROKEN)

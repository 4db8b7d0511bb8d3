"""Profile mode of the bench: traces in the run folder, kernels on the terminal."""

from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from lab.base.files import write_whole
from lab.run.folder import RunFolder
from lab.training.console import Console
from lossforge.bench.cases import Case
from lossforge.bench.contenders import Contender, contenders
from lossforge.bench.profiling import Kernel, profile_call


def profile(cases: list[Case], names: list[str], device: torch.device, seed: int, folder: RunFolder, console: Console) -> None:
    """Profile our contenders only; write one trace for each case and contender, for chrome://tracing or Perfetto."""
    ours = {name for name in names if name.startswith("lossforge")}
    for done, case in enumerate(cases, start=1):
        for contender in contenders(case, device, ours):
            trace = folder.path / f"{case.key.replace(' ', '_')}-{contender.name}.json"
            found = write_whole(trace, partial(_trace, contender, case, device, seed))
            folder.artifact(trace, "traces")
            label = f"{case.key}/{contender.name}"
            folder.metrics(0, {f"{label}/{k.name[:80]}/us": k.microseconds for k in found if k.name.isidentifier()})
            console.show(kernel_table(label, found))
        console.finished(done, f"{case.key}: profiled")
        torch.cuda.empty_cache()


def _trace(contender: Contender, case: Case, device: torch.device, seed: int, file: IO[bytes]) -> list[Kernel]:
    return profile_call(contender, case, device, seed, Path(file.name))


def kernel_table(title: str, kernels: list[Kernel]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("kernel", max_width=60)
    for name in ("µs", "launches", "grid", "block", "registers", "shared B", "spills"):
        table.add_column(name, justify="right")
    for k in kernels:
        spilled = "" if k.spills is None else str(k.spills)
        figures = (f"{k.microseconds:.1f}", f"{k.launches:g}", k.grid, k.block, str(k.registers), str(k.shared_bytes), spilled)
        table.add_row(k.name[:60], *figures)
    return table

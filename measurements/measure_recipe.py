"""Run the recipe of docs/use_with/from_liger.md with the model's own loss and with ours: the time of a step, peak memory and losses.

A model of the shape of Qwen2.5-7B with LoRA, FSDP2 and checkpointing, 8,192 tokens, one process on one GPU, random weights of bfloat16.
The script is the page's own, each time in a process of its own. It needs transformers and peft. A run takes about half a minute.
--small: the page's small model, on the CPU.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import ROOT, Request, largest_difference

PAGE = ROOT / "docs" / "use_with" / "from_liger.md"
SCRIPT = re.compile(r"```python\n(# seven_b\.py\n.*?)```", re.DOTALL)
RUNS = {"transformers": ("--own",), "lossforge": ()}
AGREE = 1e-3
"""The largest relative difference of a step's loss: bfloat16 rounds the logits of the model's own."""


def recipe(request: Request) -> int:
    (script,) = SCRIPT.findall(PAGE.read_text(encoding="utf-8"))
    sizes = ("--small",) if request.small else ()
    runs = [{"contender": name} | run(script, *words, *sizes) for name, words in RUNS.items()]
    apart = largest_difference(runs[1]["losses"], runs[0]["losses"])
    if apart > AGREE:
        print(f"error: a step's loss is off by {apart:.1e} of the model's own, more than {AGREE:.0e}", file=sys.stderr)
        return 1
    versions = {name: version(name) for name in ("transformers", "peft")}
    request.save({**request.source("triton"), **versions, "case": "tiny" if request.small else "Qwen2.5-7B", "runs": runs})
    return 0


def run(script: str, *words: str) -> dict[str, Any]:
    """Run the script in one process; return its losses, and of its steps after the first the milliseconds and their range."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "seven_b.py")
        file.write_text(script, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(file), *words]
        done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    steps = re.findall(r"loss ([\d.]+), ([\d.]+) ms", done.stdout)
    ms = [float(each) for _, each in steps[1:]]
    peak = re.search(r"peak ([\d,]+) MiB", done.stdout)
    return {
        "step_ms": statistics.median(ms),
        "step_ms_range": [min(ms), max(ms)],
        "peak_mib": None if peak is None else float(peak[1].replace(",", "")),
        "losses": [float(loss) for loss, _ in steps],
    }

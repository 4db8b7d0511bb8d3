"""Start a script of this folder in one or several processes, as torchrun does."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}


def run(script: str, *arguments: str, processes: int = 1, folder: Path) -> str:
    """Run the script in a folder, without Triton's interpreter, and return what it printed. A failure fails the test, with its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    dropped = ("PYTEST", "TRITON_INTERPRET")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)} | {"OMP_NUM_THREADS": "1", **QUIET}
    path = Path(__file__).with_name(script)
    done = subprocess.run([*command, __file__, path, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-6000:]}"
    return done.stdout


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    # a model or a mesh may still hold the process group: a thread of gloo's that lets go of a tensor while Python ends aborts the process
    sys.stdout.flush()
    os._exit(0)

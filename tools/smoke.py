"""Try the installed lossforge: the Python examples of Markdown files, and the value and gradient of every loss. It imports nothing
of this repository, so that it runs in a clean environment with the wheels and torch.

usage: python smoke.py FILE.md ...
"""

import re
import sys
import time
from importlib.metadata import version
from pathlib import Path


def examples(path: Path) -> list[str]:
    """Return the blocks of Python in a Markdown file, without those that quote a file: their first line is a comment that names it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if not re.match(r"# \S+\.\w+\n", block)]


def run_examples(path: Path) -> int:
    """Run a file's examples in their order in one namespace, as someone would paste them."""
    names: dict[str, object] = {"__name__": "__main__"}
    found = examples(path)
    for number, block in enumerate(found, 1):
        exec(compile(block, f"{path.name}, example {number}", "exec"), names)
    return len(found)


def try_losses() -> int:
    """Compare the value and the gradient of each loss with those in float64."""
    import torch

    from lossforge.losses.registry import LOSSES
    from lossforge.losses.testing import error, plain_sample, run

    for loss in LOSSES.values():
        sample, reduction = plain_sample(loss), loss.reductions[0]
        ours = run(loss.function, sample, reduction=reduction)
        exact = run(loss.reference, sample, dtype=torch.float64, reduction=reduction)
        assert ours.gradient is not None
        assert exact.gradient is not None
        off = max(error(ours.value, exact.value), error(ours.gradient, exact.gradient))
        assert off < 3e-6, f"{loss.name} is off by {off:.1e}"
    return len(LOSSES)


def main() -> None:
    began = time.monotonic()
    import torch

    from lossforge import kernels, losses

    for package in (kernels, losses):
        name = "lossforge" if package is losses else "lossforge-kernels"
        assert package.__version__ == version(name), f"{name} says {package.__version__}, its wheel {version(name)}"
        assert "site-packages" in str(package.__file__), f"{package.__file__} is not what was installed"
    ran = {f"{path.parent.name}/{path.name}": run_examples(path) for path in map(Path, sys.argv[1:])}
    tried = try_losses()
    said = ", ".join([f"{tried} losses", *(f"{count} examples of {name}" for name, count in ran.items() if count)])
    print(f"torch {torch.__version__}, lossforge {losses.__version__}: {said} ran in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()

"""Write the PTX of every kernel variant that is compiled ahead of time, to compare it before and after a change of the kernels' sources.

usage: compare_ptx.py TREE FOLDER [KERNEL …]    compile the variants of a checkout, or of these kernels alone, into a file each
       diff -rq BEFORE AFTER                    which variants differ; without -q, by which instructions

A file has the variant's options, its registers, stack and shared memory, and its instructions, or why the compiler refuses it.
LOSSFORGE_COMPILE_ALL=1 takes all variants, as in test_ahead_of_time.py; without it, a choice that takes some minutes. No GPU is needed.
"""

import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGES = ("kernels", "losses", "bench")
WORK: list[Any] = []


def instructions(ptx: str, kernel: str) -> list[str]:
    """Return the kernel's instructions, without what depends on names and lines. Parameters are numbered in the order of their use."""
    numbers: dict[str, int] = {}

    def renamed(found: re.Match[str]) -> str:
        return f"param_{numbers.setdefault(found[0], len(numbers))}"

    body = ptx[ptx.index("\n{", ptx.index(f".entry {kernel}")) :]
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", ".section"))]
    return [re.sub(rf"{kernel}_param_\d+", renamed, line) for line in kept]


def compiled(number: int) -> tuple[str, str]:
    """Return a variant's name, and the text of its file."""
    import compile_ahead
    import triton

    case, variant = WORK[number]
    name = variant.kernel.__name__
    try:
        kernel = triton.compile(variant.source(), target=compile_ahead.HOPPER, options=variant.options)
    except Exception as error:
        lines = ["refused", str(error)[-500:]]
    else:
        lines = [str(compile_ahead.resources(kernel.asm["cubin"])), *instructions(kernel.asm["ptx"], name)]
    return f"{name} {case}", "\n".join([str(variant.options), *lines, ""])


def dump(tree: Path, folder: Path, kernels: list[str]) -> None:
    """Compile in another process, which imports the tree's packages and no others."""
    if os.environ.get("COMPARE_PTX_TREE") != str(tree):
        paths = [str(tree / "packages" / name / "src") for name in PACKAGES] + [str(tree / "packages/kernels/tests")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COMPARE_PTX_TREE": str(tree), "TRITON_DISABLE_LINE_INFO": "1"}
        environment.pop("TRITON_INTERPRET", None)
        subprocess.run([sys.executable, __file__, tree, folder, *kernels], env=environment, check=True)
        return
    import compile_ahead

    WORK.extend(v for v in compile_ahead.chosen(compile_ahead.record().variants) if not kernels or v[1].kernel.__name__ in kernels)
    folder.mkdir(parents=True)  # not one with files of another tree
    names: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(min(8, os.cpu_count() or 1)) as pool:
        for name, text in pool.imap(compiled, range(len(WORK)), chunksize=2):
            file = re.sub(r"[^\w.=\[\]-]+", "_", name)[:200]
            names[file] += 1  # one call may launch several variants of a kernel
            (folder / f"{file}-{names[file]}.ptx").write_text(text)
    print(f"{len(WORK)} variants: {folder}")


if __name__ == "__main__":
    tree, folder, *kernels = sys.argv[1:]
    dump(Path(tree).resolve(), Path(folder).resolve(), kernels)

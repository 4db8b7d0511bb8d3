"""Compare the PTX of every kernel variant that is compiled ahead of time, before and after a change of the kernels' sources.

usage: compare_ptx.py dump TREE FILE [KERNEL …]    compile the variants of a checkout (of these kernels alone), and keep what they became
       compare_ptx.py diff BEFORE AFTER            say which variants differ, and by which instructions; fails where any does

LOSSFORGE_COMPILE_ALL=1 takes all variants, as in test_ahead_of_time.py, where it else takes some minutes' worth. No GPU is needed.
"""

import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGES = ("kernels", "losses", "bench")


def instructions(ptx: str, kernel: str) -> list[str]:
    """The kernel's instructions, without what depends on names and line numbers; parameters are numbered in the order of their use."""
    numbers: dict[str, int] = {}

    def renamed(found: re.Match[str]) -> str:
        return f"param_{numbers.setdefault(found[0], len(numbers))}"

    body = ptx[ptx.index("\n{", ptx.index(f".entry {kernel}")) :]
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", ".section"))]
    return [re.sub(rf"{kernel}_param_\d+", renamed, line) for line in kept]


def compiled(number: int) -> dict[str, Any]:
    import compile_ahead
    import triton

    case, variant = WORK[number]
    name = variant.kernel.__name__
    found: dict[str, Any] = {"variant": f"{name} {case}", "options": str(variant.options)}
    try:
        kernel = triton.compile(variant.source(), target=compile_ahead.HOPPER, options=variant.options)
    except Exception as error:  # what the compiler refuses differs from all that it compiles
        return {**found, "error": str(error)[-500:]}
    lines = instructions(kernel.asm["ptx"], name)
    counts = Counter(re.sub(r"^@!?%p\d+ ", "", line).split()[0] for line in lines if line[0] not in ".$({)}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {**found, "digest": digest, "instructions": counts, **compile_ahead.resources(kernel.asm["cubin"])}


WORK: list[Any] = []


def dump(tree: Path, file: Path, kernels: list[str]) -> None:
    """Compile in a process of its own, which imports the tree's packages and no others."""
    if os.environ.get("COMPARE_PTX_TREE") != str(tree):
        paths = [str(tree / "packages" / name / "src") for name in PACKAGES] + [str(tree / "packages/kernels/tests")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COMPARE_PTX_TREE": str(tree), "TRITON_DISABLE_LINE_INFO": "1"}
        environment.pop("TRITON_INTERPRET", None)
        subprocess.run([sys.executable, __file__, "dump", tree, file, *kernels], env=environment, check=True)
        return
    import compile_ahead

    WORK.extend(v for v in compile_ahead.chosen(compile_ahead.record().variants) if not kernels or v[1].kernel.__name__ in kernels)
    with multiprocessing.get_context("fork").Pool(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(compiled, range(len(WORK)), chunksize=2)
    file.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} variants, {sum('error' in v for v in found)} refused: {file}")


def by_variant(file: Path) -> dict[str, dict[str, Any]]:
    """The variants by name; those of one call by one kernel are numbered."""
    names: Counter[str] = Counter()
    found = {}
    for variant in json.loads(file.read_text()):
        name = variant["variant"]
        found[f"{name} #{names[name]}"] = variant
        names[name] += 1
    return found


def diff(before: Path, after: Path) -> int:
    old, new = by_variant(before), by_variant(after)
    same, moved, differ = 0, 0, 0
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            print(f"only {'after' if a is None else 'before'}: {name}")
            differ += 1
        elif "error" in a or "error" in b:
            print(f"refused: {name}\n    {b.get('error', 'compiles')}")
            differ += "error" in b
        elif a["digest"] == b["digest"]:
            same += 1
        elif a["instructions"] == b["instructions"] and all(a[n] == b[n] for n in ("REG", "STACK", "SHARED")):
            moved += 1
        else:
            differ += 1
            counts = {i: b["instructions"].get(i, 0) - a["instructions"].get(i, 0) for i in {*a["instructions"], *b["instructions"]}}
            used = ", ".join(f"{n} {a[n]} -> {b[n]}" for n in ("REG", "STACK", "SHARED") if a[n] != b[n])
            print(f"differs: {name}\n    { ({i: n for i, n in counts.items() if n}) } {used}")
    print(f"{same} the same, {moved} with the same instructions in another order and the same resources, {differ} different")
    return differ


if __name__ == "__main__":
    command, first, second, *rest = sys.argv[1:]
    if command == "dump":
        dump(Path(first).resolve(), Path(second).resolve(), rest)
    else:
        sys.exit(bool(diff(Path(first), Path(second))))

"""Launch every kernel by Triton's own launcher into a CUDA driver that only notes the parameters. test_launcher.py runs this on its own.

What a kernel gets is what decides on a GPU, and there is none here: the launcher that Triton writes in C for each signature is compiled,
and called with a step's arguments as a plan fills them in.
"""

import ctypes
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import compile_ahead
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import make_backend
from triton.runtime.build import compile_module_from_src
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from lossforge.kernels.engine import launch

STUB = """
#include <stdint.h>
#include <string.h>
static int expected, launches;
static uint64_t values[256];
void stub_expect(int count) { expected = count; launches = 0; }
uint64_t stub_value(int i) { return values[i]; }
int stub_launches(void) { return launches; }
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  launches++;
  for (int i = 0; i < expected; i++) memcpy(&values[i], parameters[i], 8);
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
"""
OTHERS = ("cuGetErrorString", "cuPointerGetAttribute", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuFuncSetAttribute")
MOST = 3
"""Launches of a kernel that are tried, spread over those that the losses' samples make."""


def stub(folder: Path) -> ctypes.CDLL:
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(STUB + "".join(f"int {name}(void) {{ return 0; }}\n" for name in OTHERS))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-Wl,-soname,libcuda.so.1"], check=True)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.stub_value.restype = ctypes.c_uint64
    return loaded


class Uses:
    """Launches of a kernel: a few, evenly over all that were made, because the tensors of all take gigabytes."""

    def __init__(self) -> None:
        self.kept: list[tuple[launch.Step, Any]] = []
        self.seen, self.every = 0, 1

    def note(self, one: launch.Launch) -> None:
        if self.seen % self.every == 0:
            values = [*one.tensors, *launch.new_sums(one.totals, one.counting, one.tensors[0].device)]
            self.kept.append((launch.Step(one, None, range(len(one.tensors))), values))
        self.seen += 1
        if len(self.kept) > 4 * MOST:
            self.kept, self.every = self.kept[::2], 2 * self.every

    def spread(self) -> list[tuple[launch.Step, Any]]:
        return self.kept[:: max(1, len(self.kept) // MOST)][:MOST]


def steps() -> dict[str, Uses]:
    """Steps of plans and their tensors, by kernel."""
    found: defaultdict[str, Uses] = defaultdict(Uses)
    start = launch.Launch.start

    def noted(one: launch.Launch) -> Any:
        if not any(isinstance(each, TensorDescriptor) for each in one.arguments):  # made by the driver of a GPU
            found[one.name].note(one)
        return start(one)

    launch.Launch.start = noted
    compile_ahead.Recorder.__call__ = lambda *args, **kwargs: None  # what it would keep to compile is not asked for here
    compile_ahead.record()
    return found


def leaves(signature: Any, value: Any) -> list[tuple[str, Any]]:
    """The types and values that a kernel gets: all but constants."""
    if isinstance(signature, tuple):
        return [leaf for s, v in zip(signature, value, strict=True) for leaf in leaves(s, v)]
    return [] if signature == "constexpr" else [(signature, value)]


def as_bits(kind: str, value: Any) -> tuple[int, int]:
    """The value's bits, and which of eight bytes they fill."""
    if kind == "fp32":
        return struct.unpack("<I", struct.pack("<f", value))[0], 2**32 - 1
    mask = 2 ** (64 if kind[0] == "*" else max(8, int(kind[1:]))) - 1
    return int(value) & mask, mask


def check(step: launch.Step, values: Any, library: ctypes.CDLL, folder: Path) -> None:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(step.kernel.signature, step.kernel.params, backend)
    bound, specialization, options = binder(*step.filled(values), **step.options, debug=False, instrumentation_mode="")
    _, signature, constants, _ = step.kernel._pack_args(backend, step.options, bound, specialization, options)
    source = driver.make_launcher(constants, dict(signature), None)
    places = {"library_dirs": [driver.libdevice_dir, str(folder)], "include_dirs": driver.include_dirs, "libraries": driver.libraries}
    module = compile_module_from_src(src=source, name="__triton_launcher", ccflags=["-O0"], **places)  # the last -O counts
    filled = step.addressed([2**40 + 16 * i for i in range(len(values))])
    expected = leaves(tuple(signature.values()), filled)
    library.stub_expect(len(expected))
    module.launch(1, 1, 1, 0, 1, 0, 0, None, None, (4, 1, 0), None, None, None, *filled)
    assert library.stub_launches() == 1
    for i, (kind, value) in enumerate(expected):
        bits, mask = as_bits(kind, value)
        assert library.stub_value(i) & mask == bits, f"{step.name}: parameter {i}, {kind}, is {library.stub_value(i):#x}, not {value}"


def main(folder: Path) -> None:
    library, checked = stub(folder), Counter()
    for name, uses in steps().items():
        for step, values in uses.spread():
            check(step, values, library, folder)
            checked[name] += 1
    print(*sorted(checked), sum(checked.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Kernels get the parameters that a plan fills in, where each belongs: by Triton's launcher, into a driver that only notes them."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia import driver

import lossforge.kernels

KERNELS = {
    name
    for file in Path(lossforge.kernels.__path__[0]).rglob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
}
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stub is loaded in the driver's place; here all other tests launch for real"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(
        list(inspect.signature(getattr(driver, "make_launcher", print)).parameters) != ["constants", "signature", "tensordesc_meta"],
        reason="the stub stands in for the launcher of Triton 3.6, and this one takes other arguments",
    ),
]


@pytest.mark.slow
def test_every_kernel_gets_its_parameters(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    script = Path(__file__).with_name("launch_by_stub.py")
    done = subprocess.run([sys.executable, script, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    *names, count = done.stdout.split()
    assert set(names) == KERNELS - {"linear_product_kernel"}  # which takes descriptors, that the driver of a GPU makes
    assert int(count) > 2 * len(KERNELS)

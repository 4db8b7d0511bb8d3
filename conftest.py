"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before anything imports triton."""

import os
import sys

import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before conftest.py could set TRITON_INTERPRET=1: the kernels would not run on CPU tensors")
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)

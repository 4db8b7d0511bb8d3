"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before anything imports triton."""

import os
import sys

# oneDNN's bfloat16 weight gradient of a 3×3 convolution over 1×1 pixels is now and then not finite with AVX-512; with AVX2 it is right
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before conftest.py could set TRITON_INTERPRET=1: the kernels would not run on CPU tensors")
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)

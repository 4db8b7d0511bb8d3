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


def patch_once() -> None:
    """Spare Triton's interpreter a search: at every call of a device function it looks through triton.language for what to patch.

    While a kernel runs, all is patched since the first call that saw the module.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    nothing = getattr(interpreter, "_LangPatchScope", lambda: None)  # triton 3.5 has none, and restores nothing
    if patch is None:
        return

    def patch_what_is_left(fn):
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        done = seen and not any(tl.core.is_builtin(language.load) for language in seen)
        return nothing() if done else patch(fn)

    interpreter._patch_lang = patch_what_is_left


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once()

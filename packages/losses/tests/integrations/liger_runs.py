"""Run transformers' Trainer with use_liger_kernel and our losses in Liger, and compare every log line with the model's own loss."""

import sys

import torch
from trainer_runs import history_of, model_of

from lossforge.integrations import liger as ours

CONFIG = {"rope": False, "rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": True}
"""Of Liger's kernels, which need a GPU, the loss alone."""
NAMES = {"Llama": {}, "Gemma2": {"swiglu": None, "geglu": False}}


def main():
    with ours.patch():  # before a trainer replaces functions that Liger's models import, as ms-swift does
        assert "liger_kernel.transformers.monkey_patch" not in sys.modules
    torch.distributed.init_process_group("gloo")
    for name, other in NAMES.items():
        config = {key: value for key, value in {**CONFIG, **other}.items() if value is not None}
        for accumulation in (1, 4):
            theirs = history_of(model_of(name), accumulation)
            with ours.patch():
                found = history_of(model_of(name), accumulation, use_liger_kernel=True, liger_kernel_config=config)
            assert len(found[0]) == 4
            torch.testing.assert_close(found, theirs, rtol=2e-4, atol=2e-6, msg=lambda m, of=(name, accumulation): f"{of}: {m}")
    print("every number is that of the model's own loss", flush=True)


if __name__ == "__main__":
    main()

"""Every kernel variant that the registered losses launch compiles for Hopper, its values in registers, and some for each other GPU.

No GPU is needed.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import lossforge.kernels
from lossforge.kernels.torch_internals import triton_internals
from lossforge.losses.registry import LOSSES

# Bytes of local memory a thread: a few variants keep some of a row's scalars there; a tile that does not fit shows as hundreds.
SPILL = 96
# What some releases of Triton spill beyond that, by kernel and loss.
SPILL_OF = {
    (3, 5): {("divergence_kernel", "js"): 104, ("resident_divergence_kernel", "js"): 128},
    (3, 6): {
        ("resident_divergence_kernel", "js"): 136,
        ("overlap_backward_kernel", "dice_ce"): 144,  # float32, dense targets of many classes, at 255 registers
        ("elementwise_kernel", "asymmetric"): 120,  # bfloat16, rows longer than a tile, at 64 registers
        ("elementwise_kernel", "siglip"): 232,  # float16 beyond 2³¹ elements, at 80 registers
    },
    (3, 8): {("resident_divergence_kernel", "js"): 1080},
    (3, 9): {
        ("divergence_kernel", "js"): 112,
        ("resident_divergence_kernel", "js"): 360,
        ("elementwise_kernel", "mse"): 128,
        ("elementwise_kernel", "huber"): 128,
        ("elementwise_kernel", "asymmetric"): 104,
        ("similarity_gradient_kernel", "supcon"): 120,  # float16, at 128 registers: 104 before a row had a maximum and a logarithm apart
    },
}.get(triton_internals().release, {})
# In every release: of all results at once the registers do not hold the sums beside half a tile.
SPILL_OF[("linear_product_kernel", "linear_ce_with_all_results")] = 640
# In every release: of rows that are computed again, the addresses of exponentials beside capped logits.
SPILL_OF[("linear_product_kernel", "linear_ce_capped")] = 160
# Stores to shared memory in a kernel: a tile that changes its layout takes some; a number spread over one in the wrong layout, thousands.
STORES = 400
# KiB of shared memory that a program may have, by compute capability; the resident kernels take nearly all of an H100's or H200's.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


KERNELS = {
    name
    for file in Path(lossforge.kernels.__path__[0]).rglob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
}


def spill(variant):
    """The most bytes of local memory that a variant may take."""
    loss, *_ = variant["case"].split()
    return SPILL_OF.get((variant["kernel"], loss), SPILL)


def test_every_variant_compiles(subtests, all_cases):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_ahead.py")
    workers = min(8, os.cpu_count() or 1)
    command = [sys.executable, script, str(workers), *([] if all_cases else ["few"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    variants = json.loads(done.stdout)
    compiled = [v for v in variants if "error" not in v]
    print(f"{len(compiled)} of {len(variants)} compiled:", dict(Counter(f"{v['kernel']} sm_{v['arch']}" for v in compiled)))

    with subtests.test("compiled"):
        refused = {v["error"][-500:]: f"{v['kernel']}: {v['case']}" for v in variants if "error" in v}
        assert not refused, "\n\n".join(f"{case}\n{reason}" for reason, case in refused.items())
    tuned = [v for v in compiled if v["arch"] in (80, 90)]  # GPUs by which tiles and layouts are chosen
    with subtests.test("local memory"):
        spilled = [v for v in tuned if v["STACK"] > spill(v)]
        assert not [f"{v['STACK']} bytes, {v['REG']} registers: {v['kernel']} sm_{v['arch']} {v['case']}" for v in spilled]
    with subtests.test("shared memory"):
        assert not [f"{v['shared_stores']}: {v['kernel']} {v['case']}" for v in tuned if v["shared_stores"] > STORES]
        fitting = [v for v in compiled if not (v["arch"] == 80 and v["kernel"].startswith("resident"))]  # recorded as for an H200
        too_much = [v for v in fitting if v["dynamic_shared"] > 1024 * SHARED[v["arch"]]]
        assert not [f"{v['dynamic_shared']}: {v['kernel']} sm_{v['arch']} {v['case']}" for v in too_much]
    with subtests.test("products overlap"):
        assert not [f"{v['kernel']} {v['case']}" for v in compiled if v["serialized"]]
    with subtests.test("coverage"):
        words = [v["case"].split() for v in variants]
        launching = {name for name, loss in LOSSES.items() if loss.has_kernel} | {"clip"}
        assert {loss for loss, *_ in words} >= launching
        assert {v["kernel"] for v in variants} >= KERNELS
        assert {v["arch"] for v in variants} == {*SHARED}
        if not all_cases:
            return
        losses = launching - {
            name for name, loss in LOSSES.items() if loss.template.name == "overlap" and loss.formula != "dice"
        }  # SAME_KERNEL there
        modes = {(name, mode) for name in losses for mode in ("value", "forward", "backward", "none")}
        modes -= {(name, "none") for name in LOSSES if "none" not in LOSSES[name].reductions}
        modes -= {("multilabel_soft_margin", "value")}  # bce's kernel
        assert {(loss, mode) for loss, *_, mode in words} >= modes
        dtypes = ("torch.float32", "torch.bfloat16", "torch.float16")
        assert {(loss, dtype) for loss, dtype, *_ in words} >= {(name, dtype) for name in losses for dtype in dtypes}
        resident = {tuple(v["case"].split()[:2]) for v in variants if v["kernel"] == "resident_divergence_kernel"}
        divergences = [  # dino scales its teacher, which resident.py does not do; nor has it vectors or blends
            name
            for name, loss in LOSSES.items()
            if loss.template.name == "divergence" and "target_scale" not in loss.without and name not in ("cosine_distance", "draft")
        ]
        assert resident >= set(itertools.product(divergences, dtypes[:2]))

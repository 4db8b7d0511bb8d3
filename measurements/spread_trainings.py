"""Measure trainings of language models on several GPUs by transformers' Trainer and by TRL, stock and with ours: losses, time and memory.

Random models of a published shape train STEPS steps under DDP and under FSDP2, as accelerate runs them: the Trainer with
`transformers.fuse`, SFT with packed sequences and GRPO at the level of sequences with `trl.patch()`. GRPO generates once, before the steps
that count, on a model of fewer layers. Each training runs TURNS times, the library's own and ours by turns, the second time in the other
order. Step time is the median of all steps after the warm-up, of the slowest GPU, and `turns_ms` that of each time. Memory is the largest
of any GPU, the state of the optimiser included, without what earlier trainings left there: under FSDP1 each leaves its part of the
parameters. The losses of all steps are beside the library's own: the largest difference, relative where the loss is above 1. What fails
has its message. With --small, two processes of the CPU, where accelerate has no FSDP2 and runs DDP in its place.
"""

import contextlib
import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import reported
import torch
import torch.distributed as dist
from measure_integrations import FULL, SMALL, Context, Sizes, clock_of, model_of, ours, trl_trainer
from measuring import Request, free_memory, installed, largest, launched, peak_mib, processes

from lab.processes import distributed
from lab.run.machine import pick_device

WARM, STEPS, ROWS, TOKENS = 4, 20, 8, 1024
TURNS = 2
LAYERS = 8  # of GRPO's model, whose generation takes most of the time
MODEL = "Qwen3-0.6B"
LAYER = "Qwen3DecoderLayer"
PARALLEL: dict[str, dict[str, Any]] = {
    "DDP": {"ddp_find_unused_parameters": False},
    "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [LAYER]}},
}
WRAPPED = {"DDP": "DistributedDataParallel", "FSDP2": "FSDP"}
"""How the name of the class begins that a model has then."""
TRL: dict[str, dict[str, Any]] = {
    "SFT": {"packing": True, "packing_strategy": "wrapped"},
    "GRPO": {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0},
}
KINDS = {"Trainer": "transformers' Trainer", "SFT": "TRL's SFT, packed", "GRPO": "TRL's GRPO, sequence level"}


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of random tokens, the same in each process."""

    def __init__(self, classes: int, tokens: int) -> None:
        self.classes, self.tokens = classes, tokens

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.randint(2, self.classes, (self.tokens,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def sizes_of(kind: str, small: bool) -> tuple[str, Sizes]:
    """Return the name of the model and the sizes of a training."""
    if small:
        return "tiny Qwen3", SMALL._replace(warm_up=1, steps=3)
    family, shape = FULL.models[MODEL]
    sizes = FULL._replace(warm_up=WARM, steps=STEPS - WARM, rows=ROWS, tokens=TOKENS)
    if kind != "GRPO":
        return MODEL, sizes
    name = f"{MODEL}, {LAYERS} layers"
    return name, sizes._replace(models={name: (family, shape | {"num_hidden_layers": LAYERS})}, rows=ROWS // 2, tokens=TOKENS // 2)


def trainer_of(kind: str, name: str, folder: str, sizes: Sizes, device: torch.device, given: dict[str, Any], fused: bool) -> Any:
    """Return a trainer, whose model has our loss where it is transformers' and `fused`."""
    if kind != "Trainer":
        return trl_trainer(kind, name, folder, sizes, device, given | TRL[kind])
    import transformers

    model = model_of(name, sizes, device)
    if fused:
        ours("transformers", model)
    cpu = device.type == "cpu"
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=sizes.warm_up + sizes.steps,
        per_device_train_batch_size=sizes.rows,
        learning_rate=1e-6,
        logging_steps=1,
        report_to=[],
        bf16=not cpu,
        use_cpu=cpu,
        save_strategy="no",
        disable_tqdm=True,
        **given,
    )
    return transformers.Trainer(model, arguments, train_dataset=Tokens(model.config.vocab_size, sizes.tokens))


def training(kind: str, parallel: str, contender: str, small: bool, device: torch.device) -> dict[str, Any]:
    """Train, and return the figures; as `taken` the milliseconds of this process's steps."""
    name, sizes = sizes_of(kind, small)
    row: dict[str, Any] = {"kind": KINDS[kind], "model": name, "parallel": parallel, "contender": contender}
    fused = contender == "lossforge"
    patched: Callable[[], Context] = partial(ours, "trl") if fused and kind != "Trainer" else contextlib.nullcontext
    free_memory()
    held = peak_mib() or 0.0
    before = dict(os.environ)
    try:
        with tempfile.TemporaryDirectory() as folder, patched():
            trained, clock = trainer_of(kind, name, folder, sizes, device, dict(PARALLEL[parallel]), fused), clock_of(sizes, device)
            trained.add_callback(clock)
            trained.train()
            lines = [line for line in trained.state.log_history if "grad_norm" in line]
        row |= {"losses": [float(line["loss"]) for line in lines], "gradient_norms": [float(line["grad_norm"]) for line in lines]}
        row["taken"] = clock.taken
        row |= {"peak_mib": largest((peak_mib() or 0.0) - held), "wrapped": type(trained.model_wrapped).__name__}
        if device.type == "cuda" and not row["wrapped"].startswith(WRAPPED[parallel]):
            raise RuntimeError(f"the model was wrapped by {row['wrapped']}, not by {parallel}")
        trained.accelerator.free_memory()
    except Exception as problem:  # of a library, of any kind, and in all processes
        row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
    os.environ.clear()  # where accelerate notes FSDP, which the next training would be under, too
    os.environ.update(before)
    gc.collect()
    return row


def by_turns(kind: str, parallel: str, small: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the figures of the library's own loss, and of ours."""
    contenders = ("transformers" if kind == "Trainer" else "trl", "lossforge")
    turns: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    for turn in range(TURNS):
        for contender in reversed(contenders) if turn % 2 else contenders:
            turns[contender].append(training(kind, parallel, contender, small, device))
            dist.barrier()
    for rows in turns.values():
        each = [row.pop("taken", []) for row in rows]
        if failed := [row for row in rows if "failed" in row]:
            yield failed[0]
            continue
        taken = [ms for of_turn in each for ms in of_turn]
        times = {"step_ms": largest(statistics.median(taken)), "step_ms_range": [-largest(-min(taken)), largest(max(taken))]}
        times |= {"turns_ms": [largest(statistics.median(of_turn)) for of_turn in each]}
        yield rows[0] | times | {"peak_mib": max(row["peak_mib"] for row in rows)}


def work(request: Request) -> None:
    """Measure as one of several processes; the first one writes what was measured so far."""
    device = pick_device("cpu" if request.small else "auto")
    distributed.start(device)
    found: dict[str, Any] = {**request.source("triton"), **installed(*reported.TRAINING_LIBRARIES), "gpus": distributed.ranks()}
    found["about"] = " ".join((__doc__ or "").split("\n\n")[-1].split())
    found["rows"] = request.saved().get("rows", [])
    for part in request.parts or PARTS:
        kind, parallel = part.split()
        rows = [row | {"commit": request.commit} for row in by_turns(kind, parallel, request.small, device)]
        found["rows"] = [row for row in found["rows"] if (row["kind"], row["parallel"]) != (KINDS[kind], parallel)] + rows
        if distributed.rank() == 0:
            print(*rows, sep="\n", flush=True)
            request.save(found)
    distributed.stop()


PARTS = tuple(f"{kind} {parallel}" for kind in KINDS for parallel in PARALLEL)


def spread_trainings(request: Request) -> int:
    launched(work, processes(request), request, threads=1 if request.small else 8)
    print(reported.spread_trainings(request.out))
    return 0

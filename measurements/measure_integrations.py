"""Measure other libraries' training with their own losses and with ours: time, peak memory, waits for the device, and errors.

The parts are trl, trainer, compiled, compiled_small, curves, detectors and open_clip. `trl` trains random language models with SFT, DPO
and GRPO, as TRL does and with `trl.patch()`, by turns; GRPO generates once, before the steps that count. `trainer` takes training steps
of such models with their own loss, with Liger's and after `transformers.fuse`; `compiled` and `compiled_small` the same of one model
each, compiled whole. `curves` has the loss of each of the first steps, by these three and several seeds. `detectors` has YOLO models of
ultralytics and detectors of transformers, `open_clip` its loss from features. A contender whose loss, log-probabilities or gradients are
wrong gets no time, and a library that is not installed is named. The weights of the models' last norm have random signs, without which a
head tied to the embedding repeats the last token, and a size that gives logits a standard deviation of 4, as those of trained models.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import reported
import torch
from measure_precision import STEP, exactly, logps_of
from measuring import Request, free_memory, installed, measure_parts, peak_mib, relative
from torch import Tensor
from torch.utils import _pytree

from lab.processes.distributed import ranks
from lossforge.bench import measure as bench_measure
from lossforge.bench.measure import synchronize

PARTS = ("trl", "trainer", "compiled", "compiled_small", "curves", "detectors", "open_clip")
DEVIATION = 4.0
CALLS = 3
AGREE_LOGPS, AGREE, AGREE_GRADIENT = 0.25, 1e-2, 3e-2
"""Of log-probabilities, in nats; of a loss and of gradients, relative. Logits in bfloat16 are off by up to 0.06 where they are near 16."""
AGREE_EXACTLY, AGREE_GRADIENT_EXACTLY = 1e-3, 1e-2
"""Of a loss and of gradients from outputs in float32."""
TIED = {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "max_position_embeddings": 4096}
QWEN = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
LLAMA = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
GEMMA = {"vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4}
TINY = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
RESNET = {"layer_type": "bottleneck", "depths": [3, 4, 6, 3]}
TINY_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "layer_type": "basic"}
TINY_DETR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
TINY_RT = {"encoder_hidden_dim": 16, "encoder_in_channels": [8, 8, 8], "decoder_in_channels": [16] * 3, "d_model": 16}
TINY_RT |= {"num_attention_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 2, "num_queries": 20}


class Sizes(NamedTuple):
    """Sizes of all parts.

    models: the kind and shape of each language model. trl, curves: which of them these parts train. compiled: those of the parts compiled
    and compiled_small. rounds: how often TRL's trainings and ours take turns. detectors: the configuration of each of transformers'.
    """

    models: dict[str, tuple[str, dict[str, Any]]]
    compiled: tuple[str, str]
    trl: tuple[str, ...]
    rounds: int
    curves: str
    updates: int
    seeds: int
    rows: int
    tokens: int
    generations: int
    yolo: tuple[str, ...]
    detectors: dict[str, dict[str, Any]]
    images: int
    side: int
    boxes: int
    pairs: tuple[int, ...]
    features: int
    warm_up: int
    steps: int


FULL = Sizes(
    models={
        "Qwen3-0.6B": ("Qwen3", QWEN | {"num_key_value_heads": 8, "head_dim": 128}),
        "Llama-3.2-1B": ("Llama", LLAMA | {"num_key_value_heads": 8, "head_dim": 64}),
        "Gemma-3-270M": ("Gemma3", GEMMA | {"num_key_value_heads": 1, "head_dim": 256}),
    },
    compiled=("Llama-3.2-1B", "Qwen3-0.6B"),
    trl=("Qwen3-0.6B", "Llama-3.2-1B"),
    rounds=2,
    curves="Qwen3-0.6B",
    updates=50,
    seeds=3,
    rows=8,
    tokens=1024,
    generations=8,
    yolo=("yolov8n", "yolo26n"),
    detectors={"DeformableDetr": {"backbone": RESNET}, "RTDetr": {"backbone": RESNET}},
    images=16,
    side=640,
    boxes=20,
    pairs=(4096, 16_384),
    features=512,
    warm_up=3,
    steps=7,
)
SMALL = Sizes(
    models={"tiny Qwen3": ("Qwen3", TINY | {"num_key_value_heads": 2, "head_dim": 16})},
    compiled=("tiny Qwen3", "tiny Qwen3"),
    trl=("tiny Qwen3",),
    rounds=1,
    curves="tiny Qwen3",
    updates=3,
    seeds=2,
    rows=2,
    tokens=16,
    generations=2,
    yolo=("yolov8n", "yolo26n"),
    detectors={
        "DeformableDetr": {"backbone": TINY_RESNET, **TINY_DETR, "num_feature_levels": 3, "num_queries": 20},
        "RTDetr": {"backbone": TINY_RESNET, **TINY_RT, "num_denoising": 4},
    },
    images=2,
    side=64,
    boxes=3,
    pairs=(24,),
    features=16,
    warm_up=1,
    steps=1,
)
Context = contextlib.AbstractContextManager[Any]
Row = dict[str, Any]


class WrongError(RuntimeError):
    """A contender's result is not the right one."""


def integrations(request: Request) -> int:
    sizes, device = SMALL if request.small else FULL, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = (*(partial(compiled, name) for name in sizes.compiled),)
    parts = {
        name: partial(part, sizes, device) for name, part in zip(PARTS, (trl, trainer, *steps, curves, detectors, open_clip), strict=True)
    }
    rows, failed = measure_parts(request, parts, {**request.source("triton"), **installed(*reported.LIBRARIES)})
    print(reported.integrations(request.out))
    return int(bool(failed) or any(row["contender"] == "lossforge" and "failed" in row for row in rows))


def missing(*modules: str) -> str | None:
    """Return which of some modules is not installed."""
    return next((f"{name} is not installed" for name in modules if importlib.util.find_spec(name) is None), None)


def attempt(case: str, contender: str, run: Callable[[], Row], *needed: str) -> Row:
    """Return a contender's figures, or why there are none."""
    row: Row = {"case": case, "contender": contender}
    if absent := missing(*needed):
        return row | {"left_out": absent}
    try:
        return row | run()
    except Exception as problem:  # of a library, of any kind
        return row | {"failed": f"{type(problem).__name__}: {problem}"[:400]}
    finally:
        with contextlib.suppress(torch.AcceleratorError):  # of a contender that ended what CUDA can do in this process
            free_memory()


def require(errors: dict[str, float], bounds: dict[str, float]) -> dict[str, float]:
    """Return errors that are within their bounds.

    Raises:
        WrongError: one is not, or is not a number.
    """
    for name, bound in bounds.items():
        if not errors[name] <= bound:
            raise WrongError(f"{name} is {errors[name]:.2e}, above {bound:.0e}")
    return errors


class Prepared(NamedTuple):
    """A contender that is right, and has made its first calls.

    timed: what is timed, by the name of its figure. errors: what stands in its row beside the times. held_mib: what it keeps between calls.
    around: what is entered for its calls, such as the patch of a library.
    """

    timed: dict[str, Callable[[], object]]
    errors: Row
    held_mib: float
    around: Callable[[], Context] = contextlib.nullcontext


def ready(timed: dict[str, Callable[[], object]], errors: Row, before_mib: float, sizes: Sizes) -> Prepared:
    """Make a contender's first calls. before_mib: the memory that was allocated before it was made."""
    for call in timed.values():
        for _ in range(sizes.warm_up):
            call()
    free_memory()
    return Prepared(timed, errors, allocated_mib() - before_mib)


def allocated_mib() -> float:
    return torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0


Contenders = dict[str, tuple[Callable[[], Prepared], *tuple[str, ...]]]
"""What prepares each contender, and the modules that it needs."""


def beside(case: str, contenders: Contenders, sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield a row for each contender of a case, with times if it is right. All are prepared first, and then measured in turns."""
    prepared: dict[str, Prepared] = {}

    def prepare(name: str, made: Callable[[], Prepared]) -> Row:
        prepared[name] = made()
        return prepared[name].errors

    rows = [attempt(case, name, partial(prepare, name, made), *needed) for name, (made, *needed) in contenders.items()]
    measured = in_turns(prepared, sizes, device)
    yield from (row | measured.get(row["contender"], {}) for row in rows)


def in_turns(prepared: dict[str, Prepared], sizes: Sizes, device: torch.device) -> dict[str, Row]:
    """Return each contender's median times and their ranges, and the most memory that its step would need alone.

    Each takes its turn in every round: a call that allocates again what was freed for the others, then CALLS calls without a wait, in which
    the host runs ahead as it does in training.
    """
    taken: dict[str, dict[str, list[float]]] = {name: {what: [] for what in each.timed} for name, each in prepared.items()}
    peaks: dict[str, float | None] = {}
    for _ in range(sizes.steps):
        for name, each in prepared.items():
            for what, call in each.timed.items():
                free_memory()
                others = allocated_mib() - each.held_mib
                with each.around():
                    call()
                    synchronize(device)
                    began = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    synchronize(device)
                    spent = time.perf_counter() - began
                taken[name][what].append(spent * 1e3 / CALLS)
                peak = peak_mib()
                if what == "step_ms":
                    peaks[name] = None if peak is None else max(peak - others, peaks.get(name) or 0.0)
    return {
        name: {
            figure: value
            for what, ms in of.items()
            for figure, value in {what: statistics.median(ms), f"{what}_range": [min(ms), max(ms)]}.items()
        }
        | {"peak_mib": peaks[name]}
        for name, of in taken.items()
    }


def waits(call: Callable[[], object]) -> int | None:
    """Count how often a call waits for the device; None without a GPU."""
    return bench_measure.waits(call) if torch.cuda.is_available() else None


def ours(module: str, *given: Any) -> Context:
    """Return the handle of our integration of a library."""
    found = importlib.import_module(f"lossforge.integrations.{module}")
    handle: Context = found.fuse(*given) if given else found.patch()
    return handle


# Language models


def model_of(name: str, sizes: Sizes, device: torch.device, seed: int = 0, *, sharp: bool = True) -> Any:
    """Return a random language model. sharp: whether its last norm gives logits the deviation of trained models."""
    import transformers

    kind, shape = sizes.models[name]
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Gemma3')}Config")(**shape, **TIED)
    torch.manual_seed(seed)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if sharp:
        weight = model.model.norm.weight.data
        weight.bernoulli_(0.5).sub_(0.5).mul_(2 * DEVIATION / (config.initializer_range * config.hidden_size**0.5))
        if kind == "Gemma3":
            weight.sub_(1)  # its norm multiplies by 1 + weight
    return model.train()


def trainer(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield what a training step takes with each loss, in turns."""
    yield from trained(sizes.models, sizes, device, compiled=False)


def compiled(name: str, sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield the same of a model compiled whole, once a loss and once more for the exact loss.

    Liger's has its turn after the others: compiled, it read memory that is not its own, after which nothing else ran.
    """
    yield from trained([name], sizes, device, compiled=True)


def trained(names: Iterable[str], sizes: Sizes, device: torch.device, *, compiled: bool) -> Iterator[Row]:
    if absent := missing("transformers"):
        yield {"case": "all", "contender": "transformers", "left_out": absent}
        return
    for name in names:
        torch.compiler.reset()
        exact = exact_loss(*of_trainer(name, sizes, device), compiled=compiled)
        with contextlib.ExitStack() as stack:
            contenders: Contenders = {
                loss: (partial(prepared_step, name, made, exact, stack, sizes, device, compiled=compiled), *needed)
                for loss, (made, *needed) in OF_TRAINER.items()
            }
            last = {"liger": contenders.pop("liger")} if compiled else {}
            yield from beside(name, contenders, sizes, device)
            yield from beside(name, last, sizes, device)


def liger(model: Any) -> Context:
    """Give a model Liger's loss, fused with its head, and nothing else of Liger's."""
    import liger_kernel.transformers as library

    apply = getattr(library, f"apply_liger_kernel_to_{model.config.model_type}")
    others = [name for name, each in inspect.signature(apply).parameters.items() if each.annotation is bool]
    apply(model=model, **dict.fromkeys(others, False) | {"fused_linear_cross_entropy": True})
    return contextlib.nullcontext()


OF_TRAINER: dict[str, tuple[Callable[[Any], Context], *tuple[str, ...]]] = {
    "transformers": (lambda model: contextlib.nullcontext(),),
    "liger": (liger, "liger_kernel"),
    "lossforge": (partial(ours, "transformers"),),
}
"""Gives a model the loss of each contender, and what this needs."""


def stepper(model: Any, tokens: Tensor, rate: float) -> Callable[[], Tensor]:
    """Return an update of a model on tokens, as an own loop makes it, which returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    optimizer.zero_grad()
    return step


def of_trainer(name: str, sizes: Sizes, device: torch.device) -> tuple[Any, Tensor]:
    """Return a model and its tokens, the same in each call."""
    model = model_of(name, sizes, device)
    generator = torch.Generator(device).manual_seed(0)
    return model, torch.randint(2, model.config.vocab_size, (sizes.rows, sizes.tokens), device=device, generator=generator)


def prepared_step(
    name: str,
    loss: Callable[[Any], Context],
    exact: "Exactly",
    stack: contextlib.ExitStack,
    sizes: Sizes,
    device: torch.device,
    *,
    compiled: bool = False,
) -> Prepared:
    """Prepare a contender's update. stack: ends what gave the model its loss."""
    before = allocated_mib()
    model, tokens = of_trainer(name, sizes, device)
    stack.enter_context(loss(model))
    called = torch.compile(model) if compiled else model
    errors = against(exact, called, tokens)
    return ready({"step_ms": stepper(called, tokens, 1e-6)}, errors, before, sizes)


def curves(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield the loss of each of the first updates from a random start, on text in which one of 8 words follows each word."""
    if absent := missing("transformers"):
        yield {"case": "all", "contender": "transformers", "left_out": absent}
        return
    for seed in range(sizes.seeds):
        for loss, (made, *needed) in OF_TRAINER.items():
            yield attempt(f"{sizes.curves}, seed {seed}", loss, partial(curve_row, made, seed, sizes, device), *needed)


def curve_row(loss: Callable[[Any], Context], seed: int, sizes: Sizes, device: torch.device) -> Row:
    model = model_of(sizes.curves, sizes, device, seed, sharp=False)
    generator = torch.Generator(device).manual_seed(seed)
    words = min(4096, model.config.vocab_size - 2)
    follows = torch.randint(2, 2 + words, (2 + words, 8), device=device, generator=generator)
    tokens = torch.empty(sizes.rows, sizes.tokens, dtype=torch.long, device=device)
    step, losses = stepper(model, tokens, 3e-4), []
    with loss(model):
        for _ in range(sizes.updates):
            tokens[:, 0] = torch.randint(2, 2 + words, (sizes.rows,), device=device, generator=generator)
            chosen = torch.randint(8, tokens.shape, device=device, generator=generator)
            for place in range(1, sizes.tokens):
                tokens[:, place] = follows[tokens[:, place - 1], chosen[:, place]]
            losses.append(step())
    return {"losses": torch.stack(losses).tolist()}


class Exactly(NamedTuple):
    """A loss, and the gradients of a model's last norm and of its head, on the CPU."""

    value: float
    gradients: tuple[Tensor, Tensor]


def exact_loss(model: Any, tokens: Tensor, *, compiled: bool = False) -> Exactly:
    """Return what follows in float64 from the last hidden states.

    compiled: whether these are of the compiled body, which rounds in other places.
    """
    norm, head = model.model.norm.weight, model.get_output_embeddings().weight
    body = torch.compile(model.model) if compiled else model.model
    hidden = body(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    target = tokens[:, 1:].flatten()
    upstream = torch.full((len(target),), -1 / len(target), device=target.device)
    exact = exactly(hidden.detach(), head.detach(), target, upstream)
    of_norm, of_embedding = torch.autograd.grad(hidden, (norm, head), exact.of_input.to(hidden.dtype))  # the head is the embedding, too
    return Exactly(-exact.values.mean().item(), (of_norm.cpu(), (of_embedding.double() + exact.of_weight).cpu()))


def against(exact: Exactly, model: Any, tokens: Tensor) -> Row:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    leaves = model.model.norm.weight, model.get_output_embeddings().weight
    off = [relative(leaf.grad, gradient.to(leaf.device)) for leaf, gradient in zip(leaves, exact.gradients, strict=True)]
    errors = {"value_error": abs(loss.item() - exact.value) / exact.value, "gradient_error": max(off)}
    return require(errors, {"value_error": AGREE, "gradient_error": AGREE_GRADIENT})


# TRL


def trl(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield what a step of each trainer takes, and the largest error of the log-probabilities of its first step."""
    if absent := missing("trl", "datasets", "transformers"):
        yield {"case": "all", "contender": "trl", "left_out": absent}
        return
    contenders = {"trl": contextlib.nullcontext, "lossforge": partial(ours, "trl")}
    for name in sizes.trl:
        for kind in ("SFT", "DPO", "GRPO"):
            first: Row = {}
            rounds: dict[str, list[Row]] = {contender: [] for contender in contenders}
            for _ in range(sizes.rounds):
                for contender, patched in contenders.items():
                    run = partial(trl_row, kind, name, patched, first, sizes, device)
                    rounds[contender].append(attempt(f"{kind}, {name}", contender, run))
            yield from map(of_rounds, rounds.values())


def of_rounds(rows: list[Row]) -> Row:
    """Return a contender's row: the errors of its first training, and the times of all; or why one has none."""
    if failed := next((row for row in rows if "taken" not in row), None):
        return failed
    taken = [ms for row in rows for ms in row.pop("taken")]
    times = {"step_ms": statistics.median(taken), "step_ms_range": [min(taken), max(taken)]}
    return rows[0] | times | {"peak_mib": max((row["peak_mib"] for row in rows), key=lambda mib: mib or 0.0)}


class Spy:
    """Stands for TRL's function of log-probabilities, and keeps some tokens of the first call that is trained."""

    def __init__(self, own: Any) -> None:
        self.own, self.seen = own, ()  # type: Any, tuple[Any, ...]
        self.waiting = True

    def apply(self, hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, temperature: float, *more: Any) -> Any:
        found = self.own.apply(hidden, weight, bias, targets, temperature, *more)
        if self.waiting and torch.is_grad_enabled() and hidden.requires_grad:
            self.waiting = False
            picked = torch.linspace(0, len(hidden) - 1, min(STEP, len(hidden)), device=hidden.device).long()
            given = hidden.detach()[picked], weight.detach().clone(), targets[picked]
            self.seen = *given, temperature, more, found[0].detach()[picked]
        return found

    def errors(self) -> tuple[dict[str, float], Tensor]:
        """Return the errors of log-probabilities and their gradients against float64, and the classes of the tokens."""
        if not self.seen:
            raise WrongError("TRL did not call its function of log-probabilities")
        (hidden, weight, targets, temperature, more, found), self.seen = self.seen, ()
        upstream = torch.randn(len(targets), device=hidden.device, generator=torch.Generator(hidden.device).manual_seed(0))
        exact = exactly(hidden, weight, targets, upstream, lambda logits, index: logps_of(logits / temperature, index))
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        with torch.enable_grad():
            logps = self.own.apply(*leaves, None, targets, temperature, *more)[0]
            gradients = torch.autograd.grad(logps, leaves, upstream.to(logps.dtype))
        off = [relative(*each) for each in zip(gradients, (exact.of_input, exact.of_weight), strict=True)]
        error = (found.double() - exact.values).abs().max().item()
        errors = {"logps_error": error, "gradient_error": max(off)}
        return require(errors, {"logps_error": AGREE_LOGPS, "gradient_error": AGREE_GRADIENT}), targets


@contextlib.contextmanager
def spied() -> Iterator[Spy]:
    utils = importlib.import_module("trl.trainer.utils")
    own = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = spy = Spy(own)
    try:
        yield spy
    finally:
        utils._ChunkedLogProbFunction = own


def clock_of(sizes: Sizes, device: torch.device, at_first_step: Callable[[], None] | None = None) -> Any:
    """Return a callback of a trainer, which times the steps after the warm-up, and counts the peak of memory from there on.

    at_first_step: is called after the first step.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Keeps the milliseconds of each step as `taken`."""

        def __init__(self) -> None:
            self.taken: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == sizes.warm_up:
                free_memory()
            synchronize(device)
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            synchronize(device)
            if state.global_step > sizes.warm_up:
                self.taken.append((time.perf_counter() - self.began) * 1e3)
            if state.global_step == 1 and at_first_step is not None:
                at_first_step()

    return Clock()


def trl_row(kind: str, name: str, patched: Callable[[], Context], first: Row, sizes: Sizes, device: torch.device) -> Row:
    """Train, and return the figures. first: what TRL's own first step found, which is written here and compared with."""

    def at_first_step() -> None:
        found["errors"], found["targets"] = spy.errors()

    found: Row = {}
    with tempfile.TemporaryDirectory() as folder, patched(), spied() as spy:
        trained, clock = trl_trainer(kind, name, folder, sizes, device), clock_of(sizes, device, at_first_step)
        trained.add_callback(clock)
        trained.train()
        line = trained.state.log_history[0]
    errors = found.pop("errors")
    found = {"loss": float(line["loss"]), "grad_norm": float(line["grad_norm"]), "targets": found["targets"].tolist()}
    if not first:
        first |= found
    row: Row = {**errors, "same_tokens": found["targets"] == first["targets"]}
    if row["same_tokens"]:  # GRPO's are sampled
        row["loss_difference"] = abs(found["loss"] - first["loss"]) / max(abs(first["loss"]), 1)
        row["grad_norm_difference"] = abs(found["grad_norm"] - first["grad_norm"]) / first["grad_norm"]
        require(row, {"loss_difference": AGREE, "grad_norm_difference": 2 * AGREE_GRADIENT})
    return row | {"taken": clock.taken, "peak_mib": peak_mib()}


def trl_trainer(kind: str, name: str, folder: str, sizes: Sizes, device: torch.device, given: Row | None = None) -> Any:
    """Return a trainer whose step has rows · tokens tokens a process. given: further settings."""
    import trl as library
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = model_of(name, sizes, device)
    classes, tokens, steps = model.config.vocab_size, sizes.tokens, sizes.warm_up + sizes.steps
    words = ["<pad>", "</s>", *map(str, range(2, classes))]
    numbers = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    numbers.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=numbers, pad_token="<pad>", eos_token="</s>", padding_side="left")
    draw = random.Random(0)

    def texts(count: int, length: int) -> list[str]:
        return [" ".join(str(draw.randrange(2, classes)) for _ in range(length)) for _ in range(count)]

    cpu = device.type == "cpu"
    settings: Row = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": sizes.rows,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "report_to": [],
        "bf16": not cpu,
        "use_cpu": cpu,
        "save_strategy": "no",
        "disable_tqdm": True,
        **(given or {}),
    }
    count = sizes.rows * steps * ranks()
    if kind == "SFT":
        rows = Dataset.from_dict({"text": texts(count, tokens - 1)})
        return library.SFTTrainer(model, library.SFTConfig(**settings, max_length=tokens), train_dataset=rows, processing_class=tokenizer)
    if kind == "DPO":
        parts = {part: texts(count, tokens // 4) for part in ("prompt", "chosen", "rejected")}
        rows = Dataset.from_dict({part: [" " + text for text in each] if part != "prompt" else each for part, each in parts.items()})
        reference = model_of(name, sizes, device, seed=1)
        return library.DPOTrainer(
            model, reference, library.DPOConfig(**settings, max_length=tokens), train_dataset=rows, processing_class=tokenizer
        )
    settings["per_device_train_batch_size"] = 2 * sizes.rows
    sampled = {"num_generations": sizes.generations, "max_completion_length": tokens * 3 // 8, "steps_per_generation": steps}
    rows = Dataset.from_dict({"prompt": texts(2 * count, tokens // 8)})
    return library.GRPOTrainer(model, rewards, library.GRPOConfig(**settings, **sampled), train_dataset=rows, processing_class=tokenizer)


def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(each) % 7) for each in completion_ids]


# Detectors


class Detector(NamedTuple):
    """A detector of a library. loss: from a model to the training loss of the batch. recorded: the criterion's call of one step."""

    case: str
    library: str
    integration: str
    make: Callable[[Sizes, torch.device], tuple[torch.nn.Module, Callable[[], Tensor], Callable[[], "Criterion"]]]


class Criterion(NamedTuple):
    """A criterion and what a model gave it."""

    call: Callable[..., Tensor]
    given: Any


def detectors(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield what criterion and step of each detector take."""
    found = [Detector(name, "ultralytics", "ultralytics", partial(yolo, name)) for name in sizes.yolo]
    found += [Detector(name, "transformers", "transformers_detection", partial(detr, name)) for name in sizes.detectors]
    for each in found:
        if absent := missing(each.library):
            yield {"case": each.case, "contender": each.library, "left_out": absent}
            continue
        expected = expected_of(each, sizes, device)
        contenders: Contenders = {
            name: (partial(prepared_detector, each, patched, expected, sizes, device),)
            for name, patched in {each.library: contextlib.nullcontext, "lossforge": partial(ours, each.integration)}.items()
        }
        yield from beside(each.case, contenders, sizes, device)


class Expected(NamedTuple):
    """What a model gives its criterion, and the library's own loss and gradients of that in float32."""

    given: Any
    value: float
    gradients: Tensor


def expected_of(each: Detector, sizes: Sizes, device: torch.device) -> Expected:
    torch.manual_seed(0)
    record = each.make(sizes, device)[-1]
    with torch.autocast(device.type, torch.bfloat16):
        criterion = record()
    criterion = criterion._replace(given=_pytree.tree_map(detached, criterion.given))
    value, gradients = graded(criterion, torch.float32)
    return Expected(criterion.given, value, joined(gradients))


def prepared_detector(each: Detector, patched: Callable[[], Context], expected: Expected, sizes: Sizes, device: torch.device) -> Prepared:
    """Prepare the criterion and the step of a detector with a library's losses or ours."""
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    before = allocated_mib()
    with patched():
        torch.manual_seed(0)
        model, loss, record = each.make(sizes, device)
        with autocast():
            criterion = record()._replace(given=expected.given)
        value, gradients = graded(criterion, torch.float32)
        errors: Row = {
            "value_error": abs(value - expected.value) / abs(expected.value),
            "gradient_error": relative(joined(gradients), expected.gradients),
        }
        del gradients
        with autocast():
            errors["bf16_error"] = abs(graded(criterion)[0] - expected.value) / abs(expected.value)
        require(errors, {"value_error": AGREE_EXACTLY, "gradient_error": AGREE_GRADIENT_EXACTLY, "bf16_error": 5 * AGREE})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def measured() -> None:
            with autocast():
                graded(criterion, wait=False)

        def step() -> None:
            with autocast():
                total = loss()
            total.backward()
            optimizer.step()
            optimizer.zero_grad()

        found = ready({"step_ms": step, "criterion_ms": measured}, errors, before, sizes)
        found.errors.update(step_waits=waits(step), criterion_waits=waits(measured))
        return found._replace(around=patched)


def graded(criterion: Criterion, dtype: torch.dtype | None = None, wait: bool = True) -> Any:
    """Return the loss of what a model gave its criterion, and the gradient of each part of that. wait: read the loss."""
    leaves: list[Tensor] = []

    def leaf(given: Any) -> Any:
        if not isinstance(given, Tensor) or not given.requires_grad:
            return given
        leaves.append(given.detach().to(dtype or given.dtype).requires_grad_())
        return leaves[-1]

    value = criterion.call(*_pytree.tree_map(leaf, criterion.given))
    with torch.autocast(value.device.type, enabled=False):
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    if wait:
        return value.item(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)]
    return None


def detached(given: Any) -> Any:
    """Return a tensor without its graph, which still says whether it required grad; anything else as it is."""
    return given.detach().requires_grad_(given.requires_grad) if isinstance(given, Tensor) else given


def joined(gradients: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten().double() for each in gradients])


def scenes(sizes: Sizes, device: torch.device) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return random images, and the classes and boxes (centres and sides, in parts of the image) of each."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(sizes.images, 3, sizes.side, sizes.side, generator=generator).to(device)
    labels = []
    for _ in range(sizes.images):
        sides = 0.05 + 0.35 * torch.rand(sizes.boxes, 2, generator=generator)
        centres = sides / 2 + (1 - sides) * torch.rand(sizes.boxes, 2, generator=generator)
        classes = torch.randint(80, (sizes.boxes,), generator=generator)
        labels.append({"class_labels": classes.to(device), "boxes": torch.cat([centres, sides], 1).to(device)})
    return images, labels


def yolo(name: str, sizes: Sizes, device: torch.device) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"YOLO_CONFIG_DIR": folder, "YOLO_OFFLINE": "true", "YOLO_VERBOSE": "false", "YOLO_AUTOINSTALL": "false"}
        from ultralytics.cfg import get_cfg
        from ultralytics.nn.tasks import DetectionModel

        model = DetectionModel(f"{name}.yaml", nc=80, verbose=False).to(device).train()
        model.args = get_cfg()
    images, labels = scenes(sizes, device)
    boxes, classes = (torch.cat([each[of] for each in labels]) for of in ("boxes", "class_labels"))
    index = torch.arange(sizes.images, device=device).repeat_interleave(sizes.boxes)
    batch = {"img": images, "bboxes": boxes, "cls": classes[:, None].float(), "batch_idx": index.float()}
    criterion = model.init_criterion()
    model.criterion = criterion

    def call(predictions: Any) -> Tensor:
        total: Tensor = criterion(predictions, batch)[0].sum()
        return total

    return model, lambda: model(batch)[0].sum(), lambda: Criterion(call, (model(images),))


def detr(name: str, sizes: Sizes, device: torch.device) -> Any:
    import transformers

    given = dict(sizes.detectors[name])
    kind = "RTDetrResNet" if name == "RTDetr" else "ResNet"
    backbone = getattr(transformers, f"{kind}Config")(**given.pop("backbone"), out_features=["stage2", "stage3", "stage4"])
    more = {"anchor_image_size": None, "num_labels": 80} if name == "RTDetr" else {"num_labels": 80, "auxiliary_loss": True}
    config = getattr(transformers, f"{name}Config")(**given, **more, backbone_config=backbone)
    model = getattr(transformers, f"{name}ForObjectDetection")(config).to(device).train()
    images, labels = scenes(sizes, device)
    own = model.loss_function

    def record() -> Criterion:
        seen: list[Any] = []

        def recording(*args: Any, **kwargs: Any) -> Any:
            seen.append((args, kwargs))
            return own(*args, **kwargs)

        model.loss_function = recording
        try:
            model(pixel_values=images, labels=labels)
        finally:
            model.loss_function = own
        return Criterion(lambda args, kwargs: own(*args, **kwargs)[0], seen[0])

    return model, lambda: model(pixel_values=images, labels=labels).loss, record


# open_clip


def open_clip(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Yield what CLIP's loss from features takes, forward and backward."""
    for pairs in sizes.pairs:
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator(device).manual_seed(0)
            images, noise = (torch.randn(pairs, sizes.features, device=device, generator=generator) for _ in range(2))
            images = torch.nn.functional.normalize(images, dim=-1)
            texts = torch.nn.functional.normalize(images + noise / sizes.features**0.5 * 3, dim=-1)
            case = f"{pairs} × {sizes.features}, {str(dtype).removeprefix('torch.')}"
            features = images.to(dtype), texts.to(dtype)
            contenders: Contenders = {
                name: (partial(prepared_clip, features, patched, sizes), "open_clip")
                for name, patched in {"open_clip": contextlib.nullcontext, "lossforge": partial(ours, "open_clip")}.items()
            }
            yield from beside(case, contenders, sizes, device)


def prepared_clip(features: tuple[Tensor, Tensor], patched: Callable[[], Context], sizes: Sizes) -> Prepared:
    from open_clip.loss import ClipLoss

    device, wide, before = features[0].device, features[0].dtype == torch.float32, allocated_mib()
    loss = ClipLoss()

    def run(dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        scale = torch.tensor(1 / 0.07, device=device, dtype=dtype, requires_grad=True)
        leaves = *(each.detach().to(dtype).requires_grad_() for each in features), scale
        value = loss(*leaves)
        return value, torch.autograd.grad(value, leaves)

    exact, gradients = run(torch.float64)
    value, gradient = exact.item(), [each.cpu() for each in gradients[:2]]
    del exact, gradients
    with patched():
        found, others = run(features[0].dtype)
        off = max(relative(each.cpu(), of) for each, of in zip(others, gradient, strict=False))
        errors = {"value_error": abs(found.item() - value) / value, "gradient_error": off}
        bounds = (AGREE_EXACTLY, AGREE_GRADIENT_EXACTLY) if wide else (AGREE, AGREE_GRADIENT)
        require(errors, dict(zip(errors, bounds, strict=True)))
        del found, others
        prepared = ready({"step_ms": lambda: run(features[0].dtype)}, errors, before, sizes)
        return prepared._replace(around=patched)

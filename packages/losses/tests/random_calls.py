"""Random calls of public losses against float64, each made from one number.

`python random_calls.py SEED` makes one again and says all of it.
"""

import contextlib
import functools
import inspect
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor

from lossforge.losses import functional, fuse_linear, plain_torch
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.option_types import Range
from lossforge.losses.base.record import Make, Sample
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.testing import BOUNDS, error, has_inplace, samples

REFUSED = (ValueError, TypeError, IndexError)
ROUNDING = 2.0**-23
"""Of float32, in which the kernels compute."""


@dataclass(frozen=True)
class RandomCall:
    """A call: function(*tensors named in `positional`, **other tensors, **options).

    reference: the same in plain torch, of any dtype. wanted: the tensors that get a gradient. how: one of HOW, "repeated", or "twice", with
    the gradients' own gradients. inplace: the tensor that the gradient overwrites.
    """

    title: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    tensors: dict[str, Tensor | None]
    positional: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    upstream: float = 1.0
    how: str = "eager"
    dynamic: bool | None = None
    inplace: str | None = None

    def __str__(self) -> str:
        def said(t: Tensor | None) -> str:
            if t is None:
                return "None"
            return f"{str(t.dtype)[6:]}{tuple(t.shape)} strides {t.stride()} offset {t.storage_offset()}"

        tensors = ", ".join(f"{name}: {said(t)}" for name, t in self.tensors.items())
        options = {k: v for k, v in self.options.items() if v is not None} | ({"inplace": True} if self.inplace else {})
        return f"{self.title}; {self.how}; {tensors}; {options}; gradient of {', '.join(self.wanted)}; upstream about {self.upstream}"


def in_plain_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with plain_torch():
            return function(*args, **kwargs)

    return call


def exported(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = {name: v for name, v in kwargs.items() if isinstance(v, Tensor)}
        options = {name: v for name, v in kwargs.items() if name not in tensors}

        class Model(torch.nn.Module):
            def forward(self, *args: Any, **tensors: Any) -> Any:
                return function(*args, **tensors, **options)

        return torch.export.export(Model(), args, tensors).module()(*args, **tensors)

    return call


def compiled(backend: str, function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


HOW: dict[str, Callable[[Callable[..., Any], bool | None], Callable[..., Any]]] = {
    "eager": lambda function, dynamic: function,
    "plain torch": lambda function, dynamic: in_plain_torch(function),
    "inference": lambda function, dynamic: torch.inference_mode()(function),
    "exported": lambda function, dynamic: exported(function),
    "aot_eager": functools.partial(compiled, "aot_eager"),
    "inductor": functools.partial(compiled, "inductor"),
}
"""Ways to call a function."""


def arguments(call: RandomCall, tensors: dict[str, Tensor | None]) -> tuple[list[Tensor | None], dict[str, Any]]:
    by_name = {name: t for name, t in tensors.items() if name not in call.positional}
    return [tensors[name] for name in call.positional], {**by_name, **call.options}


def first_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def computed(call: RandomCall, upstream: Tensor | None, wide: bool = False, ours: bool = False, noise: int | None = None) -> list[Tensor]:
    """Return the value and the gradients. wide: in float64; noise: the seed by which the tensors are rounded otherwise, at most once."""

    def given(name: str, t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return t
        made = t.detach().double() if wide else t.detach()
        if noise is not None:
            signs = torch.randn(t.shape, generator=torch.Generator().manual_seed(noise)).sign()
            made = made * (1 + ROUNDING * signs.to(made.device, made.dtype))
        return made.requires_grad_(name in call.wanted)

    leaves = {name: given(name, t) for name, t in call.tensors.items()}
    function = call.function if ours else call.reference
    passed, more = dict(leaves), {}
    if ours and call.inplace:
        passed[call.inplace], more = leaves[call.inplace] * 1, {"inplace": True}  # type: ignore[operator]
    elif ours and call.how in HOW:
        function = HOW[call.how](function, call.dynamic)
    positional, by_name = arguments(call, passed)
    value = first_of(function(*positional, **by_name, **more))
    of = [t for name in call.wanted if (t := leaves[name]) is not None]
    back = torch.ones_like(value) if upstream is None else upstream.to(value.dtype)
    gradients = differentiated(value, of, back, create_graph=call.how == "twice")
    squares = sum(g.square().sum() for g in gradients if g.requires_grad)
    twice = differentiated(squares, of, None) if isinstance(squares, Tensor) else [torch.zeros_like(t) for t in of]
    return [value.detach(), *[g.detach() for g in gradients], *(twice if call.how == "twice" else ())]


def differentiated(value: Tensor, of: list[Tensor], back: Tensor | None, create_graph: bool = False) -> list[Tensor]:
    """Return gradients, of 0 where there is none: a threshold leaves a target none."""
    found = torch.autograd.grad(value, of, back, allow_unused=True, create_graph=create_graph) if of else ()
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, of, strict=True)]


def written(exact: Tensor, dtype: torch.dtype) -> float:
    """Error of writing a tensor once: BOUNDS, and half a step of numbers too small for all of the dtype's digits."""
    limits = torch.finfo(dtype)
    half_a_step, size = limits.smallest_normal * limits.eps / 2, exact[exact.isfinite()].norm().item()
    return BOUNDS[dtype] + (half_a_step * exact.numel() ** 0.5 / size if size else 0.0)


def upstream_of(call: RandomCall, value: Tensor, rng: random.Random) -> Tensor:
    if not value.ndim or rng.random() < 0.3:
        return torch.full((), call.upstream, device=value.device).expand(value.shape)
    made = torch.randn(value.shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    return relaid(made.to(value.device) * call.upstream, rng)


@dataclass(frozen=True)
class Outcome:
    """wrong: what is wrong, "" where nothing is. rounded: whether the bound held only beside what one rounding of the inputs changes."""

    seed: int
    title: str
    wrong: str = ""
    rounded: bool = False


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Fill memory that torch.empty hands out with nan, so that an element that a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about algorithms that are not deterministic
        yield
    torch.use_deterministic_algorithms(False)


def check(seed: int, device: str) -> Outcome:
    """Make a call and compare value and gradients with float64: the error is at most that of plain torch in the same dtype, plus a bound.

    A value at a kink, such as the order of two equal losses, is decided by the last bit. So where the bound does not hold, the largest
    change of the exact result is added that one rounding of the inputs to float32 makes.
    """
    call, rng = None, random.Random(f"upstream {seed}")
    with poison():
        try:
            call = draw(seed, device)
            return compared(seed, call, rng)
        except Exception as raised:
            if call and "has no gradient" in str(raised) and len(call.wanted) > 1:  # what is not offered is refused by name
                return compared(seed, replace(call, wanted=call.wanted[:1]), rng)
            return Outcome(seed, call.title if call else "", f"{call}\n{type(raised).__name__}: {str(raised)[:2000]}")


def compared(seed: int, call: RandomCall, rng: random.Random) -> Outcome:
    shape = computed(replace(call, wanted=()), None)[0]
    upstream = upstream_of(call, shape, rng)
    exact, plain = (computed(call, upstream, wide=wide) for wide in (True, False))
    ours = computed(call, upstream, ours=True)
    wrong, rounded = [], False
    if call.how == "repeated" and not all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, computed(call, upstream, ours=True), strict=True)
    ):
        wrong.append("other bits at the second call")
    noisy = functools.cache(lambda: [computed(call, upstream, wide=True, noise=noise) for noise in range(8)])
    names = ["value", *call.wanted, *(call.wanted if call.how == "twice" else ())]
    for i, (name, got, reference, right) in enumerate(zip(names, ours, plain, exact, strict=True)):
        expected = reference.dtype if i == 0 else call.tensors[name].dtype  # type: ignore[union-attr]
        if got.dtype != expected or got.shape != right.shape:
            wrong.append(f"{name} is {got.dtype} {tuple(got.shape)}, not {expected} {tuple(right.shape)}")
            continue
        roundings = 1 if i == 0 or call.options.get("gradient") == "backward" else 2  # written for an upstream of 1, then multiplied
        found, allowed = error(got, right), error(reference, right) + roundings * written(right, got.dtype)
        if not found <= allowed:
            rounded, allowed = True, allowed + max(error(each[i], right) for each in noisy())
        if not found <= allowed:
            wrong.append(f"{name}: error {found:.3g}, plain torch {error(reference, right):.3g}, allowed {allowed:.3g}")
    return Outcome(seed, call.title, f"{call}\n" + "\n".join(wrong) if wrong else "", rounded)


def relaid(t: Tensor, rng: random.Random) -> Tensor:
    """Return the same numbers, in memory as they lie, or at another offset, between others, or in another order of dimensions."""
    how = rng.choice(("as it is", "as it is", "offset", "padded", "strided", "permuted", "contiguous"))
    if how == "contiguous":
        return t.contiguous()
    if how == "offset":
        start = rng.randint(1, 9)
        return t.new_zeros(t.numel() + start + 3)[start : start + t.numel()].view(t.shape).copy_(t)
    if t.ndim and how == "padded":
        low, high = rng.randint(0, 5), rng.randint(0, 5)
        return t.new_zeros((*t.shape[:-1], low + t.shape[-1] + high))[..., low : low + t.shape[-1]].copy_(t)
    if t.ndim and how == "strided":
        step = rng.randint(2, 3)
        return t.new_zeros((*t.shape[:-1], step * t.shape[-1]))[..., ::step].copy_(t)
    if t.ndim > 1 and how == "permuted":
        order = rng.sample(range(t.ndim), t.ndim)
        return t.permute(order).contiguous().permute([order.index(i) for i in range(t.ndim)])
    return t


def resized(sample: Sample, rng: random.Random, most: int) -> Sample:
    """Return a call of other sizes, of the sample's numbers: some sizes of x change, in all tensors that have them.

    What is added repeats what is there, in x by a factor, so that no two elements are equal. Class indices stay below the classes.
    """
    x, target = sample.x, sample.target
    sizes = sorted({n for n in x.shape if n > 1})
    # at least two classes: see one_class
    chosen = {n: index_of(n, rng, 2 if n in (x.shape[-1], x.shape[min(1, x.ndim - 1)]) else 1) for n in sizes if rng.random() < 0.6}
    if "indices" in sample.kwargs and x.ndim > 1:  # of classes, each at most once
        for n in x.shape[1], sample.kwargs["indices"].shape[1]:
            chosen.pop(n, None)
    while chosen and math.prod(len(chosen.get(n, range(n))) for n in x.shape) > most:
        chosen.popitem()
    if not chosen:
        return sample

    def change(t: Any) -> Any:
        if isinstance(t, Tensor):
            for dim, n in enumerate(t.shape):
                if n in chosen:
                    t = t.index_select(dim, torch.tensor(chosen[n], device=t.device))
        return t

    made, generator = change(x), torch.Generator().manual_seed(rng.randrange(2**31))
    for dim, n in enumerate(x.shape):
        if n in chosen and x.shape[-1] != 4:  # the coordinates of a box change together
            factor = 1 - 0.1 * torch.rand(made.shape[dim], generator=generator)
            made = made * factor.to(made.device, made.dtype).view(-1, *(1,) * (made.ndim - dim - 1))
    classes = min(len(chosen.get(n, range(n))) for n in x.shape) if x.ndim else 1
    if target is not None and target.ndim == x.ndim - 1:
        absent = [d for d in range(x.ndim) if (*x.shape[:d], *x.shape[d + 1 :]) == tuple(target.shape)]
        classes = made.shape[absent[-1]] if absent else classes

    def below(t: Any) -> Any:
        whole = isinstance(t, Tensor) and not t.is_floating_point() and t.dtype != torch.bool
        return torch.where(t >= classes, t % classes, t) if whole else t

    kwargs = {name: below(change(t)) if name == "target_b" else change(t) for name, t in sample.kwargs.items()}
    ignored = sample.kwargs.get("ignore_index")
    new = change(target)
    return Sample(f"{sample.name}, resized", made, new if ignored is not None and ignored > 0 else below(new), kwargs)


def index_of(n: int, rng: random.Random, least: int) -> list[int]:
    """Return a new size's entries, as numbers of the `n` that are there."""
    size = max(least, round(math.exp(rng.uniform(0, math.log(1500 if rng.random() < 0.1 else 60)))))
    return list(range(min(n, size))) + [rng.randrange(n) for _ in range(size - n)]


EXTRA: dict[str, Callable[[random.Random], Any]] = {
    "scale": lambda rng: rng.uniform(0.5, 2),
    "softcap": lambda rng: rng.uniform(3, 50),
    "z_loss": lambda rng: 10 ** rng.uniform(-4, -1),
    "label_smoothing": lambda rng: rng.uniform(0, 0.5),
    "normalizer": lambda rng: rng.choice((rng.uniform(0.5, 9), torch.tensor(rng.uniform(0.5, 9)))),
    "empty": lambda rng: rng.choice(("zero", "nan")),
}
"""Options that many losses have."""


def range_of(annotation: Any) -> Range | None:
    return next((found for each in get_args(annotation) if (found := each if isinstance(each, Range) else range_of(each))), None)


def hyper_of(definition: Callable[..., Any], name: str, rng: random.Random) -> Any:
    """Return a value of a hyper-parameter, of its range and near its default."""
    parameter = inspect.signature(definition).parameters[name]
    default, limits = parameter.default, range_of(parameter.annotation)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return rng.randint(0, 40)
    low, high = (None, None) if limits is None else ((limits.least, limits.above), (limits.most, limits.below))
    start, end = (next((v for v in pair if v is not None), None) if pair else None for pair in (low, high))
    if start is not None and end is not None:
        return start + (end - start) * rng.uniform(0.02, 0.98)
    if default is None:
        return rng.uniform(0.1, 0.9)
    return default * math.exp(rng.uniform(-0.7, 0.7)) if start is not None and default else default + rng.uniform(0, 1)


def has_gradient(loss: Loss, name: str) -> bool:
    return f"gradient of {name}" not in loss.without


def accepted(call: RandomCall) -> bool:
    """Return whether plain torch takes a call."""
    try:
        computed(replace(call, wanted=()), None, wide=True)
    except REFUSED:
        return False
    return True


def one_class(call: RandomCall) -> bool:
    """Return whether a call's logits are of one class: its gradient is that of the z-loss alone, the difference of numbers near 1."""
    x = call.tensors[call.wanted[0]]
    return x is not None and x.ndim > 0 and x.shape[min(1, x.ndim - 1)] == 1


def draw(seed: int, device: str) -> RandomCall:
    """Return the call of a number. The losses take turns."""
    rng, every = random.Random(seed), [*LOSSES.values(), *OTHERS]
    loss, dtype = every[seed % len(every)], rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    if isinstance(loss, str):
        return draw_other(loss, Make(device, dtype, seed=seed), rng)
    sample = rng.choice([s for s in samples(loss, device, dtype, seed) if device != "cpu" or s.x.numel() < 3000])
    fused = loss.template.fusing and sample.x.ndim == 2 and sample.kwargs.get("dim", -1) == -1 and rng.random() < 0.25
    found = None
    for _ in range(4):
        changed = resized(sample, rng, 2000 if device == "cpu" else 300_000)
        call = call_of(loss, changed, dtype, rng, fused)
        if accepted(call):
            found = call
            break
    if found is None:
        found = call_of(loss, sample, dtype, rng, fused)
    return with_options(loss, found, rng, device)


def call_of(loss: Loss, sample: Sample, dtype: torch.dtype, rng: random.Random, fused: bool) -> RandomCall:
    names = list(inspect.signature(loss.function).parameters)[:2]
    options = {k: v for k, v in sample.kwargs.items() if not isinstance(v, Tensor)}
    tensors = {names[0]: sample.x, names[1]: sample.target, **{k: v for k, v in sample.kwargs.items() if isinstance(v, Tensor)}}
    tensors = {name: t if t is None else relaid(t, rng) for name, t in tensors.items()}
    title = f"{loss.name}, {sample.name}, {str(dtype)[6:]}"
    wanted = [names[0]] + [
        name
        for name, t in tensors.items()
        if name != names[0] and t is not None and t.is_floating_point() and has_gradient(loss, name) and rng.random() < 0.5
    ]
    if not fused:
        return RandomCall(title, loss.function, loss.reference, tensors, (), options, tuple(wanted))
    layer, more = (
        layer_of(loss, sample.x, dtype, rng),
        {"loss_weight" if k == "weight" else k: v for k, v in tensors.items() if k != names[0]},
    )
    wanted = [*layer, *(("loss_weight" if name == "weight" else name) for name in wanted[1:])]
    options["chunk"] = rng.choice((None, rng.randint(1, sample.x.shape[0])))
    positional = ("layer input", "layer weight", *([names[1]] if sample.target is not None else []))
    more = {k: t for k, t in more.items() if t is not None}
    function = fuse_linear(loss.function)
    return RandomCall(f"{title}, fused", function, _unfused(loss), {**layer, **more}, positional, options, tuple(wanted))


def _unfused(loss: Loss) -> Callable[..., Any]:
    def reference(x: Tensor, weight: Tensor, *targets: Tensor, bias: Tensor | None = None, chunk: int | None = None, **options: Any) -> Any:
        if "loss_weight" in options:
            options["weight"] = options.pop("loss_weight")
        wide = [t if t is None or t.dtype == torch.float64 else t.float() for t in (x, weight, bias)]  # logits are not rounded
        found = loss.reference(F.linear(*wide), *targets, **options)
        return found.to(x.dtype) if loss.template.name == "elementwise" and options.get("reduction") == "none" else found

    return reference


def layer_of(loss: Loss, x: Tensor, dtype: torch.dtype, rng: random.Random) -> dict[str, Tensor]:
    """Return input, weight and perhaps bias of a layer that gives logits of the shape of x."""
    (rows, classes), generator = x.shape, torch.Generator().manual_seed(rng.randrange(2**31))
    if loss.domain != "logits":
        made = {"layer input": x.contiguous(), "layer weight": torch.eye(classes, device=x.device, dtype=dtype)}
    else:
        hidden = rng.choice((1, 5, 8, 16, 24))
        shapes = {"layer input": (rows, hidden), "layer weight": (classes, hidden), "bias": (classes,)}
        made = {name: (torch.randn(shape, generator=generator) / hidden**0.25).to(x.device, dtype) for name, shape in shapes.items()}
        if rng.random() < 0.5:
            del made["bias"]
    return {name: relaid(t, rng) for name, t in made.items()}


def with_options(loss: Loss, call: RandomCall, rng: random.Random, device: str) -> RandomCall:
    """Add a reduction, hyper-parameters, options and a way to call, as far as the loss takes them beside what the call has."""
    taken, given = inspect.signature(loss.function).parameters, {*call.options, *call.tensors}
    scalar = [r for r in loss.reductions if r != "none"]
    reduction = rng.choice(scalar if "normalizer" in given else loss.reductions)
    call = replace(call, options={**call.options, "reduction": reduction}, upstream=rng.choice((1.0, 3.0, -0.7, 0.01, 50.0)))
    drawn: list[tuple[str, Any]] = [(name, hyper_of(loss.definition, name, rng)) for name in loss.hyper if rng.random() < 0.3]
    drawn += [(name, make(rng)) for name, make in EXTRA.items() if name not in loss.hyper and rng.random() < 0.1]
    mode = rng.choice(("forward", "backward", None))
    for name, value in [*drawn, ("gradient", mode)]:
        if name not in taken or name in given or name in loss.without:
            continue
        if name == "z_loss" and one_class(call):
            continue
        more = replace(call, options={**call.options, name: value.to(device) if isinstance(value, Tensor) else value})
        call = more if accepted(more) else call
    way = rng.random()
    first, x = call.wanted[0], call.tensors[call.wanted[0]]
    dense = x is not None and x.is_contiguous()
    if has_inplace(loss) and call.function is loss.function and dense and way < 0.08:
        return replace(call, inplace=first)
    return in_a_way(call, rng, device)


def in_a_way(call: RandomCall, rng: random.Random, device: str) -> RandomCall:
    """Return the call in one of the ways that computes it. Few are traced, which takes a second."""
    ways = {"eager": 0.3, "repeated": 0.25, "plain torch": 0.12, "inference": 0.12, "twice": 0.12, "exported": 0.04, "aot_eager": 0.04}
    ways["inductor"] = 0.01 if device != "cpu" else 0.0
    (how,) = rng.choices(list(ways), list(ways.values()))
    return replace(call, how=how, dynamic=rng.choice((None, True)), wanted=() if how == "inference" else call.wanted)


SIZES = {"n": (2, 40), "c": (2, 60), "d": (2, 24), "t": (1, 12), "k": (3, 20)}
"""Of rows, classes, features, tokens and negatives, in the table below."""
LOGPS, FEATURES = "logps n", "normal n d"
OTHERS: dict[str, dict[str, str]] = {
    "bradley_terry_loss": {"rewards_chosen": "normal n", "rewards_rejected": "normal n", "margin?": "unit n"},
    "dpo_loss": {f"{model}_{which}_logps": LOGPS for model in ("policy", "reference") for which in ("chosen", "rejected")},
    "cpo_loss": {"policy_chosen_logps": LOGPS, "policy_rejected_logps": LOGPS, "policy_nll_loss?": "unit n"},
    "simpo_loss": {"policy_chosen_logps": LOGPS, "policy_rejected_logps": LOGPS},
    "tpo_loss": {"policy_chosen_logps": LOGPS, "policy_rejected_logps": LOGPS, "policy_gold_logps": LOGPS},
    "ppo_value_loss": {"values": "normal n t", "returns": "normal n t", "old_values": "normal n t", "mask?": "index 2 n t"},
    "orpo_loss": {"policy_chosen_logps": LOGPS, "policy_rejected_logps": LOGPS, "policy_nll_loss?": "unit n"},
    "kto_loss": {
        f"{model}_{which}_logps": f"logps {size}"
        for model in ("policy", "reference")
        for which, size in (("chosen", "n"), ("rejected", "k"), ("KL", "c"))
    },
    "grpo_loss": {
        "per_token_logps": "logps n t",
        "advantages": "normal n",
        "old_per_token_logps?": "logps n t",
        "ref_per_token_logps?": "logps n t",
        "mask?": "index 2 n t",
        "importance_sampling_ratio?": "unit n t",
    },
    "clip_loss": {"similarity": "normal n n"},
    "clip_loss_from_features": {"image_features": FEATURES, "text_features": FEATURES, "logit_scale?": "unit"},
    "siglip_loss_from_features": {"image_features": FEATURES, "text_features": FEATURES, "logit_scale?": "unit", "logit_bias?": "normal"},
    "info_nce_loss": {"query": FEATURES, "positive": FEATURES, "negatives?": "normal k d", "temperature?": "unit"},
    "nt_xent_loss": {"input1": FEATURES, "input2": FEATURES, "temperature?": "unit"},
    "supervised_contrastive_loss": {"features": FEATURES, "labels": "index 4 n", "temperature?": "unit"},
    "gist_embed_loss": {"query": FEATURES, "positive": FEATURES, "query_guide": "unit n 1", "positive_guide": "unit n 1"},
    "multi_similarity_loss": {"features": FEATURES, "labels": "index 4 n"},
    "circle_loss": {"features": FEATURES, "labels": "index 4 n"},
    "proxy_anchor_loss": {"features": FEATURES, "proxies": "normal c d", "labels": "index c n"},
    "koleo_loss": {"input": "normal k d"},
    "gram_anchoring_loss": {"input": "normal k n d", "target": "unit k n d"},
    "vicreg_loss": {"input1": "normal k d", "input2": "normal k d"},
    "barlow_twins_loss": {"input1": "normal k d", "input2": "normal k d"},
    "zlpr_loss": {"input": "normal n c", "target": "index 2 n c"},
    "two_way_loss": {"input": "normal n c", "target": "index 2 n c"},
    "load_balancing_loss": {"router_logits": "normal n c", "attention_mask?": "index 2 n"},
    "jsd_cross_entropy": {"input": "normal 3n c", "target": "index c n"},
    "channel_wise_kl_div": {"input": "normal n c d", "target_logits": "normal n c d"},
    "dkd_loss": {"input": "normal n c", "target_logits": "normal n c", "target": "index c n"},
    "dist_loss": {"input": "normal n c", "target_logits": "normal n c"},
    "selective_log_softmax": {"logits": "normal n c", "index": "index c n"},
    "linear_cross_entropy": {
        "input": FEATURES,
        "weight": "normal c d",
        "target": "index c n",
        "bias?": "normal c",
        "loss_weight?": "unit c",
    },
    "linear_kl_div": {"input": FEATURES, "weight": "normal c d", "teacher": "normal n c", "bias?": "normal c", "loss_weight?": "unit n"},
    "linear_js_div": {"input": FEATURES, "weight": "normal c d", "teacher": "normal n c", "bias?": "normal c"},
    "linear_total_variation": {"input": FEATURES, "weight": "normal c d", "teacher": "normal n c", "bias?": "normal c"},
    "linear_cosine_distance": {"input": FEATURES, "weight": "normal c d", "teacher": "normal n c", "bias?": "normal c"},
    "linear_draft_loss": {"input": FEATURES, "weight": "normal c d", "teacher": "normal n c", "bias?": "normal c"},
    "linear_selective_log_softmax": {"input": FEATURES, "weight": "normal c d", "index": "index c n", "bias?": "normal c"},
    "linear_entropy": {"input": FEATURES, "weight": "normal c d", "bias?": "normal c"},
    "linear_mtp_loss": {"input": "normal k n d", "weight": "normal c d", "target": "index c k n", "bias?": "normal c"},
    "linear_objective": {"input": FEATURES, "weight": "normal c d", "index": "index c n", "bias?": "normal c"},
}
"""Public losses that are not in the registry: their tensors, as kind and sizes; of an index first its number of classes."""


def mean_of_squares(logps: Tensor, entropy: Tensor | None = None) -> Tensor:
    """Return an objective of log-probabilities."""
    return (logps.square() if entropy is None else logps * entropy).mean()


def draw_other(name: str, make: Make, rng: random.Random) -> RandomCall:
    """Return a call of a public function that is not in the registry; its reference is itself under plain_torch()."""
    function, definition = getattr(functional, name), DECLARED[name].definition
    sizes = {letter: rng.randint(*ends) for letter, ends in SIZES.items()} | {"1": 1, "2": 2, "4": 4}
    sizes["3n"] = 3 * sizes["n"]

    def tensor(kind: str, *words: str) -> Tensor:
        shape = [sizes[word] for word in words]
        if kind == "index":
            return make.index(0, *shape)
        if kind == "logps":
            return -6 * make.unit(*shape) - 0.05
        return make.unit(*shape) + 0.1 if kind == "unit" else make.logits(*shape) / 2

    tensors = {}
    for argument, said in OTHERS[name].items():
        if not argument.endswith("?") or rng.random() < 0.5:
            tensors[argument.rstrip("?")] = relaid(tensor(*said.split()), rng)
    if make.dtype != torch.float32 and "logit_scale" in tensors:
        tensors["logit_scale"] = tensors["logit_scale"].float()
    floating = [k for k, t in tensors.items() if t.is_floating_point()]

    title = f"{name}, {str(make.dtype)[6:]}"
    given = {"objective": mean_of_squares, "independent": "tokens"} if name == "linear_objective" else {}
    call = RandomCall(
        title, function, in_plain_torch(function), tensors, (), given, tuple(floating[:1]), rng.choice((1.0, 3.0, -0.7, 0.01))
    )
    taken = inspect.signature(function).parameters
    drawn: list[tuple[str, Any]] = [("reduction", rng.choice(("mean", "sum", "none"))), ("gradient", rng.choice(("forward", "backward")))]
    numbers = [k for k, p in inspect.signature(definition).parameters.items() if isinstance(p.default, (bool, float))]
    drawn += [(each, hyper_of(definition, each, rng)) for each in numbers if not each.startswith(("outputs", "size_average", "reduce"))]
    for option, value in drawn:
        if option in taken and option not in tensors and option not in ("inplace", "in_batch", "valid") and rng.random() < 0.6:
            more = replace(call, options={**call.options, option: value})
            call = more if accepted(more) else call
    # of features in half precision, the gradient of a temperature or scale is only as exact as that of the similarities, which is rounded
    exact = [k for k in floating[1:] if tensors[k].ndim or make.dtype == torch.float32]
    wanted = [*floating[:1], *(k for k in exact if rng.random() < 0.5)]
    more = replace(call, wanted=tuple(wanted))
    with contextlib.suppress(*REFUSED, RuntimeError):
        computed(more, None, wide=True)
        call = more
    return in_a_way(call, rng, make.device)


if __name__ == "__main__":
    where = "cuda" if torch.cuda.is_available() else "cpu"
    for number in map(int, sys.argv[1:]):
        print(f"seed {number}: {draw(number, where)}")
        outcome = check(number, where)
        print(outcome.wrong or f"right{' beside what one rounding of the inputs changes' if outcome.rounded else ''}")

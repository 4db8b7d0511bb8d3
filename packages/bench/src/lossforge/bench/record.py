"""What the bench knows of a loss, in one record: its cases, its form in plain torch, its peers and its targets.

The files of `records/` are read without torch, so that a wrong filter is answered at once. They name torch and our losses as if they had
imported them; `load` puts these into the files before anything is computed.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from lossforge import losses
else:
    torch = F = Tensor = losses = None

FP32, BF16 = "fp32", "bf16"
DTYPES = (FP32, BF16)
FUSED = ("linear", "features", "exact", "objectives", "drafts")
"""Suites of losses fused with the product that computes their logits: shapes are (…, hidden, classes), or queries, features, keys."""
SUITES = ("table", "losses", "variants", "small", "scaling", *FUSED)
GROUPED = {"clean and augmented": 3, "near rows": 2, "two halves": 2}
"""Inputs whose samples come in groups of so many."""
FEW = ("pairs", "easy and hard classes", "views", "labelled views", "labelled features", "guided features")
LEAST = dict.fromkeys(FEW, 2) | {"clean and augmented": 3, "near rows": 4, "two halves": 4}
"""The fewest samples that some inputs can be made for."""
Options = dict[str, Any]
PER_CLASS = ("weight", "log_prior", "class_counts", "center")
OF_ROWS = ("target", "teacher", "teacher_input", "own", "values", "indices")
"""Tensors of a fused loss with an entry for each row."""
UNDIVIDED = ("teacher_head", "labels", "guide")
Others = dict[str, "Tensor"]
"""The tensors of a loss beside its logits, by name."""
Call = Callable[..., "Tensor"]
Shape = tuple[int, ...]


@functools.cache
def load() -> None:
    """Give torch and our losses to the files of records."""
    import torch.nn.functional

    from lossforge import losses

    for name, module in [*sys.modules.items()]:
        if name.startswith(__name__):
            vars(module).update(torch=torch, F=torch.nn.functional, Tensor=torch.Tensor, losses=losses)


@dataclass(frozen=True)
class Case:
    """A loss on one shape and dtype.

    Attributes:
        suite: one of SUITES.
        loss: the name of its record.
        use: which model or task has that shape.
        shape: of the logits or boxes; of the input, then classes, in a suite of FUSED.
        dtype: "fp32" or "bf16".
        inputs: which entry of lossforge.bench.inputs makes targets and weights.
        variant: how it differs from the plain loss.
        options: keyword arguments of the loss.
        other: other values of some options; a second call with them should not compile again.
        whole: check the case in one piece, because the losses of its samples do not add up to its loss.
    """

    suite: str
    loss: str
    use: str
    shape: Shape
    dtype: str
    inputs: str
    variant: str = ""
    options: Options = field(default_factory=dict)
    other: Options = field(default_factory=dict)
    whole: bool = False

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def key(self) -> str:
        """Return a name that is unique within the suite."""
        return " ".join(filter(None, (self.loss, self.variant, self.size, self.dtype)))

    @property
    def fused(self) -> bool:
        return self.suite in FUSED

    def cut(self, elements: int) -> Case:
        """Shorten the leading dimensions to at most `elements` in all, for a machine without a GPU."""
        shape = list(self.shape)
        for d in range(len(shape) if len(shape) == 1 else len(shape) - 1):
            if d != 1 or len(shape) != 4 or self.fused:  # (N, C, H, W) keeps its classes
                least = LEAST.get(self.inputs, 1) if d == 0 else 1
                shape[d] = max(least, min(shape[d], shape[d] * elements // math.prod(shape)))
        shape[0] -= shape[0] % GROUPED.get(self.inputs, 1)
        return replace(self, shape=tuple(shape))


def cases(
    suite: str,
    use: str,
    shape: Shape,
    inputs: str,
    variant: str = "",
    options: Options | None = None,
    other: Options | None = None,
    dtypes: Iterable[str] = DTYPES,
    whole: bool = False,
) -> list[Case]:
    """Return a case of each dtype, whose loss its record fills in."""
    return [Case(suite, "", use, shape, dtype, inputs, variant, options or {}, other or {}, whole) for dtype in dtypes]


def summed(use: str, shape: Shape, inputs: str, options: Options | None = None, other: Options | None = None, **more: Any) -> list[Case]:
    """Return cases of the suite `losses`, whose loss is a sum where the options do not say otherwise."""
    return cases("losses", use, shape, inputs, options={"reduction": "sum"} | (options or {}), other=other, **more)


def whole(use: str, shape: Shape, inputs: str, options: Options | None = None, other: Options | None = None) -> list[Case]:
    """Return cases of the suite `losses` in which the samples of a batch depend on one another."""
    return cases("losses", use, shape, inputs, options=options, other=other, whole=True)


def layers(suite: str, use: str, shape: Shape, inputs: str, variant: str = "", options: Options | None = None) -> list[Case]:
    """Return the case of a loss fused with its layer."""
    return cases(suite, use, shape, inputs, variant, options, dtypes=[BF16])


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    Attributes:
        x: the logits or boxes, or the input (…, H) of a layer; a leaf.
        others: the loss's other tensors by argument name; its second argument is `target` and comes first, its third may be `label`.
    """

    x: Tensor
    others: Others

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def clear(self) -> None:
        """Clear the gradients, so that none add up."""
        for leaf in self.leaves:
            leaf.grad = None

    def rows(self, start: int, stop: int) -> Inputs:
        """Return samples `start` to `stop`. Tensors with an entry for each class are not cut."""
        part = {k: t[start:stop] if k not in PER_CLASS else t for k, t in self.others.items()}
        return Inputs(self.x.detach()[start:stop].requires_grad_(), part)


@dataclass(frozen=True)
class LinearInputs(Inputs):
    """The tensors of a fused case. head: the layer's weight (C, H), a leaf."""

    head: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.head

    @property
    def flat(self) -> Tensor:
        """Return the input as (N, H), without gradient."""
        return self.x.detach().flatten(0, -2)

    def part(self, start: int, end: int) -> Others:
        """Return the other tensors for rows `start` to `end`."""
        lead = self.x.ndim - 1
        part = {k: t.flatten(0, lead - 1)[start:end] for k, t in self.others.items() if k in OF_ROWS}
        return part | {k: t for k, t in self.others.items() if k in UNDIVIDED}

    def joined(self) -> LinearInputs:
        """Return the inputs of a loss that compares all rows of both matrices with all of them."""
        z = torch.cat([self.flat, self.head.detach()])
        return LinearInputs(z.requires_grad_(self.x.requires_grad), self.others, z.detach())


@dataclass(frozen=True)
class Target:
    """A limit on a figure of ours.

    Attributes:
        case: the key of a case without its loss; of a fused loss "SUITE VARIANT", for every size.
        figure: ms, share, forward_share or host_us; of a fused loss ms, peak_mib, gradient_error or weight_error.
        limit: the most that it may be, or the least share. Times are those of an H200 with lossforge.bench.report.targets.COPY_RATE.
        of: what the limit is a factor on: the same figure of a contender, of our other case with this key, or with several contenders
            of the best one; "": nothing.
        said: what a table calls that.
        contender: whose figure it is.
        plus: what is added, in MiB, or the sum of a figure with that of this contender. "weight": the weight's gradient.
        use: only cases of these uses.
        below: where the figure of `of` is below the first of these numbers, the second one is the limit.
        optional: no target where `of` was not measured.
    """

    case: str
    figure: str
    limit: float
    of: str | tuple[str, ...] = ""
    said: str = ""
    contender: str = "lossforge"
    plus: str = ""
    use: tuple[str, ...] = ()
    below: tuple[float, float] = (0.0, 0.0)
    optional: bool = False

    @property
    def at_least(self) -> bool:
        return self.figure in ("share", "forward_share")


@dataclass(frozen=True)
class Fused:
    """A loss fused with its layer, in plain torch and as ours.

    Attributes:
        rows: (logits (n, C), the tensors of these rows) → each row's contribution, (n,) or (n, 2).
        total: (contributions of all rows, all tensors) → the loss.
        ours: (inputs, how to compute it) → the loss.
        both: it is the mean of this and of the same loss of the transposed logits, of the targets' columns.
        joined: the logits are the products of all rows of input and weight with all of them.
        together: how many sequences' rows no chunk parts.
        apart: the plain form computes the logits of each entry of the first dimension alone, such as of each depth.
        backward: only backward can compute the gradient, because each token's result has its own upstream gradient.
        peers: what other libraries compute, from the inputs, by contender.
    """

    rows: Callable[[Tensor, Others], Tensor]
    total: Callable[[Tensor, Others], Tensor]
    ours: Callable[..., Tensor]
    both: bool = False
    joined: bool = False
    together: int = 0
    apart: bool = False
    backward: bool = False
    peers: Mapping[str, Callable[[LinearInputs], Tensor]] = field(default_factory=dict)

    def plain(self, input: Tensor, head: Tensor, others: Others) -> Tensor:
        """Compute the loss with torch from all logits."""
        if self.apart:
            parts = zip(input, others["target"], strict=True)
            return self.total(torch.cat([self.rows(F.linear(x, head), {"target": target}) for x, target in parts]), others)
        if self.joined:
            input = head = torch.cat([input, head])
        logits = F.linear(input, head).flatten(0, -2)
        flat = {k: t.flatten(0, input.ndim - 2) if k in ("target", "teacher") else t for k, t in others.items()}
        if "teacher_input" in flat:
            flat["teacher_input"] = flat["teacher_input"].flatten(0, -2)
        value = self.total(self.rows(logits, flat), others)
        return (value + self.total(self.rows(logits[:, : len(logits)].T, flat), others)) / 2 if self.both else value


@dataclass(frozen=True)
class Record:
    """A loss.

    Attributes:
        name: in lossforge.losses.registry, where it has one.
        title: what tables call it.
        cases: where it is measured.
        eager: (logits or boxes, target, other tensors and options by name) → the loss in plain torch, in any floating dtype, as someone
            without a kernel writes it; None: what the registry calls `like`, or all logits of `fused`.
        function: our public function, where the registry does not have the loss.
        adapt: makes of our function what takes the arguments of `eager`.
        template: losses with the same passes over memory, of whose best share of the floor this one has to reach 0.9; "": there are few.
        late: the gradient is known only when the whole batch was read.
        peers: from a case to what another library computes, None where it lacks that case; by contender.
        targets: what ours has to reach.
        fused: the loss fused with its layer.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    eager: Call | None = None
    function: str = ""
    adapt: Callable[[Call], Call] = lambda function: function
    template: str = ""
    late: bool = False
    peers: Mapping[str, Callable[[Case], Call | None]] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    fused: Fused | None = None

    @property
    def plain(self) -> Call:
        """Return the loss in plain torch, which is also the float64 reference."""
        load()
        if self.eager is None:
            from lossforge.losses.registry import LOSSES

            found = LOSSES[self.name].oracle()
            assert found is not None
            return found
        return self.eager

    @property
    def public(self) -> Call:
        """Return our function, as it is public."""
        load()
        if self.function:
            found: Call = getattr(losses, self.function)
            return found
        from lossforge.losses.registry import LOSSES

        return LOSSES[self.name].function

    @property
    def layer(self) -> Fused:
        load()
        assert self.fused is not None
        return self.fused


RECORDS: dict[str, Record] = {}
"""Every loss that is measured, by its name."""
Function = TypeVar("Function", bound=Call)


def enter(name: str, title: str, *given: list[Case], **facts: Any) -> None:
    """Enter the record of a loss that has no function of its own in plain torch."""
    RECORDS[name] = Record(name, title, tuple(replace(case, loss=name) for part in given for case in part), **facts)


def loss(name: str, title: str, *given: list[Case], **facts: Any) -> Callable[[Function], Function]:
    """Enter the record of a loss whose form in plain torch is the decorated function."""

    def decorate(function: Function) -> Function:
        enter(name, title, *given, eager=function, **facts)
        return function

    return decorate


def reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.mean()


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def one_hot(x: Tensor, target: Tensor) -> Tensor:
    """Encode class indices as one-hot rows; background rows are all zeros."""
    return target if target.is_floating_point() else (target.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)).to(x.dtype)


def of_module(module: str, name: str) -> Call:
    """Return a library's function. Only a call imports it."""
    return lambda *args, **options: getattr(importlib.import_module(module), name)(*args, **options)


def of_timm(name: str, **fixed: Any) -> Callable[[Case], Call]:
    """Return a peer that is a module class of timm. fixed: options that it needs beside the case's."""

    def call(x: Tensor, target: Tensor, **options: Any) -> Tensor:
        found: Tensor = getattr(importlib.import_module("timm.loss"), name)(**fixed, **options)(x, target)
        return found

    return lambda case: call


LARGE, ELEMENTS = (2**28,), "element-wise"
FOCAL: Options = {"alpha": 0.25, "gamma": 2.0, "reduction": "sum"}
IMAGENET = "imagenet-21k"
HIDDEN = (4096, 1024, 21841)
"""Rows, features and classes of a head of ImageNet-21k."""


def mean_of_rows(rows: Tensor, others: Others) -> Tensor:
    return rows.mean()


def summed_row(values: Tensor) -> Tensor:
    return values.sum(-1, dtype=torch.promote_types(values.dtype, torch.float32))


def of_layer(name: str, **options: Any) -> Callable[..., Tensor]:
    """Compute a loss of the registry fused with its layer."""

    def call(inputs: LinearInputs, **how: Any) -> Tensor:
        return losses.fuse_linear(RECORDS[name].public)(inputs.x, inputs.head, inputs.others["target"], **options, **how)

    return call

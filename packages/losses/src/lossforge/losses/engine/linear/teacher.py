"""Divergences of a linear layer's logits from a teacher's: from logits, from another layer, or from the K likeliest classes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.engine.linear.fuse import fused, layer_of, split
from lossforge.losses.engine.parallel import topk
from lossforge.losses.engine.parallel.divergence import over_processes, own_part
from lossforge.losses.engine.parallel.shards import Shards, local_layer


class LinearTeacher(NamedTuple):
    """A teacher's logits as a linear layer, computed by chunks. H may differ from the student's.

    Attributes:
        input: (…, H), what the teacher's head takes.
        weight: (C, H), the head's.
        bias: (C,), the head's; None for none.
        scale: above 0; the logits become scale · x, before the cap.
        softcap: above 0; the logits become softcap · tanh(x / softcap); None for none.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


class TopKTeacher(NamedTuple):
    """A teacher's top-K log-probabilities.

    Attributes:
        values: (…, K), natural logarithms of the teacher's probabilities at the loss's temperature T, `log_softmax(logits / T)` at the K;
            with `renormalize` its logits. -inf for no entry, as engines pad rows of fewer than K.
        indices: (…, K), their class indices; -1 for no entry.
    """

    values: Tensor
    indices: Tensor

    @property
    def mass(self) -> Tensor:
        """Return the sum of the teacher's probabilities at the K, (…): near 1 where a tail changes little. Of log-probabilities."""
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        return torch.where(self.indices == -1, 0.0, values.exp()).sum(-1)


Teacher = Tensor | LinearTeacher | TopKTeacher
NEEDED = "needs all of the teacher's logits, as a tensor or LinearTeacher, got a TopKTeacher"


def by_teacher(
    function: Callable[..., Any], layer: tuple[Tensor, Tensor, Tensor | None], teacher: Teacher, options: Any, **given: Any
) -> Any:
    """Check a divergence of a layer's logits from a teacher.

    Args:
        function: its definition. That of a TopKTeacher takes values and indices, and `tail`.
        layer: input, weight and bias.
        options: those of the public function.
        given: the divergence's own arguments.
    """
    layer, shards, others = local_layer(layer, options)
    own, linear = split(others)
    head, given = layer_of(*layer), {**given, **own}
    if isinstance(teacher, TopKTeacher):
        if "tail" not in (checks.keywords(function) or ()):
            name = f"linear_{function.__name__.removesuffix('_with_logits')}"
            raise TypeError(f"{name} {NEEDED}: linear_kl_div takes it")
        of_teacher = {"values": teacher.values, "indices": teacher.indices, **given}
        if not shards:
            return fused(function, head, of_teacher, linear, ("values", "indices"))
        checked = fused(function, topk.of_all_classes(shards["group"], head), of_teacher, linear, ("values", "indices"))
        return topk.over_processes(shards["group"], head, checked)
    if not isinstance(teacher, (Tensor, LinearTeacher)):
        raise TypeError(f"teacher must be logits, a LinearTeacher or a TopKTeacher, got {type(teacher).__name__}")
    hard_weight = given.pop("hard_weight", 0.0) if shards else 0.0
    if shards:
        teacher = _own(teacher, shards["group"])
    if isinstance(teacher, LinearTeacher):
        for name in ("scale", "softcap"):
            value = getattr(teacher, name)
            given[f"target_{name}"] = None if value is None else checks.number(f"teacher.{name}", value, 0.0, exclusive=True)
        given["target_logits"] = layer_of(*teacher[:3], of="teacher.")
    checked = fused(function, head, {"target_logits": teacher, **given}, linear, ("target_logits",))
    return over_processes(shards["group"], hard_weight, given["temperature_squared"], checked) if shards else checked


def _own(teacher: Tensor | LinearTeacher, shards: Shards) -> Tensor | LinearTeacher:
    """Return the teacher of this process's classes."""
    if isinstance(teacher, Tensor):
        return own_part(shards, teacher, -1, "teacher")
    bias = None if teacher.bias is None else own_part(shards, teacher.bias, 0, "teacher.bias")
    return teacher._replace(weight=own_part(shards, teacher.weight, 0, "teacher.weight"), bias=bias)

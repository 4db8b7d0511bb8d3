"""What samples of templates are made of: a call of a loss, and random tensors for one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One call of a loss: function(x, target, **kwargs)."""

    name: str
    x: Tensor
    target: Tensor | None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self, change: Callable[[Tensor], Tensor]) -> "Sample":
        """Return the same call with every floating tensor but x changed."""

        def changed(v: Any) -> Any:
            return change(v) if isinstance(v, Tensor) and v.is_floating_point() else v

        return Sample(self.name, self.x, changed(self.target), {k: changed(v) for k, v in self.kwargs.items()})


def cosines(x: Tensor) -> Tensor:
    """Return numbers as small as the cosines of random features."""
    return torch.tanh(x / 20)


DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "probabilities": torch.sigmoid,
    "log-probabilities": torch.nn.functional.logsigmoid,
    "cosines": cosines,
    "rates": torch.nn.functional.softplus,
}
"""From numbers of any size to those of a domain."""


class Make:
    """Random tensors on a device, always the same. third: the name of a loss's third tensor, where it must have one."""

    def __init__(self, device: str, dtype: torch.dtype, domain: str = "logits", seed: int = 0, third: str = "") -> None:
        self.device, self.dtype, self.domain, self.third = device, dtype, domain, third
        self.generator = torch.Generator().manual_seed(seed)

    def logits(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator) * 2
        of_domain = DOMAINS.get(self.domain)
        return (x if of_domain is None else of_domain(x)).to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device, self.dtype)

    def boxes(self, *shape: int) -> Tensor:
        """Corners of valid boxes, of which many overlap; as (cx, cy, w, h) they are valid too."""
        low, sides = (torch.rand((*shape, 2), generator=self.generator) for _ in range(2))
        return torch.cat([low * 100, low * 100 + sides * 60 + 1], -1).to(self.device, self.dtype)

    def tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=self.dtype)

    def index(self, low: int, classes: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, classes, shape, generator=self.generator).to(self.device, dtype)

    def large(self, *shape: int) -> Tensor:
        """Return logits or what the domain has, made on the device; not always the same."""
        x = torch.randn(shape, device=self.device)
        of_domain = {**DOMAINS, "log-probabilities": lambda x: x.log_softmax(-1)}.get(self.domain)
        return (x if of_domain is None else of_domain(x)).to(self.dtype)


def large_indices(make: Make, rows: int, classes: int) -> Sample:
    """Return a large call with a class index a row."""
    return Sample("class index", make.large(rows, classes), torch.randint(0, classes, (rows,), device=make.device))

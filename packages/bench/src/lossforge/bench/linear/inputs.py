"""A linear layer, its input and a loss's other tensors, seeded and random."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import Case
from lossforge.bench.inputs import IGNORE_INDEX, TORCH_DTYPES

OF_ROWS = ("target", "teacher", "teacher_input", "own")
"""Tensors with an entry for each row."""
UNDIVIDED = ("teacher_head", "labels", "guide")


@dataclass(frozen=True)
class LinearInputs:
    """The tensors of a fused case.

    Attributes:
        input: (…, H), a leaf.
        head: the layer's weight (C, H), a leaf.
        others: the loss's other tensors by name.
    """

    input: Tensor
    head: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """Return the input as (N, H), without gradient."""
        return self.input.detach().flatten(0, -2)

    def part(self, start: int, end: int) -> dict[str, Tensor]:
        """Return the other tensors for rows `start` to `end`."""
        lead = self.input.ndim - 1
        part = {k: t.flatten(0, lead - 1)[start:end] for k, t in self.others.items() if k in OF_ROWS}
        return part | {k: t for k, t in self.others.items() if k in UNDIVIDED}

    def joined(self) -> "LinearInputs":
        """Return the inputs of a loss that compares all rows of both matrices with all of them."""
        z = torch.cat([self.rows, self.head.detach()])
        return LinearInputs(z.requires_grad_(self.input.requires_grad), z.detach(), self.others)

    def clear(self) -> None:
        self.input.grad = self.head.grad = None


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> LinearInputs:
    """Make a case's tensors, such that the logits are about normal."""
    generator = torch.Generator(device).manual_seed(seed)
    *lead, hidden, classes = case.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=TORCH_DTYPES[case.dtype], generator=generator)

    def layer() -> tuple[Tensor, Tensor]:
        return normal(*lead, hidden), normal(classes, hidden).mul_(hidden**-0.5)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    def index() -> Tensor:
        return torch.randint(classes, lead, device=device, generator=generator)

    def half_ignored() -> dict[str, Tensor]:
        return {"target": index().masked_fill_(uniform(*lead) < 0.5, IGNORE_INDEX)}

    def tokens() -> dict[str, Tensor]:
        return {"target": index(), "factor": uniform(*lead)}

    def pairs() -> dict[str, Tensor]:
        """Give both of a pair the same reference. Liger takes no reference, and so computes the same loss."""
        return {"target": index(), "reference": -uniform(lead[0] // 2).repeat(2)}

    def rollouts() -> dict[str, Tensor]:
        """Draw log-probabilities near the policy's, for the policy that drew the tokens and for the reference."""
        target = index()
        found = token_logps(x.flatten(0, -2), head, target.flatten()).view(lead)
        old, reference = (found + 0.1 * (uniform(*lead) - 0.5) for _ in range(2))
        return {"target": target, "old": old, "reference": reference, "advantage": 2 * uniform(lead[0]) - 0.5}

    def linear_teacher() -> dict[str, Tensor]:
        return dict(zip(("teacher_input", "teacher_head"), layer(), strict=True))

    def views() -> dict[str, Tensor]:
        """Return, for the views of the first matrix and then of the second, which rows they are and which show the same sample."""
        own = torch.arange(2 * lead[0], device=device)
        return {"own": own, "target": own.roll(lead[0])}

    def groups(several: int) -> Tensor:
        """Give about every second row the label of another one."""
        return torch.randint(max(1, several // 2), (several,), device=device, generator=generator)

    def of_proxies() -> Tensor:
        return torch.randint(lead[0], (classes,), device=device, generator=generator)

    makers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "classes": lambda: {"target": index()},
        "large logits": lambda: {"target": index()},
        "half ignored": half_ignored,
        "tokens": tokens,
        "tokens without gradient": tokens,
        "pairs": pairs,
        "rollouts": rollouts,
        "dense": lambda: {"target": uniform(*lead, classes).to(TORCH_DTYPES[case.dtype])},
        "linear teacher": linear_teacher,
        "labelled linear teacher": lambda: linear_teacher() | {"target": index()},
        "teacher": lambda: {"teacher": normal(*lead, classes)},
        "features": lambda: {"target": torch.arange(lead[0], device=device)},
        "labelled features": lambda: {"target": torch.arange(lead[0], device=device), "labels": groups(lead[0])},
        "guided features": lambda: views() | {"guide": F.normalize(normal(2 * lead[0], 64), dim=1)},
        "proxies and features": lambda: {"own": torch.arange(lead[0], device=device), "labels": of_proxies()},
        "views": views,
        "labelled views": lambda: views() | {"labels": torch.randint(1000, lead, device=device, generator=generator).repeat(2)},
    }
    x, head = layer()
    of_views, of_features = case.inputs.endswith("views") or case.inputs == "guided features", case.inputs.endswith("features")
    if of_views or case.inputs == "labelled features":
        head = head[: len(x)]  # one of each kind; a case that was cut for a CPU has more
    if of_features or of_views:  # unit vectors, of which pairs are nearer than others
        x = F.normalize(x, dim=1)
        head[: len(x)] += 0.5 * x[: len(head)]
        head = F.normalize(head, dim=1)
    if case.inputs == "large logits":
        x *= 32
    others = makers[case.inputs]()
    wanted = case.inputs != "tokens without gradient"
    return LinearInputs(x.requires_grad_(wanted), head.requires_grad_(wanted), others)


@torch.no_grad()
def token_logps(rows: Tensor, head: Tensor, target: Tensor, step: int = 1024) -> Tensor:
    parts = zip(rows.split(step), target.split(step), strict=True)
    return torch.cat([-F.cross_entropy(F.linear(x, head).float(), t, reduction="none") for x, t in parts])

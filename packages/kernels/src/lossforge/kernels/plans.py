"""The one cache before Triton's own: what is known of a call, under all that it follows from. Needs neither Triton nor a GPU."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

MOST_PLANS = 4096
"""How many plans are kept, the first made go first: shapes and hyper-parameters may vary without end."""
PLANS: dict[Any, Any] = {}
"""Plans of a template's launches under the key of its call, False where there can be none; and public calls under their arguments."""


def remember(key: Any, plan: Any) -> None:
    """Keep a plan under its key."""
    if len(PLANS) >= MOST_PLANS:
        PLANS.pop(next(iter(PLANS)), None)
    PLANS[key] = plan


def layout(t: Tensor | None) -> Any:
    """Return what a plan depends on of a tensor."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15)


def call_key(name: str, formula: str, tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> tuple[Any, ...]:
    """Return all that the launches of a template's call follow from but the addresses of its tensors."""
    return name, formula, *map(layout, tensors), *[tuple(v) if type(v) is list else v for v in numbers]

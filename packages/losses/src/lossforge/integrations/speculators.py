"""speculators: the losses of its draft models by name, computed by ours.

    from lossforge.integrations import speculators

    speculators.patch()        # before training; with its default, --loss-implementation fused

Each is a function of logits and the verifier's logits, (1, T, V), that returns one number a token. Weights, decays and metrics stay
speculators'. From hidden states, without logits, `linear_draft_loss` computes the same.

Tested with speculators 0.9.0.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lossforge.losses import cross_entropy, draft_loss_with_logits, js_div_with_logits, kl_div_with_logits
from lossforge.patch.patching import Patch, Replacement
from lossforge.patch.patching import patch as patch_names

TESTED = "0.9"
LEAST = 1e-5
"""Below this acceptance speculators' `nla` is constant."""


def _rows(loss: Callable[..., Any], logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    found: Tensor = loss(logits.flatten(0, -2), targets.flatten(0, -2).detach(), reduction="none", **options)
    return found.view(logits.shape[:-1])


def _of_logits(loss: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    def make(own: Any) -> Any:
        @functools.wraps(own)
        def ours(logits: Tensor, targets: Tensor) -> Tensor:
            return _rows(loss, logits, targets, **options)

        return ours

    return make


def _of_likeliest(own: Any) -> Any:
    @functools.wraps(own)
    def fused_ce_loss(logits: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = cross_entropy(logits.flatten(0, -2), targets.argmax(-1).flatten(), reduction="none")
        return found.view(logits.shape[:-1])

    return fused_ce_loss


def _negative_log(own: Any) -> Any:
    @functools.wraps(own)
    def fused_nla_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return _rows(draft_loss_with_logits, logits, targets, kind="log_tv").clamp(max=-math.log(LEAST))

    return fused_nla_loss


def _hybrid(own: Any) -> Any:
    @functools.wraps(own)
    def fused_lk_hybrid_loss(logits: Tensor, targets: Tensor, eta: float = 3.0) -> Tensor:
        return _rows(draft_loss_with_logits, logits, targets, kind="lk", eta=eta)

    return fused_lk_hybrid_loss


_BY_NAME = {
    "kl_div": _of_logits(kl_div_with_logits),
    "reverse_kl_div": _of_logits(kl_div_with_logits, reverse=True),
    "js_div": _of_logits(js_div_with_logits),
    "tv": _of_logits(draft_loss_with_logits, kind="tv"),
    "ce": _of_likeliest,
    "nla": _negative_log,
}
REPLACED = (
    *(Replacement(f"speculators.losses.fused:fused_{name}_loss", make, "(logits, targets)") for name, make in _BY_NAME.items()),
    Replacement("speculators.losses.fused:fused_lk_hybrid_loss", _hybrid, "(logits, targets, eta=3.0)"),
)


def patch(force: bool = False) -> Patch:
    """Replace speculators' fused losses by ours.

    Args:
        force: go on where speculators has other parameters than those that were tested.

    Returns:
        a handle: `undo()` puts speculators' own functions back.

    Raises:
        ModuleNotFoundError: speculators is not installed.
        IntegrationError: speculators is not as it was tested; the message says what differs.
    """
    return patch_names("speculators", TESTED, REPLACED, force=force)

"""torchtitan: the cross entropy of a language model without its logits, as a configuration of its loss.

    from lossforge.integrations import torchtitan

    config.loss = torchtitan.Loss.Config()            # in the place of ChunkedLossWrapper.Config() or CrossEntropyLoss.Config()

torchtitan gives it the model's head, as to its ChunkedLossWrapper. The loss is computed in one call of the head, so that FSDP2 gathers the
weight and scatters its gradient once. Where the head is spread over a tensor-parallel group, torchtitan's ChunkedLossWrapper runs.

Tested with torchtitan 0.3.0.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lossforge.losses import linear_cross_entropy
from lossforge.patch.patching import Replacement, check, say_once

TESTED = "0.3"
CALL = "(self, pred, labels, global_valid_tokens=None, **loss_inputs)"


def __getattr__(name: str) -> Any:
    if name != "Loss":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _loss_class()


class _Asked:
    """What a call asks of the head: kept from the call's arguments, whose numbers FSDP casts to the dtype of its parameters."""

    def __init__(self, labels: Tensor, normalizer: Any, z_loss: float) -> None:
        self.labels, self.z_loss = labels, z_loss
        self.reduced = {"reduction": "sum"} if normalizer is None else {"normalizer": normalizer}

    def of(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        given: Any = {"z_loss": self.z_loss, "empty": "zero", **self.reduced}
        return linear_cross_entropy(hidden, head.weight, self.labels, head.bias, **given)


def _own_forward(head: nn.Linear, hidden: Tensor, asked: _Asked | None = None) -> Tensor:
    return nn.Linear.forward(head, hidden) if asked is None else asked.of(head, hidden)


def _why_not(head: Any, hidden: Tensor) -> str:
    """Return why a head cannot compute the loss; "" if it can."""
    import spmd_types
    from torch.distributed.tensor import DTensor
    from torchtitan.distributed.spmd_types import spmd_mesh_size
    from torchtitan.distributed.utils import get_spmd_backend

    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"the head is a {type(head).__module__}.{type(head).__qualname__}, not a linear layer"
    if not isinstance(head.forward, functools.partial) and "forward" in vars(head):
        return "the head has a forward of its own"
    mesh = head.weight.device_mesh if isinstance(head.weight, DTensor) else None
    spread = mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1
    if spread or isinstance(hidden, DTensor) or (get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1):
        return "the head's classes lie on several processes"
    return "types of SPMD are checked" if spmd_types.is_type_checking() else ""


@functools.cache
def _loss_class() -> Any:
    check("torchtitan", TESTED, [Replacement("torchtitan.components.loss:ChunkedLossWrapper.__call__", None, CALL)])
    from torchtitan.components.loss import ChunkedLossWrapper

    class Loss(ChunkedLossWrapper):
        """Cross entropy of a language model, from hidden states and the head."""

        @dataclass(kw_only=True, slots=True)
        class Config(ChunkedLossWrapper.Config):
            """The loss's configuration. num_chunks and loss_fn are used where torchtitan's own loss runs."""

            z_loss: float = 0.0
            """The factor of the squared log-sum-exp of each token that is added."""

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            super().__init__(config, compile_config=compile_config)
            self.z_loss = config.z_loss

        def __call__(self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any) -> Any:
            head: Any = self.lm_head
            if head is None:
                raise RuntimeError("the loss has no head yet: call set_lm_head(model.lm_head), as torchtitan's trainer does")
            if why := _why_not(head, pred):
                if self.z_loss:
                    raise ValueError(f"z_loss={self.z_loss} needs lossforge's loss, and torchtitan's own runs: {why}")
                say_once(f"torchtitan's own ChunkedLossWrapper runs: {why}")
                return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
            if "forward" not in vars(head):
                head.forward = functools.partial(_own_forward, head)
            return head(pred, _Asked(labels, global_valid_tokens, self.z_loss)), {}

    Loss.__qualname__ = "Loss"
    return Loss

"""verl: log-probabilities and entropies of its fused head, computed by ours.

    from lossforge.integrations import verl

    verl.patch()                      # in each worker; with model.use_fused_kernels=True

Both backends of `fused_kernel_options.impl_backend` are replaced: "torch" (and "liger"), a module, and "triton", a function. The latter
takes a process group, whose processes share the classes. As verl's does, it then gives each process its own part of the hidden states'
gradient.

Tested with verl 0.9.1.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lossforge.losses import linear_selective_log_softmax
from lossforge.patch.patching import Patch, Replacement, say_once
from lossforge.patch.patching import patch as patch_names

TESTED = "0.9"


Temperature = float | Tensor
"""A number, or a tensor with one, one a sample, or one a token."""


def _log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Temperature, group: Any = None) -> tuple[Tensor, Tensor]:
    index = labels.long().view(hidden.shape[:-1])
    options: Any = {"temperature": _of_tokens(temperature, index), "outputs": ("entropy",)}
    if group is not None:
        options |= {"group": group, "classes": len(weight) * dist.get_world_size(group), "sum_input_gradient": False}
    logps, entropy = linear_selective_log_softmax(hidden, weight.to(hidden.dtype), index, **options)
    return logps, entropy


def _of_tokens(temperature: Temperature, index: Tensor) -> Temperature:
    """Return a tensor's temperatures as one a token."""
    if not isinstance(temperature, Tensor):
        return temperature
    if temperature.numel() == index.numel():
        return temperature.reshape(index.shape)
    samples = temperature.reshape(-1, *(1,) * (index.ndim - 1))  # one a sample, or one for all
    return samples.expand(index.shape)


def _module(own: Any) -> Any:
    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: Temperature = 1.0
    ) -> tuple[Tensor, Tensor]:
        return _log_probs(hidden_states, vocab_weights, input_ids, temperature)

    return forward


def _function(own: Any) -> Any:
    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: Temperature = 1.0,
        reduction: str = "none",
        dist_process_group: Any = None,
    ) -> tuple[Tensor, Tensor]:
        if reduction.lower() != "none":
            say_once(f"verl's own linear_cross_entropy runs: reduction={reduction!r} is not in lossforge")
            found: tuple[Tensor, Tensor] = own(hidden, weight, labels, temperature, reduction, dist_process_group)
            return found
        logps, entropy = _log_probs(hidden, weight, labels, temperature, dist_process_group)
        return logps.flatten(), entropy.flatten()  # as verl's kernel gives them

    return linear_cross_entropy


REPLACED = (
    Replacement(
        "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward",
        _module,
        "(self, hidden_states, vocab_weights, input_ids, temperature=1.0)",
    ),
    Replacement(
        "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy",
        _function,
        "(ctx, hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None)",
        method="__self__.forward",  # of the autograd function whose `apply` it is
    ),
)


def patch(force: bool = False) -> Patch:
    """Replace the functions of verl's fused heads by ours. Call it in each worker's process.

    Args:
        force: go on where verl has other parameters than those that were tested.

    Returns:
        a handle: `undo()` puts verl's own functions back.

    Raises:
        ModuleNotFoundError: verl is not installed.
        IntegrationError: verl is not as it was tested; the message says what differs.
    """
    return patch_names("verl", TESTED, REPLACED, force=force)

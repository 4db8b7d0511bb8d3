"""Liger: its cross entropies, of logits and of hidden states, computed by ours.

    from lossforge.integrations import liger

    liger.patch()                     # then Trainer(use_liger_kernel=True), axolotl, LLaMA-Factory, ms-swift … as before

Liger's functions and modules keep their names, arguments and results, so that what calls them finds ours: the forwards that
`apply_liger_kernel_to_*` gives to models, and torch's `cross_entropy` where `cross_entropy=True` sets Liger's in its place. The order of
both patches does not matter. Liger's other kernels stay.

Tested with liger-kernel 0.8.1 and 0.8.5.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.losses import cross_entropy, linear_cross_entropy
from lossforge.losses.base.option_types import RowOutput
from lossforge.patch.patching import Patch, Replacement, version_of
from lossforge.patch.patching import patch as patch_names

TESTED = "0.8.1, 0.8.5"


def _results(
    found: Any, loss: Tensor, z_loss: Tensor | None, target: Tensor, asked: Sequence[RowOutput], reduction: str, ignore_index: int
) -> Any:
    """Return the loss; where more is asked for, Liger's record of it. found: our record."""
    if not asked:
        return loss
    import liger_kernel.transformers.functional as functional

    counts = target != ignore_index
    accuracy = None
    if "correct" in asked:
        correct = (found.correct & counts).float()
        accuracy = correct if reduction == "none" else correct.sum() / counts.sum()
    predicted = found.argmax.where(counts, -1) if "argmax" in asked else None
    return functional.CrossEntropyOutput(loss=loss, z_loss=z_loss, token_accuracy=accuracy, predicted_tokens=predicted)


def _asked(z_loss: bool, correct: bool, argmax: bool) -> list[RowOutput]:
    wanted: dict[RowOutput, bool] = {"z_loss": z_loss, "correct": correct, "argmax": argmax}
    return [name for name, asked in wanted.items() if asked]


def _of_hidden(own: Any) -> Any:
    def liger_fused_linear_cross_entropy(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Any = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        chunk_mem_const: int = 1,
    ) -> Any:
        asked = _asked(return_z_loss, return_token_accuracy, return_predicted_tokens)
        weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        capped: Any = {"ignore_index": ignore_index, "softcap": softcap, "empty": "zero"}
        added: Any = {"loss_weight": ce_weight, "label_smoothing": label_smoothing, "z_loss": lse_square_scale}
        within: Any = "none" if use_token_scaling else reduction
        more: Any = {"reduction": within, "outputs": (*asked[:return_z_loss], "lse", *asked[return_z_loss:])}
        if accum_dtype == torch.float32 and within != "none":
            more["accumulate"] = "float32"
        found: Any = linear_cross_entropy(input, weight, target, bias, **capped, **added, **more)
        loss, z_loss = found.loss, found.z_loss if return_z_loss else None
        if use_token_scaling:  # each token's loss times its probability, which is not differentiated
            if ce_weight is None and not label_smoothing and not lse_square_scale:
                nll = loss.detach()
            else:
                with torch.no_grad():
                    nll = linear_cross_entropy(input, weight, target, bias, reduction="none", **capped)
            counts = target != ignore_index
            factor = torch.where(counts, (-nll).exp(), 0.0)
            # Liger divides what is weighted by the weights' sum, and the rest by the number of tokens.
            tokens = counts.sum().clamp(min=1)
            divisor = tokens if ce_weight is None else ce_weight[target.where(counts, 0)].where(counts, 0).sum()
            squares = lse_square_scale * found.lse.square() if ce_weight is not None and lse_square_scale else None
            loss = _reduced(loss if squares is None else loss - squares, factor, divisor, reduction)
            if squares is not None:
                loss = loss + _reduced(squares, factor, tokens, reduction)
            z_loss = None if z_loss is None else _reduced(z_loss, factor, tokens, reduction)
        return _results(found, loss, z_loss, target, asked, reduction, ignore_index)

    return liger_fused_linear_cross_entropy


def _reduced(loss: Tensor, factor: Tensor, divisor: Tensor, reduction: str) -> Tensor:
    scaled = loss * factor
    if reduction == "none":
        return scaled
    return scaled.sum() / divisor if reduction == "mean" else scaled.sum()


def _of_logits(own: Any) -> Any:
    def liger_cross_entropy(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: Any = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> Any:
        asked = _asked(return_z_loss, return_token_accuracy, return_predicted_tokens)
        given: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap, "empty": "zero", "reduction": reduction}
        added: Any = {"label_smoothing": label_smoothing, "z_loss": lse_square_scale}
        found: Any = cross_entropy(input, target, weight, **given, **added, outputs=asked)
        if not asked:
            return found
        return _results(found, found.loss, found.z_loss if return_z_loss else None, target, asked, reduction, ignore_index)

    return liger_cross_entropy


OPTIONS = ("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "return_z_loss")
RETURNED = ("return_token_accuracy", "return_predicted_tokens")


def _module_of_hidden(own: Any) -> Any:
    compute = _of_hidden(own)

    def forward(self: Any, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        names = ("ce_weight", *OPTIONS, "accum_dtype", "use_token_scaling", *RETURNED)
        return compute(_input, lin_weight, target, bias, **{name: getattr(self, name) for name in names})

    return forward


def _module_of_logits(own: Any) -> Any:
    compute = _of_logits(own)

    def forward(self: Any, _input: Tensor, target: Tensor) -> Any:
        return compute(_input, target, **{name: getattr(self, name) for name in ("weight", *OPTIONS, *RETURNED)})

    return forward


OF_HIDDEN = tuple(
    "(input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', "
    "softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False, "
    f"return_predicted_tokens=False{last})"
    for last in ("", ", chunk_mem_const=1")  # of 0.8.1, and of 0.8.5
)
OF_LOGITS = (
    "(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', label_smoothing=0.0, "
    "lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False)"
)
FUNCTIONS = "liger_kernel.transformers.functional"
REPLACED = (
    Replacement(f"{FUNCTIONS}:liger_fused_linear_cross_entropy", _of_hidden, OF_HIDDEN),
    Replacement(f"{FUNCTIONS}:liger_cross_entropy", _of_logits, OF_LOGITS),
    Replacement(
        "liger_kernel.transformers.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyLoss.forward",
        _module_of_hidden,
        "(self, lin_weight, _input, target, bias=None)",
    ),
    Replacement("liger_kernel.transformers.cross_entropy:LigerCrossEntropyLoss.forward", _module_of_logits, "(self, _input, target)"),
)


def patch(force: bool = False) -> Patch:
    """Replace Liger's cross entropies by ours, in its functions, its modules and the models that it has patched or will patch.

    Args:
        force: go on where Liger has other parameters than those that were tested.

    Returns:
        a handle: `undo()` puts Liger's own functions back.

    Raises:
        ModuleNotFoundError: Liger is not installed.
        IntegrationError: Liger is not as it was tested; the message says what differs.
    """
    version_of("liger-kernel")
    import liger_kernel.transformers.functional as functional

    set_in_torch = torch.nn.functional.cross_entropy is functional.liger_cross_entropy
    of_torch = [Replacement("torch.nn.functional:cross_entropy", _of_logits)] if set_in_torch else []
    return patch_names("liger-kernel", TESTED, [*REPLACED, *of_torch], force=force)

"""A script as users write it, for type checkers: what each call gives is known to them."""

from typing import Any, assert_type

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor, nn

from lossforge.losses import (
    CrossEntropyLoss,
    CrossEntropyOutput,
    DPOLoss,
    FusedLinear,
    HuberLoss,
    KLDivLoss,
    LinearCrossEntropyLoss,
    LinearTeacher,
    SigmoidFocalLoss,
    TokenLogps,
    cross_entropy,
    dice_loss,
    elementwise,
    fuse_linear,
    generalized_box_iou_loss,
    linear_cross_entropy,
    linear_kl_div,
    linear_selective_log_softmax,
    nll_loss,
    rowwise,
    selective_log_softmax,
    sigmoid_focal_loss,
)
from lossforge.losses.base.option_types import RowOutput


@elementwise(hyper={"delta": 1.0})
@triton.jit  # type: ignore[untyped-decorator]
def charbonnier(x: Any, y: Any, delta: Any) -> Any:
    return tl.sqrt((x - y) * (x - y) + delta * delta) - delta


@rowwise
@triton.jit  # type: ignore[untyped-decorator]
def linear(z: Any) -> Any:
    return 1.0 - tl.exp(-z)


model = nn.Linear(8, 4)
criterion = CrossEntropyLoss(torch.ones(4), label_smoothing=0.1, gradient="backward")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, t in [(torch.rand(5, 8), torch.randint(0, 4, (5,)))]:
    loss = assert_type(criterion(model(x), t), Tensor)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    criterion.label_smoothing = 0.0
    assert_type(criterion.ignore_index, int)
    assert_type(criterion.weight, Tensor | None)

logits, target = torch.rand(5, 4), torch.tensor([0, 1, 2, 3, 0])
assert_type(cross_entropy(logits, target, None, reduction="sum"), Tensor)
output = cross_entropy(logits, target, outputs=("lse",), z_loss=1e-4)
assert_type(output, CrossEntropyOutput)
assert_type(output.loss, Tensor)
assert_type(output.lse, Tensor)
wanted: list[RowOutput] = ["correct"]
assert_type(cross_entropy(logits, target, outputs=wanted), Tensor | CrossEntropyOutput)
with_outputs = CrossEntropyLoss(outputs=("entropy",), ignore_index=-1)
assert_type(with_outputs(logits, target), CrossEntropyOutput)
assert_type(selective_log_softmax(logits, target), Tensor)
assert_type(selective_log_softmax(logits, target, outputs=("entropy",)), TokenLogps)
logps, entropies = selective_log_softmax(logits, target, outputs=("entropy",))
assert_type(entropies, Tensor)

assert_type(sigmoid_focal_loss(logits, target, reduction="mean", normalizer=3.0, empty="zero"), Tensor)
assert_type(generalized_box_iou_loss(torch.rand(3, 4), torch.rand(3, 4), format="cxcywh", gradient="forward", reduction="mean"), Tensor)
assert_type(dice_loss(torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), activation="sigmoid"), Tensor)
assert_type(nll_loss(logits.log_softmax(1), target), Tensor)
assert_type(SigmoidFocalLoss(torch.ones(4), inplace=True)(logits * 1, target, normalizer=2), Tensor)
assert_type(HuberLoss(delta=0.5)(logits, logits), Tensor)
assert_type(KLDivLoss(reduction="batchmean")(logits.log_softmax(1), logits.softmax(1)), Tensor)
assert_type(DPOLoss(beta=0.2)(logits, logits, logits, logits), Tensor)

hidden, head = torch.rand(5, 8), nn.Linear(8, 4)
assert_type(linear_cross_entropy(hidden, head.weight, target, head.bias, chunk=2, label_smoothing=0.1, valid=5), Tensor)
assert_type(linear_cross_entropy(hidden, head.weight, target, outputs=("lse",), softcap=30.0), CrossEntropyOutput)
assert_type(linear_cross_entropy(hidden, head.weight, target, outputs=wanted), Tensor | CrossEntropyOutput)
assert_type(linear_selective_log_softmax(hidden, head.weight, target, temperature=0.7), Tensor)
assert_type(linear_selective_log_softmax(hidden, head.weight, target, outputs=("entropy",)), TokenLogps)
assert_type(linear_kl_div(hidden, head.weight, LinearTeacher(hidden, head.weight), accumulate="weight"), Tensor)
assert_type(LinearCrossEntropyLoss(label_smoothing=0.1, chunk=2)(hidden, head.weight, target, head.bias, valid=5), Tensor)
assert_type(LinearCrossEntropyLoss(outputs=("correct",))(hidden, head.weight, target), CrossEntropyOutput)
fused = FusedLinear(CrossEntropyLoss(), head)
fused(hidden, target).backward()
fuse_linear(sigmoid_focal_loss)(hidden, head.weight, target, bias=head.bias, gamma=1.5, reduction="sum").backward()

assert_type(charbonnier(logits, logits, delta=0.5, reduction="sum"), Tensor)
assert_type(linear(logits, target), Tensor)
own = charbonnier.module(delta=0.1, reduction="sum")
own.delta = 0.2
assert_type(own(logits, logits), Tensor)

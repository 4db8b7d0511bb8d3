"""Docstrings of the losses, completed: what several losses share is written once, here.

A loss's own docstring has its formula, and a line for each argument that it alone has. `complete` adds the others in the order of the
signature, what is returned and raised, an example, and the source. `help()` and the documentation show the whole.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

COMMON = {
    "input": "logits, of any floating dtype.",
    "reduction": '"mean", "sum" or "none".',
    "empty": 'what a mean over nothing gives, where its divisor is 0: "nan", as in torch, or "zero", with gradient 0.',
    "gradient": (
        '"forward" writes the gradient in the launch of the loss, "backward" computes it when it is asked for. Default: forward where the\n'
        "result is a scalar, but for float16 and under torch.compile."
    ),
    "inplace": (
        "the gradient takes the memory of the logits, which must be an intermediate result. A gradient that arrives from a later use\n"
        "of them raises; a plain read gets the gradient."
    ),
    "validate": (
        "check class indices on CUDA too, which waits for the device. Default: the environment's LOSSFORGE_VALIDATE. Unchecked, a row\n"
        "with an index out of range has loss and gradient nan."
    ),
    "normalizer": "number or 0-d tensor that takes the place of the mean's divisor: Σ loss / normalizer.",
    "target_b": "with class indices, the second class of a mixup pair, in the shape of target.",
    "lam": "λ of a mixup pair, in [0, 1]: a number, one a sample, or one a row. The target is λ times target plus 1 - λ times target_b.",
    "dim": "dimension of the classes.",
    "score": "with class indices, the target of each row's class, in the shape of target; without it 1.",
    "size_average": "torch's deprecated argument, in place of reduction.",
    "reduce": "torch's deprecated argument, in place of reduction.",
    "ignore_index": "class index of the rows that add nothing, whatever their logits hold.",
    "scale": "the logits become scale · x.",
    "softcap": "the logits become softcap · tanh(scale · x / softcap); None for none.",
    "z_loss": "coefficient of lse², averaged over the rows not ignored.",
    "return_z_loss": "give the part of z_loss beside the loss.",
    "return_lse": "give log-sum-exp of each row as well, differentiable.",
    "return_entropy": "give the entropy of each row's softmax as well, differentiable.",
    "return_correct": "give as well whether each row's largest logit is the target's.",
}
ELEMENT = {
    "input": "of any shape and floating dtype.",
    "target": "in the shape of input, dense; or class indices in its shape without dim, -1 background and -2 ignored.",
    "weight": "broadcasts to input, a factor of each element's loss.",
}
ROW = {
    "input": "logits (C,), (N, C) or (N, C, d…), of any floating dtype.",
    "target": "class indices of any integer dtype, in the shape of input without the classes.",
    "weight": "(C,), a factor of each class, which the mean divides by.",
}
BOX = {
    "boxes1": "(..., 4), of a floating dtype, in the units of an image or as fractions of it; gets a gradient.",
    "boxes2": "(..., 4), likewise; gets a gradient, too.",
    "reduction": '"none", "mean" over the pairs, or "sum".',
    "eps": "of at least 0; a denominator (an area, a squared length) below it is eps.",
    "weight": "one a pair, or what broadcasts to (...). A mean divides by the number of pairs also then; see normalizer.",
    "format": '"xyxy" (x1, y1, x2, y2), x1 < x2 and y1 < y2, or "cxcywh" (centre, width, height).',
    "empty": 'what a mean over no pairs gives: "zero", as in torchvision, or "nan".',
    "validate": (
        "raise a ValueError where a box is flipped, x2 < x1 or y2 < y1, which waits for the device. Default: the environment's\n"
        "LOSSFORGE_VALIDATE. Unchecked, such a pair has loss and gradient nan. torch.compile leaves the check out."
    ),
}
OVERLAP = {
    "input": "logits (N, C, d…) with any number of spatial dimensions; probabilities where activation is None.",
    "target": (
        "class indices (N, d…) or (N, 1, d…) of any integer dtype; or dense (N, C, d…): floating, bool, or with C > 1 integers. For one\n"
        "channel, indices are the mask itself: 1 is the channel's class, 0 background."
    ),
    "activation": '"softmax" over the classes, of which there must be two or more, "sigmoid" of each, or None.',
    "include_background": "class 0 counts.",
    "squared_pred": "P = Σ p² and Y = Σ y² in place of Σ p and Σ y.",
    "reduction": '"mean" and "sum" over images and classes, or "none": (N, C), with batch (C,), without class 0 where it does not count.',
    "batch": "a region is a class over all images, as in segmentation_models_pytorch; else one of each image, as in MONAI.",
    "weight": "(C,), one a class; a mean does not divide by them.",
    "ignore_index": "pixels with this class index belong to no region and get gradient 0, whatever their logits are.",
    "present_only": "the loss of a class without target pixels is 0, as in segmentation_models_pytorch; the mean counts it nevertheless.",
    "smooth_nr": "n, added to the numerator.",
    "smooth_dr": "d, added to the denominator. An empty region has the ratio n / d, so a loss of 0 by default; nan where both are 0.",
}
DIVERGENCE = {
    "input": "the student's logits (C,), (N, C) or (N, C, d…), of any floating dtype.",
    "target_logits": "the teacher's, in the shape of input, of any floating dtype.",
    "temperature": "T above 0.",
    "temperature_squared": (
        "multiply by T², so that gradients keep their size. On by default, as Hinton et al. 2015 have it; off by default in the\n"
        "Jensen-Shannon and total variation losses."
    ),
    "reduction": (
        '"batchmean", as in torch.nn.functional.kl_div: Σ / N for N samples; "mean" over the rows (F.kl_div: over the elements); "sum";\n'
        '"none": one value a row. Rows that are left out count in no mean.'
    ),
    "weight": "(N, d…), floating or bool, a factor of each row; the means divide by its sum. Rows of weight 0 are not read.",
    "labels": "integers (N, d…); rows whose label is ignore_index are left out. Other labels mean nothing here.",
    "ignore_index": "label of the rows that are left out.",
}
LINEAR = {
    "input": "(…, H), what the layer takes, of any floating dtype.",
    "weight": "(C, H), the layer's.",
    "bias": "(C,), the layer's; None for none.",
    "teacher": "the teacher's logits (…, C), or a LinearTeacher.",
    "temperature": "T above 0.",
    "temperature_squared": DIVERGENCE["temperature_squared"],
    "labels": "integers (…); rows whose label is ignore_index are left out.",
    "gradient": (
        '"forward" writes the gradients of input, weight and bias in forward: three matrix products. "backward" computes the\n'
        "logits again: four, and any gradient may arrive. Default: forward where the result is a scalar, but for float16 and under\n"
        "torch.compile."
    ),
    "chunk": "rows at a time. Default: as many as 1 GiB of logits has, fewer where memory is short.",
    "accumulate": (
        'dtype in which a weight\'s gradient of half precision is summed over the chunks: "float32", or "weight", its own, which takes a\n'
        "third of the memory and rounds after every chunk. Default: float32 where memory allows."
    ),
    "skip_ignored": "leave ignored rows out of the products; the host waits for the device to learn how many are left.",
    "valid": "the same without waiting: a number that the rows not ignored do not exceed. Where they do, the result is nan.",
}
LOGPS = "(N,), in nats, summed over the tokens of each completion."
PREFERENCE = {
    "policy_chosen_logps": f"{LOGPS} Of the model that learns, for the chosen completions.",
    "policy_rejected_logps": "(N,), likewise for the rejected ones.",
    "reference_chosen_logps": "(N,), the reference model's for the chosen completions.",
    "reference_rejected_logps": "(N,), the reference model's for the rejected ones.",
    "reduction": '"mean", "sum", or "none" for one loss an item.',
    "normalizer": (
        "number or 0-d tensor that takes the place of the mean's divisor. Give the number of items of the whole batch where it is\n"
        "split into micro-batches or over devices."
    ),
}
SHARED = {
    "elementwise": ELEMENT,
    "distribution": ELEMENT,
    "rowwise": ROW,
    "nll": ROW,
    "boxes": BOX,
    "overlap": OVERLAP,
    "divergence": DIVERGENCE,
    "topk": DIVERGENCE,
    "linear": LINEAR,
    "preference": PREFERENCE,
}
SCALAR = "a scalar, in float32 (float64 for float64)"
RETURNS = {
    "elementwise": f'{SCALAR}; with reduction "none" a tensor in the shape and dtype of input.',
    "distribution": f'{SCALAR}; with reduction "none" one value a target, in float32.',
    "rowwise": f'{SCALAR}; with reduction "none" one value a row, in float32.',
    "nll": f'{SCALAR}; with reduction "none" one value a row, in the dtype of input.',
    "boxes": f'{SCALAR}; with reduction "none" one value a pair, (...), in float32.',
    "overlap": f'{SCALAR}; with reduction "none" one value a region, in float32.',
    "divergence": f'{SCALAR}; with reduction "none" one value a row, in float32.',
    "topk": f'{SCALAR}; with reduction "none" one value a row, in float32.',
    "linear": f'{SCALAR}; with reduction "none" one value a row, in float32.',
    "preference": f'{SCALAR}; with reduction "none" one value an item, in float32.',
}
INDEX_ERROR = "a class index is out of range; on CUDA with validate alone."
EXAMPLES = {
    "elementwise": ("logits = torch.randn(8, 10, requires_grad=True)", "logits, torch.randint(10, (8,))"),
    "rowwise": ("logits = torch.randn(8, 10, requires_grad=True)", "logits, torch.randint(10, (8,))"),
    "nll": ("log_p = torch.randn(8, 10, requires_grad=True).log_softmax(1)", "log_p, torch.randint(10, (8,))"),
    "boxes": (
        "corners = torch.rand(2, 16, 2, requires_grad=True)\nboxes, targets = torch.cat([corners, corners + 0.5], -1)",
        "boxes, targets",
    ),
    "overlap": ("maps = torch.randn(2, 5, 32, 32, requires_grad=True)", "maps, torch.randint(5, (2, 32, 32))"),
    "divergence": ("student, teacher = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10)", "student, teacher"),
    "topk": (
        "student, teacher = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10).log_softmax(1)",
        "student, *teacher.topk(3, dim=1)",
    ),
}
OWN_EXAMPLES = {
    "siglip_loss": ("similarities = torch.randn(8, 8, requires_grad=True)  # scale * images @ texts.T + bias", "similarities"),
    "distribution_focal_loss": ("sides = torch.randn(32, 4, 17, requires_grad=True)", "sides, 16 * torch.rand(32, 4)"),
    "kl_div": (*EXAMPLES["nll"][:1], 'log_p, torch.rand(8, 10).softmax(1), reduction="batchmean"'),
    "preference_bce": ("p = torch.rand(8, 10, requires_grad=True)", "p, torch.randint(10, (8,)), preference=torch.rand(8, 1)"),
    "binary_cross_entropy": ("p = torch.rand(8, 10, requires_grad=True)", "p, torch.randint(10, (8,))"),
    "clip_loss": ("similarities = torch.randn(8, 8, requires_grad=True)  # scale * images @ texts.T", "similarities"),
    "linear_cross_entropy": (
        "hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)",
        "hidden, head.weight, torch.randint(100, (6,)), head.bias",
    ),
    "linear_kl_div": (
        "hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)",
        "hidden, head.weight, torch.randn(6, 100), head.bias",
    ),
    "selective_log_softmax": ("logits = torch.randn(2, 6, 100, requires_grad=True)", "logits, torch.randint(100, (2, 6))"),
    "linear_selective_log_softmax": (
        "hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)",
        "hidden, head.weight, torch.randint(100, (6,)), head.bias",
    ),
    "linear_entropy": (
        "hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)",
        "hidden, head.weight, head.bias",
    ),
    "bradley_terry_loss": ("chosen, rejected = torch.randn(2, 8, requires_grad=True)", "chosen, rejected, margin=0.1"),
    "dpo_loss": ("chosen, rejected = -torch.rand(2, 8, requires_grad=True)", "chosen, rejected, -torch.rand(8), -torch.rand(8), beta=0.1"),
    "cpo_loss": ("chosen, rejected = -torch.rand(2, 8, requires_grad=True)", "chosen, rejected"),
    "kto_loss": (
        "chosen, rejected = -torch.rand(2, 8, requires_grad=True)",
        "chosen, rejected, None, -torch.rand(8), -torch.rand(8), None, kl=0.1",
    ),
    "grpo_loss": ("logps = -torch.rand(4, 12, requires_grad=True)", "logps, torch.randn(4), mask=torch.ones(4, 12, dtype=torch.bool)"),
}
OWN_EXAMPLES |= dict.fromkeys(("linear_js_div", "linear_total_variation"), OWN_EXAMPLES["linear_kl_div"])
OWN_EXAMPLES |= dict.fromkeys(("simpo_loss", "orpo_loss"), OWN_EXAMPLES["cpo_loss"])
HEADINGS = re.compile(r"^(Args|Returns|Raises|Examples):\n", re.MULTILINE)


def sections(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text, and what stands under its headings."""
    text, *parts = HEADINGS.split(docstring)
    found: dict[str, str] = {}
    rest: list[str] = []
    for heading, part in zip(parts[::2], parts[1::2], strict=True):
        lines = part.split("\n")
        end = next((n for n, line in enumerate(lines) if line and not line.startswith("    ")), len(lines))
        found[heading] = inspect.cleandoc("\n".join(["", *lines[:end]])).rstrip()
        rest += lines[end:]
    return "\n".join([text.rstrip(), "", *rest]).rstrip(), found


def described(block: str) -> dict[str, str]:
    """Return the lines of each argument in a block of `name: text`."""
    return {name: text.rstrip() for name, text in re.findall(r"^(\w+): (.*(?:\n +.*)*)", block, re.MULTILINE)}


def parameters(signature: inspect.Signature) -> list[str]:
    """Return the names of a function's parameters, those of its options among them."""
    names: list[str] = []
    for name, each in signature.parameters.items():
        names += get_args(each.annotation)[0].__annotations__ if each.kind is each.VAR_KEYWORD else [name]
    return names


def example_of(name: str, kind: str, default: Any) -> str:
    """Return an example that runs as it is. default: of the reduction; None where there is none, and each row has a result."""
    made, given = OWN_EXAMPLES.get(name) or EXAMPLES[kind]
    reduced = ', reduction="mean"' if default == "none" and "reduction" not in given else ""
    call = f"{name}({given}{reduced})" if default is not None else f"{name}({given}).mean()"
    code = ["import torch", f"from lossforge.losses import {name}", *made.split("\n"), f"{call}.backward()"]
    return "\n".join(f">>> {line}" for line in code)


def complete(function: Callable[..., Any], kind: str, *, source: str = "") -> None:
    """Add to a loss's docstring what it shares with others of its kind, a key of SHARED."""
    text, own = sections(inspect.getdoc(function) or "")
    known, shared = described(own.get("Args", "")), {**COMMON, **SHARED[kind]}
    signature = inspect.signature(function)
    names, reduction = parameters(signature), signature.parameters.get("reduction")
    indices = ["IndexError: " + INDEX_ERROR] if "validate" in names else []
    parts = {
        "Args": "\n".join(f"{name}: {known.get(name) or _indented(shared[name])}" for name in names if name in known or name in shared),
        "Returns": own.get("Returns") or RETURNS[kind],
        "Raises": own.get("Raises") or "\n".join(["TypeError, ValueError: an argument is wrong; the message names it.", *indices]),
        "Examples": own.get("Examples") or example_of(function.__name__, kind, reduction and reduction.default),
    }
    whole = [text, *(f"{heading}:\n    " + part.replace("\n", "\n    ") for heading, part in parts.items())]
    function.__doc__ = "\n\n".join([*whole, f"Source: {source}."] if source else whole)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def completed(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Complete the docstring of a function that is not in the registry, as a decorator."""

    def enter(function: Any) -> Any:
        complete(function, kind)
        return function

    return enter


def of_module(function: Callable[..., Any], summary: str, remark: str, options: list[str], renamed: Mapping[str, str]) -> str:
    """Return the docstring of a function's module: options are the arguments of its constructor."""
    lines = described(sections(function.__doc__ or "")[1].get("Args", ""))
    back = {new: old for old, new in renamed.items()}
    told = [f"    {name}: {lines[back.get(name, name)]}" for name in options if back.get(name, name) in lines]
    arguments = "Args:\n" + "\n".join(line.replace("\n", "\n    ") for line in told)
    return f"{summary}: see {function.__name__}.{remark} `forward` takes that function's tensors.\n\n{arguments}"

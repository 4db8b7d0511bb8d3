"""Arguments that mean the same in every template. tools/generate.py puts this into docstrings, beside what a loss's own says."""

COMMON = {
    "input": "logits, of any floating dtype.",
    "reduction": '"mean", "sum" or "none".',
    "empty": 'what a mean over nothing gives: "nan", as in torch, or "zero".',
    "gradient": 'written in "forward", or computed in "backward"; None chooses.',
    "inplace": "the gradient takes the memory of the logits; read them before.",
    "validate": "check class indices on CUDA too, which waits for the device.",
    "normalizer": "number or 0-d tensor in place of the mean's divisor.",
    "target_b": "class indices of the second of a mixup pair, as target.",
    "lam": "share λ of target, 1 - λ of target_b; one, or one a sample or row.",
    "dim": "dimension of the classes.",
    "mask": "which elements count, bool, or floats as weights.",
    "score": "with class indices, the target of each row's class, if not 1.",
    "size_average": "torch's deprecated argument, in place of reduction.",
    "reduce": "torch's deprecated argument, in place of reduction.",
    "ignore_index": "class index of the rows that add nothing, whatever their logits hold.",
    "scale": "the logits become scale · x.",
    "softcap": "the logits become softcap · tanh(scale · x / softcap); None for none.",
    "z_loss": "coefficient of lse², averaged over the rows not ignored.",
    "outputs": (
        'names of what to give as well, in this order: "z_loss" (the part of z_loss), "lse" (log-sum-exp of each row) and "entropy" (of '
        'each softmax), differentiable; "correct" (whether the largest logit of a row is the target\'s), "argmax" (its class), "log_p2" '
        '(ln Σ p² of each softmax) and "mean_logit", without gradient.'
    ),
}
"""Arguments that mean the same in every template."""
OPTIONS = ("empty", "gradient", "inplace", "validate", "normalizer", "target_b", "lam", "score", "mask")
"""Those on which `help(lossforge.losses.functional)` says more."""
INDEX_ERROR = "a class index is out of range; on CUDA with validate alone."

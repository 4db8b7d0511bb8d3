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
    "score": "with class indices, the target of each row's class, if not 1.",
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
    "return_argmax": "give the class of each row's largest logit as well.",
    "return_log_p2": "give ln Σ p² of each row's softmax as well, without gradient.",
    "return_mean_logit": "give the mean of each row's logits as well, without gradient.",
}
"""Arguments that mean the same in every template."""
OPTIONS = ("empty", "gradient", "inplace", "validate", "normalizer", "target_b", "lam", "score")
"""Those on which `help(lossforge.losses.functional)` says more."""
INDEX_ERROR = "a class index is out of range; on CUDA with validate alone."

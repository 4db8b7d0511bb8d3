"""Arguments that mean the same in every template. tools/generate.py puts this into docstrings, beside what a loss's own says."""

COMMON = {
    "input": "logits, of any floating dtype.",
    "reduction": '"mean", "sum" or "none".',
    "empty": 'what a mean over nothing gives, where its divisor is 0: "nan", as in torch, or "zero", with gradient 0.',
    "gradient": (
        '"forward" writes the gradient in the launch of the loss, "backward" computes it when it is asked for. Default: forward where the '
        "result is a scalar, but for float16 and under torch.compile."
    ),
    "inplace": (
        "the gradient takes the memory of the logits, which must be an intermediate result. A gradient that arrives from a later use of "
        "them raises; a plain read gets the gradient."
    ),
    "validate": (
        "check class indices on CUDA too, which waits for the device. Default: the environment's LOSSFORGE_VALIDATE. Unchecked, a row "
        "with an index out of range has loss and gradient nan."
    ),
    "normalizer": "number or 0-d tensor that takes the place of the mean's divisor: Σ loss / normalizer.",
    "target_b": "with class indices, the second class of a mixup pair, in the shape of target.",
    "lam": "λ of a mixup pair, any number: one, one a sample, or one a row. The target is λ times target plus 1 - λ times target_b.",
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
    "return_argmax": "give the class of each row's largest logit as well.",
    "return_log_p2": "give ln Σ p² of each row's softmax as well, without gradient.",
    "return_mean_logit": "give the mean of each row's logits as well, without gradient.",
}
"""Arguments that mean the same in every template."""
INDEX_ERROR = "a class index is out of range; on CUDA with validate alone."

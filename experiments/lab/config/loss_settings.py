"""Written by tools/loss_configs.py from the signatures: a loss's input, the activation of its logits, its settings."""
# fmt: off
# ruff: noqa: E501

from typing import Any

from lab.config.fields import number

LOSSES: dict[str, tuple[str, str, dict[str, tuple[Any, Any]]]] = {
    "mae": ("softmax", "softmax", {}),
    "mse": ("softmax", "softmax", {}),
    "huber": ("softmax", "softmax", {"delta": (float, number(1.0, "distance at which the square becomes a line", above=0))}),
    "smooth_l1": ("softmax", "softmax", {"beta": (float, number(1.0, "distance at which the square becomes a line", least=0))}),
    "log_cosh": ("softmax", "softmax", {}),
    "bce": ("logits", "sigmoid", {}),
    "bce_smoothed": ("logits", "sigmoid", {"smoothing": (float, number(0.1, "share of the target that is spread", least=0, below=1)), "target_threshold": (float | None, number(None, "targets above it are 1, others 0; null: as they are"))}),
    "focal": ("logits", "sigmoid", {"alpha": (float, number(0.25, "weight of positives, 1 - alpha that of negatives; -1 or null: none", least=-1, most=1)), "gamma": (float, number(2.0, "focusing exponent: the larger, the less easy examples count", least=0))}),
    "asymmetric": ("logits", "sigmoid", {"gamma_neg": (float, number(4.0, "focusing exponent of negatives", least=0)), "gamma_pos": (float, number(1.0, "focusing exponent of positives", least=0)), "clip": (float | None, number(0.05, "how far probabilities of negatives are shifted down; null: not", least=0, most=1))}),
    "poly_bce": ("logits", "sigmoid", {"epsilon": (float, number(2.0, "coefficient of the polynomial's first term")), "gamma": (float, number(0.0, "focusing exponent: the larger, the less easy examples count", least=0)), "alpha": (float | None, number(None, "weight of positives, 1 - alpha that of negatives; -1 or null: none", least=-1, most=1))}),
    "preference_bce": ("logits", "sigmoid", {}),
    "preference_bce_probability": ("sigmoid", "sigmoid", {}),
    "quality_focal": ("logits", "sigmoid", {"beta": (float, number(2.0, "exponent of the distance to the quality", least=0))}),
    "varifocal": ("logits", "sigmoid", {"alpha": (float, number(0.75, "factor of negatives", least=0)), "gamma": (float, number(2.0, "focusing exponent: the larger, the less easy examples count", least=0)), "iou_weighted": (bool, number(True, "weigh positives by their IoU"))}),
    "ce": ("logits", "softmax", {"label_smoothing": (float, number(0.0, "share of the target that is spread over all classes", least=0, most=1)), "scale": (float, number(1.0, "factor of the logits")), "softcap": (float | None, number(None, "limit c of the logits, c tanh(z / c); null: none", above=0)), "z_loss": (float, number(0.0, "coefficient of the squared log-sum-exp", least=0))}),
    "softmax_focal": ("logits", "softmax", {"alpha": (float | None, number(None, "factor of the loss; null: none", least=0, most=1)), "gamma": (float, number(2.0, "focusing exponent: the larger, the less easy examples count", least=0))}),
    "poly_ce": ("logits", "softmax", {"epsilon": (float, number(2.0, "coefficient of the polynomial's first term")), "label_smoothing": (float, number(0.0, "share of the target that is spread over all classes", least=0, below=1))}),
    "generalized_ce": ("logits", "softmax", {"q": (float, number(0.7, "0: cross entropy, 1: mean absolute error", least=0, most=1))}),
    "taylor_ce": ("logits", "softmax", {"order": (float, number(2.0, "how many terms of the series of the logarithm", least=1, most=6))}),
    "logit_adjusted_ce": ("logits", "softmax", {"tau": (float, number(1.0, "strength of the adjustment by the classes' shares")), "label_smoothing": (float, number(0.0, "share of the target that is spread over all classes", least=0, most=1))}),
    "asymmetric_single_label": ("logits", "softmax", {"gamma_pos": (float, number(1.0, "focusing exponent of positives", least=0)), "gamma_neg": (float, number(4.0, "focusing exponent of negatives", least=0)), "eps": (float, number(0.1, "share of label smoothing", least=0, most=1))}),
    "dice": ("regions", "softmax", {"smooth_nr": (float, number(1e-05, "what is added to the numerator", least=0)), "smooth_dr": (float, number(1e-05, "what is added to the denominator", least=0))}),
    "jaccard": ("regions", "softmax", {"smooth_nr": (float, number(1e-05, "what is added to the numerator", least=0)), "smooth_dr": (float, number(1e-05, "what is added to the denominator", least=0))}),
    "tversky": ("regions", "softmax", {"alpha": (float, number(0.5, "weight of false positives", least=0)), "beta": (float, number(0.5, "weight of false negatives", least=0)), "smooth_nr": (float, number(1e-05, "what is added to the numerator", least=0)), "smooth_dr": (float, number(1e-05, "what is added to the denominator", least=0))}),
    "focal_tversky": ("regions", "softmax", {"alpha": (float, number(0.3, "weight of false positives", least=0)), "beta": (float, number(0.7, "weight of false negatives", least=0)), "gamma": (float, number(0.75, "exponent of 1 - the Tversky index", least=0)), "smooth_nr": (float, number(1e-05, "what is added to the numerator", least=0)), "smooth_dr": (float, number(1e-05, "what is added to the denominator", least=0))}),
    "dice_ce": ("regions", "softmax", {"smooth_nr": (float, number(1e-05, "what is added to the numerator", least=0)), "smooth_dr": (float, number(1e-05, "what is added to the denominator", least=0)), "lambda_dice": (float, number(1.0, "factor of the Dice loss", least=0)), "lambda_ce": (float, number(1.0, "factor of the cross entropy", least=0))}),
}
BOX_LOSSES: dict[str, dict[str, tuple[Any, Any]]] = {
    "iou": {"eps": (float, number(1e-07, "what keeps divisions finite for boxes without area", least=0))},
    "giou": {"eps": (float, number(1e-07, "what keeps divisions finite for boxes without area", least=0))},
    "diou": {"eps": (float, number(1e-07, "what keeps divisions finite for boxes without area", least=0))},
    "ciou": {"eps": (float, number(1e-07, "what keeps divisions finite for boxes without area", least=0))},
    "eiou": {"eps": (float, number(1e-07, "what keeps divisions finite for boxes without area", least=0))},
    "siou": {"eps": (float, number(1e-07, "what keeps divisions finite for boxes without area", least=0))},
    "l1": {},
    "smooth_l1": {"beta": (float, number(1.0, "distance at which the square becomes a line", least=0))},
}

"""Written by tools/loss_configs.py from the signatures: what a loss takes of a classifier, what it teaches, its settings."""
# fmt: off
# ruff: noqa: E501

from typing import Any

from lab.config.fields import number

LOSSES: dict[str, tuple[str, str, dict[str, tuple[Any, Any]]]] = {
    "mae": ("softmax", "softmax", {}),
    "mse": ("softmax", "softmax", {}),
    "huber": ("softmax", "softmax", {"delta": (float, number(1.0, above=0))}),
    "smooth_l1": ("softmax", "softmax", {"beta": (float, number(1.0, least=0))}),
    "log_cosh": ("softmax", "softmax", {}),
    "bce": ("logits", "sigmoid", {}),
    "bce_smoothed": ("logits", "sigmoid", {"smoothing": (float, number(0.1, least=0, below=1)), "target_threshold": (float | None, number(None))}),
    "focal": ("logits", "sigmoid", {"alpha": (float, number(0.25, least=-1, most=1)), "gamma": (float, number(2.0, least=0))}),
    "asymmetric": ("logits", "sigmoid", {"gamma_neg": (float, number(4.0, least=0)), "gamma_pos": (float, number(1.0, least=0)), "clip": (float | None, number(0.05, least=0, most=1))}),
    "poly_bce": ("logits", "sigmoid", {"epsilon": (float, number(2.0)), "gamma": (float, number(0.0, least=0)), "alpha": (float | None, number(None, least=-1, most=1))}),
    "preference_bce": ("logits", "sigmoid", {}),
    "preference_bce_probability": ("sigmoid", "sigmoid", {}),
    "quality_focal": ("logits", "sigmoid", {"beta": (float, number(2.0, least=0))}),
    "varifocal": ("logits", "sigmoid", {"alpha": (float, number(0.75, least=0)), "gamma": (float, number(2.0, least=0)), "iou_weighted": (bool, number(True))}),
    "ce": ("logits", "softmax", {"label_smoothing": (float, number(0.0, least=0, most=1)), "scale": (float, number(1.0)), "softcap": (float | None, number(None, above=0)), "z_loss": (float, number(0.0, least=0))}),
    "softmax_focal": ("logits", "softmax", {"alpha": (float | None, number(None, least=0, most=1)), "gamma": (float, number(2.0, least=0))}),
    "poly_ce": ("logits", "softmax", {"epsilon": (float, number(2.0)), "label_smoothing": (float, number(0.0, least=0, below=1))}),
    "generalized_ce": ("logits", "softmax", {"q": (float, number(0.7, least=0, most=1))}),
    "taylor_ce": ("logits", "softmax", {"order": (float, number(2.0, least=1, most=6))}),
    "logit_adjusted_ce": ("logits", "softmax", {"tau": (float, number(1.0)), "label_smoothing": (float, number(0.0, least=0, most=1))}),
    "asymmetric_single_label": ("logits", "softmax", {"gamma_pos": (float, number(1.0, least=0)), "gamma_neg": (float, number(4.0, least=0)), "eps": (float, number(0.1, least=0, most=1))}),
}
BOX_LOSSES: dict[str, dict[str, tuple[Any, Any]]] = {
    "iou": {"eps": (float, number(1e-07, least=0))},
    "giou": {"eps": (float, number(1e-07, least=0))},
    "diou": {"eps": (float, number(1e-07, least=0))},
    "ciou": {"eps": (float, number(1e-07, least=0))},
    "eiou": {"eps": (float, number(1e-07, least=0))},
    "siou": {"eps": (float, number(1e-07, least=0))},
    "l1": {},
    "smooth_l1": {"beta": (float, number(1.0, least=0))},
}

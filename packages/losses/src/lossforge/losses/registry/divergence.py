"""Divergences of softmax distributions, for distillation."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss(
        "kl",
        "divergence",
        "kl",
        functional.kl_div_with_logits,
        modules.KLDivWithLogitsLoss,
        hyper={"temperature": 1.0, "reverse": False, "temperature_squared": True},
        options=({"reverse": True}, {"temperature": 3.0}, {"temperature": 0.7, "reverse": True, "temperature_squared": False}),
        judge="lossforge.losses.judges.divergence:kl_div",
        paper="arXiv 1503.02531",
    ),
    Loss(
        "js",
        "divergence",
        "js",
        functional.js_div_with_logits,
        modules.JSDivWithLogitsLoss,
        hyper={"beta": 0.5, "temperature": 1.0, "temperature_squared": False},
        options=({"beta": 0.0}, {"beta": 1.0}, {"beta": 0.1, "temperature": 2.0}, {"beta": 0.9, "temperature_squared": True}),
        judge="lossforge.losses.judges.divergence:js_div",
        paper="arXiv 2306.13649",
    ),
    Loss(
        "total_variation",
        "divergence",
        "total_variation",
        functional.total_variation_with_logits,
        modules.TotalVariationWithLogitsLoss,
        hyper={"temperature": 1.0, "temperature_squared": False},
        options=({"temperature": 2.0}, {"temperature": 0.5, "temperature_squared": True}),
        judge="lossforge.losses.judges.divergence:total_variation",
        paper="arXiv 2307.15190",
    ),
    Loss(
        "topk_kl",
        "topk",
        "topk_kl",
        functional.topk_kl_div_with_logits,
        modules.TopKKLDivWithLogitsLoss,
        hyper={"temperature": 1.0, "renormalize": False, "tail": False, "temperature_squared": True},
        options=(
            {"tail": True},
            {"renormalize": True, "temperature": 2.0},
            {"tail": True, "temperature": 3.0, "temperature_squared": False},
        ),
        judge="lossforge.losses.judges.divergence:topk_kl_div",
        paper="arXiv 1503.02531",
    ),
)

"""Losses of independent yes-or-no decisions: one logit or probability each."""

from lossforge.losses import functional, modules
from lossforge.losses.registry.common import Loss

LOSSES = (
    Loss(
        "bce",
        "elementwise",
        "bce_with_logits",
        functional.binary_cross_entropy_with_logits,
        modules.BCEWithLogitsLoss,
        judge="torch.nn.functional:binary_cross_entropy_with_logits",
    ),
    Loss(
        "focal",
        "elementwise",
        "focal",
        functional.sigmoid_focal_loss,
        modules.SigmoidFocalLoss,
        hyper={"alpha": 0.25, "gamma": 2.0},
        options=({"gamma": 0.5}, {"gamma": 0.0, "alpha": -1.0}, {"gamma": 1.0}, {"gamma": 3.5, "alpha": 0.6}),
        judge="torchvision.ops:sigmoid_focal_loss",
        paper="arXiv 1708.02002",
    ),
    Loss(
        "asymmetric",
        "elementwise",
        "asymmetric",
        functional.asymmetric_loss_multi_label,
        modules.AsymmetricLossMultiLabel,
        hyper={"gamma_neg": 4.0, "gamma_pos": 1.0, "clip": 0.05},
        options=(
            {"clip": None},
            {"gamma_neg": 0.0, "gamma_pos": 0.0, "clip": 0.2},
            {"gamma_neg": 2.5, "gamma_pos": 0.5, "clip": 0.1, "pos_weight": 3.0},
        ),
        judge="timm.loss:AsymmetricLossMultiLabel",
        paper="arXiv 2009.14119",
    ),
    Loss(
        "poly_bce",
        "elementwise",
        "poly_bce",
        functional.poly_binary_cross_entropy,
        modules.PolyBinaryCrossEntropy,
        hyper={"epsilon": 2.0, "gamma": 0.0, "alpha": None},
        options=({"epsilon": -1.0, "gamma": 2.0, "alpha": 0.25}, {"epsilon": 0.5, "gamma": 0.5}, {"alpha": 0.6}),
        judge="timm.loss:PolyBinaryCrossEntropy",
        paper="arXiv 2204.12511",
    ),
    Loss(
        "preference_bce",
        "elementwise",
        "bce_with_logits",
        functional.preference_bce_with_logits,
        modules.PreferenceBCEWithLogitsLoss,
        judge="torch.nn.functional:binary_cross_entropy_with_logits",
    ),
    Loss(
        "preference_bce_probability",
        "elementwise",
        "bce",
        functional.preference_bce,
        modules.PreferenceBCELoss,
        domain="probabilities",
        judge="torch.nn.functional:binary_cross_entropy",
    ),
)

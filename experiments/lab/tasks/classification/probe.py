"""A linear probe: what a classifier's features say of classes that it was not trained on."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lab.base.errors import UserError
from lab.config.schema import MemoryConfig
from lab.data.load import classes_kept, load_data
from lab.data.sets import Loader, Norm
from lab.processes import distributed

SCORE = "probe/top1"


class LinearProbe:
    """A callback of a run with `data.only_classes`: logistic regression of the other classes from the features before the last layer.

    After each evaluation it is fitted to the other classes' training images (`data.train_share` of them) and scored on their held-out
    ones; the share that is right is recorded as probe/top1. The model is not trained on them.
    """

    data: Any = None

    def on_evaluation(self, trainer: Any, values: dict[str, float]) -> None:
        if distributed.ranks() > 1:
            raise UserError("lab.tasks.classification.probe:LinearProbe: runs in one process.")
        if self.data is None:
            self.data = other_classes(trainer)
        model = trainer.model if trainer.ema is None else trainer.ema.module
        fitted, held_out = (features(model, loader) for loader in (self.data.plain(), self.data.val))
        score = probed(*fitted, *held_out)
        trainer.folder.metrics(trainer.done, {SCORE: score})
        trainer.values[SCORE] = score
        trainer.console.say(f"linear probe on the classes {', '.join(self.data.classes)}: {score:.2%}")


def other_classes(trainer: Any) -> Any:
    """Return the data of the classes that the run leaves out, normalised as the run's.

    Raises:
        UserError: the run leaves out fewer than two classes, or its data cannot.
    """
    config = trainer.config.data
    if not isinstance(config, MemoryConfig) or not config.only_classes:
        raise UserError("lab.tasks.classification.probe:LinearProbe: needs data=digits, mnist or cifar and data.only_classes.")
    whole = load_data(replace(config, only_classes=[], train_share=1.0), NO_NORM, torch.device("cpu"), 0).classes
    kept = classes_kept(config.only_classes, whole)
    others = [i for i in range(len(whole)) if i not in kept]
    classes_kept(others, whole)
    plain = replace(config, only_classes=others, imbalance=1.0, label_noise=0.0, class_weight={}, class_group={}, class_balance=None)
    return load_data(plain, NO_NORM, trainer.device, 0, trainer.data.norm)


NO_NORM = Norm([], [])


@torch.no_grad()
def features(model: nn.Module, loader: Loader) -> tuple[Tensor, Tensor]:
    """Return what timm's model has before its last layer (N, D), and the classes (N,), on the CPU."""
    if not hasattr(model, "forward_head"):
        raise UserError("lab.tasks.classification.probe:LinearProbe: the model must be timm's, with forward_features and forward_head.")
    found: Any = model
    rows = [(found.forward_head(found.forward_features(batch.images), pre_logits=True).float(), batch.target) for batch in loader]
    return torch.cat([row for row, _ in rows]).cpu(), torch.cat([target for _, target in rows]).cpu()


def probed(features: Tensor, target: Tensor, held_out: Tensor, wanted: Tensor) -> float:
    """Return the share of held-out rows (M, D) that logistic regression of standardised features (N, D) gets right."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return float(probe.fit(features.numpy(), target.numpy()).score(held_out.numpy(), wanted.numpy()))

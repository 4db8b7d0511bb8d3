"""Definitions of the losses of features."""

# the registry has this order
# isort: off
from lossforge.losses.definitions.features import self_distillation as self_distillation
from lossforge.losses.definitions.features import contrastive as contrastive
from lossforge.losses.definitions.features import metric_learning as metric_learning

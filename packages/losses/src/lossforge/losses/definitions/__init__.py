"""The losses as definitions, a family a file: lossforge.losses.functional and lossforge.losses.modules are made of them."""

# the registry has this order
# isort: off
from lossforge.losses.definitions import regression as regression
from lossforge.losses.definitions.classes import binary as binary
from lossforge.losses.definitions.classes import likelihood as likelihood
from lossforge.losses.definitions.classes import noise_model as noise_model
from lossforge.losses.definitions.classes import margin as margin
from lossforge.losses.definitions.features import embedding as embedding
from lossforge.losses.definitions.boxes import detection as detection
from lossforge.losses.definitions.classes import cross_entropy as cross_entropy
from lossforge.losses.definitions.classes import classification as classification
from lossforge.losses.definitions.classes import angular as angular
from lossforge.losses.definitions.boxes import iou as iou
from lossforge.losses.definitions.boxes import rotated as rotated
from lossforge.losses.definitions import dice as dice
from lossforge.losses.definitions.classes import divergence as divergence
from lossforge.losses.definitions.classes import draft as draft
from lossforge.losses.definitions.features import self_distillation as self_distillation
from lossforge.losses.definitions.features import contrastive as contrastive
from lossforge.losses.definitions.features import metric_learning as metric_learning
from lossforge.losses.definitions import language as language
from lossforge.losses.definitions import preference as preference

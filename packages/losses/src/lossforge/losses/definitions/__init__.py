"""The losses as definitions, a family a file: lossforge.losses.functional and lossforge.losses.modules are made of them."""

# the registry has this order
# isort: off
from lossforge.losses.definitions import regression as regression
from lossforge.losses.definitions import binary as binary
from lossforge.losses.definitions import likelihood as likelihood
from lossforge.losses.definitions import noise_model as noise_model
from lossforge.losses.definitions import margin as margin
from lossforge.losses.definitions import embedding as embedding
from lossforge.losses.definitions import detection as detection
from lossforge.losses.definitions import cross_entropy as cross_entropy
from lossforge.losses.definitions import classification as classification
from lossforge.losses.definitions import angular as angular
from lossforge.losses.definitions import boxes as boxes
from lossforge.losses.definitions import dice as dice
from lossforge.losses.definitions import divergence as divergence
from lossforge.losses.definitions import features as features
from lossforge.losses.definitions import language as language
from lossforge.losses.definitions import preference as preference

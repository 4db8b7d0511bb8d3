"""Definitions of the preference objectives."""

# the documentation has this order
# isort: off
from lossforge.losses.definitions.preference import common as common
from lossforge.losses.definitions.preference import objectives as objectives
from lossforge.losses.definitions.preference import kl as kl
from lossforge.losses.definitions.preference import sampler as sampler
from lossforge.losses.definitions.preference import grpo as grpo
from lossforge.losses.definitions.preference import kto as kto
from lossforge.losses.definitions.preference import pairwise as pairwise

"""Definitions of what language models train with."""

# the registry has this order
# isort: off
from lossforge.losses.definitions.language import experts as experts
from lossforge.losses.definitions.language import tokens as tokens
from lossforge.losses.definitions.language import linear as linear
from lossforge.losses.definitions.language import drafting as drafting
from lossforge.losses.definitions.language import multi_token as multi_token

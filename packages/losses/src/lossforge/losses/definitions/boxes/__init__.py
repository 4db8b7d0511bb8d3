"""Definitions of the losses of pairs of boxes."""

# the registry has this order
# isort: off
from lossforge.losses.definitions.boxes import iou as iou
from lossforge.losses.definitions.boxes import rotated as rotated

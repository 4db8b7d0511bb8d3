"""Words of small trainings that many tests begin with."""

TINY = ("model=tiny_resnet", "trainer.device=cpu", "data.image_size=16")
ALONE = ("tracking=none", "tracking.model=false")
"""Without a store, and without the export of the best model."""

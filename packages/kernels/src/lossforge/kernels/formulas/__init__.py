"""One file a loss: its mathematics, and nothing about tiles, masks, targets or reductions."""

"""Definitions of the losses of boxes: of pairs of them, and of their scores."""

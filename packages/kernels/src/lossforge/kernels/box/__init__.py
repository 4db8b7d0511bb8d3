"""Losses of pairs of boxes."""

"""Losses of which every element stands alone."""

"""Definitions of the losses of features."""

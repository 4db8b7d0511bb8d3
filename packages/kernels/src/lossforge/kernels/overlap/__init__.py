"""Losses of overlapping regions."""

"""Comparisons of finished runs: what compare.py does."""

"""Measure losses: time, host time and memory of ours and of the libraries in use today. Each is first checked against float64."""

__version__ = "0.1.0"

"""Measures losses: time, host time and memory of ours and of those that people use today, each checked against float64 first."""

__version__ = "0.1.0"

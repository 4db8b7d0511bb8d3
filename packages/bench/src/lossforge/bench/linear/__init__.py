"""Losses fused with the linear layer that gives their logits: what is measured of them beside others, and of their products alone."""

from lossforge.bench.linear.run import measure_case

__all__ = ["measure_case"]

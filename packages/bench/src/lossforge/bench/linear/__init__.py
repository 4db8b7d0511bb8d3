"""Measure losses fused with their linear layer, beside other libraries and beside the layer's matrix products alone."""

from lossforge.bench.linear.run import measure_case

__all__ = ["measure_case"]

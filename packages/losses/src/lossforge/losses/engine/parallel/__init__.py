"""Losses of rows whose classes are spread over the processes of a group: tensor parallelism of a vocabulary.

Each process computes statistics of its own classes with the loss's own kernels. One all-gather of a few numbers a row joins them. No logits
travel, and none is computed twice.
"""

"""Losses fused with the linear layer that gives their logits: the record of such a call, and the engine that computes it by chunks."""

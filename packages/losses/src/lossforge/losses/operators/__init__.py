"""The templates as PyTorch operators: `torch.ops.lossforge.elementwise` and `torch.ops.lossforge.rowwise`, with their backwards."""

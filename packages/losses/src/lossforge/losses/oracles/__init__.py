"""Computations of losses that share nothing with ours, where no library has the loss with our arguments: what the registry calls `like`."""

"""A training run from its settings to its end: the training loop, its monitoring, and a user's callbacks."""

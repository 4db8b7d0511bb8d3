"""From the settings of one run to its end: the training loop, what watches it, and what a user may hang into it."""

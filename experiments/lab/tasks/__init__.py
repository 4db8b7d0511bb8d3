"""The tasks: each one's losses, models, metrics and pictures."""

"""What a batch means, task by task: losses, models, metrics, pictures."""

"""What the experiment apps share: configs, data, models, losses, tasks, trainer, tracking."""

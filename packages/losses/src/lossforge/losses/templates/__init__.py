"""What the losses of a template share: the checks of their arguments, their options, and their modules."""

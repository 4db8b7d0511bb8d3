"""The error that a wrong formula raises."""


class FormulaError(TypeError):
    """A formula that cannot be read, differentiated or computed in plain torch. The message names the operation and its line."""

"""What is raised of a formula."""


class FormulaError(TypeError):
    """A formula that cannot be read, differentiated or computed in plain torch; says which operation, and where."""

"""The namespace of the operators: the outermost package's name, `lossforge` unless the sources were laid out under another name.

Several versions can then be loaded in one process, as the kernels of the Hugging Face hub are.
"""

import torch

NAMESPACE = __name__.partition(".")[0]
PACKAGE = __name__.removesuffix(".base.namespace")
"""The package of the losses."""
OPERATORS = getattr(torch.ops, NAMESPACE)

"""The losses as modules: the functions of lossforge.losses.functional with their options kept, tensors among them as buffers.

Options are attributes that each call reads: `criterion.label_smoothing = 0.0` changes the next call, and a tensor may take a number's
place.

Every module takes, keyword-only, the options that every function has (empty, gradient, inplace, validate, and dim where targets may be
class indices along a chosen dimension), and `forward` the per-call tensors (target_b, lam, score, preference, group, normalizer) and any
option for that call alone.
Those of boxes take empty and gradient, and `forward` weight and normalizer.

They are made from the signatures of their functions (templates/module.py) as these are imported. For type checkers and editors
modules.pyi has them written out, by tools/module_stubs.py.
"""

__all__: list[str] = []

"""The losses as modules: functions of lossforge.losses.functional that keep their options, of which tensors are buffers.

Options are attributes that each call reads: `criterion.label_smoothing = 0.0` changes the next call, and a tensor may take a number's
place.

`forward` takes the tensors of the module's function, whose help says more on each.

Every module takes, keyword-only, the options that every function has (empty, gradient, inplace, validate, and dim where targets may be
class indices along a chosen dimension), and `forward` the per-call tensors (target_b, lam, score, preference, group, normalizer) and any
option for that call alone. Those of boxes take empty and gradient, and `forward` weight and normalizer.
"""

from lossforge.losses import functional
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.module import module_of

_made = {each.module.name: module_of(each, getattr(functional, name), __name__) for name, each in DECLARED.items() if each.module}
globals().update(_made)
__all__ = sorted(_made)  # modules.pyi lists them

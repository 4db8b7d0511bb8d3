"""Host side of the template of rotated boxes: how its tensors lie in memory, and the launch."""

from lossforge.kernels.boxes.launch import arranged
from lossforge.kernels.call import Formulas
from lossforge.kernels.elementwise.kernel import Outputs
from lossforge.kernels.elementwise.launch import OneLaunch, Wanted, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, constants
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.rotated.call import WIDTH, RotatedCall
from lossforge.kernels.rotated.kernel import RotatedPairs, rotated_kernel

PAIRS, WARPS = 128, 4
"""Pairs of a tile: a lane has one, because a formula and its ten derivatives take most of its registers."""


def _make(call: RotatedCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.boxes1, call.boxes2, *wanted.gradients), (call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    boxes1, boxes2, gradient1, gradient2 = found.wide
    weight, grad_output, out = found.by_row
    n = call.boxes1.numel() // WIDTH
    pairs = constants(RotatedPairs(boxes1, boxes2, gradient1, gradient2, WIDTH))
    given, space = (pairs, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, PAIRS)
    # products are rounded before they are added, so that areas of equal boxes are equal and their loss is 0
    return launch_of_tiles(rotated_kernel, call, wanted, given, formulas, space, n, num_warps=WARPS, enable_fp_fusion=False)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.boxes1.shape[:-1])
forward, backward = _LAUNCH.forward, _LAUNCH.backward

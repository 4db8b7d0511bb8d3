"""Host side of the template of distributions over bins: how its tensors lie in memory, and the launch."""

from lossforge.kernels.boxes.launch import arranged
from lossforge.kernels.call import Formulas
from lossforge.kernels.distribution.call import DistributionCall
from lossforge.kernels.distribution.kernel import Bins, distribution_kernel
from lossforge.kernels.elementwise.kernel import Outputs
from lossforge.kernels.elementwise.launch import OneLaunch, Wanted, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, constants
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.tiles import bin_tiles


def _make(call: DistributionCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.x, *wanted.gradients), (call.target, call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    x, gradient = found.wide
    target, weight, grad_output, out = found.by_row
    count = call.x.shape[-1]
    n, tiles = call.x.numel() // count, bin_tiles(count)
    far = (tiles.bins + tiles.tail) * found.furthest >= 2**31
    bins = constants(Bins(x, gradient, target, COUNT=count, SIZE=tiles.bins, TAIL=tiles.tail, WIDE=far))
    given, space = (bins, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, tiles.rows)
    return launch_of_tiles(distribution_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.target.shape)
forward, backward = _LAUNCH.forward, _LAUNCH.backward

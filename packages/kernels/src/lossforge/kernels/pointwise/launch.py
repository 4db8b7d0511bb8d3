"""Host side of the template of several tensors: how they lie in memory, and the launch."""

from lossforge.kernels.call import Formulas
from lossforge.kernels.elementwise.kernel import Outputs
from lossforge.kernels.elementwise.launch import OneLaunch, Wanted, geometry, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, broadcast, strided
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.pointwise.call import PointwiseCall
from lossforge.kernels.pointwise.kernel import Three, pointwise_kernel
from lossforge.kernels.tiles import element_tiles, most_registers


def _make(call: PointwiseCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    each = (call.x, call.y, call.z, *wanted.gradients, call.weight, wanted.upstream[0], wanted.out)
    g = geometry(call.x.shape, [broadcast(t.shape, t.stride(), call.x.shape) for t in each if t is not None], None)
    if g is None:
        return None
    steps = iter(g.strides)
    *tensors, weight, upstream, out = [strided(t, steps) for t in each]
    n = call.x.numel()
    read = sum(t is not None for t in (call.x, call.y, call.z, call.weight))
    tiles = element_tiles(n, call.x.itemsize, read, False, False, False, formulas.special is not None, formulas.heavy)
    given, space = (Three(*tensors), weight, Outputs(upstream, out, Strided())), g.space(n, tiles.block, tiles.stages)
    limits = most_registers(tiles.warps, tiles.programs)
    return launch_of_tiles(pointwise_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps, **limits)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.x.shape)
forward, backward = _LAUNCH.forward, _LAUNCH.backward

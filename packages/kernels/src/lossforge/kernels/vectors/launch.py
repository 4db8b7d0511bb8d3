"""Host side of the template of rows of vectors: how they lie in memory, tiles, and the launch."""

from lossforge.kernels.boxes.launch import arranged
from lossforge.kernels.call import Formulas
from lossforge.kernels.elementwise.kernel import Outputs
from lossforge.kernels.elementwise.launch import OneLaunch, Wanted, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, constants
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.tiles import vector_tiles
from lossforge.kernels.vectors.call import VectorsCall
from lossforge.kernels.vectors.kernel import Vectors, vectors_kernel


def _make(call: VectorsCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.x, call.y, call.z, *wanted.gradients), (call.label, call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    x, y, z, dx, dy, dz = found.wide
    label, weight, grad_output, out = found.by_row
    count = call.x.shape[-1]
    n, tiles = call.x.numel() // count, vector_tiles(count)
    far = (count + tiles.columns) * found.furthest >= 2**31
    vectors = constants(Vectors(x, y, z, dx, dy, dz, label, COUNT=count, SIZE=tiles.columns, WIDE=far))
    given, space = (vectors, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, tiles.rows)
    return launch_of_tiles(vectors_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.x.shape[:-1])
forward, backward = _LAUNCH.forward, _LAUNCH.backward

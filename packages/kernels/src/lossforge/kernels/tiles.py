"""Tile sizes and numbers of warps, computed from shape and dtype. Nothing is tried at run time.

The constants were found by trials on H200s; results/tiles-h200.json has the latest. `python -m lossforge.bench.tune` makes such trials on
your GPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from triton import next_power_of_2

from lossforge.kernels.plans import PLANS

PROGRAMS = 4096  # fills any GPU many times over; one program can still add up all parts
GRID_Y = 32768  # a power of two below 65535, the most programs along a grid's second axis
COUNTED = 1024  # up to this many rows of class indices, every program counts them itself, without a launch of count_kernel

_tried: dict[type, Any] = {}


@contextlib.contextmanager
def trial(tiles: Any) -> Iterator[None]:
    """Launch with these tiles wherever tiles of their type are chosen: for finding better ones."""
    _tried[type(tiles)] = tiles
    PLANS.clear()
    try:
        yield
    finally:
        del _tried[type(tiles)]
        PLANS.clear()


def trials() -> tuple[Any, ...]:
    """Return the tiles on trial."""
    return tuple(_tried.values())


def on_trial(kind: type) -> Any:
    """Return the tiles of this type that are on trial, if any."""
    return _tried.get(kind)


class ElementTiles(NamedTuple):
    """Tiles of an element-wise kernel.

    Attributes:
        block: elements of a tile.
        warps: of a program.
        programs: that share a multiprocessor; more than 1 limits the registers of each.
        stages: tiles in flight at once, where the kernel does not itself load one ahead.
    """

    block: int
    warps: int
    programs: int = 1
    stages: int = 1


def element_tiles(
    n: int, itemsize: int, tensors: int, indices: bool, diagonal: bool, grouped: bool, special: bool, heavy: bool
) -> ElementTiles:
    """Choose tiles of an element-wise kernel.

    Args:
        n: elements.
        itemsize: bytes of an element.
        tensors: how many a launch reads.
        indices: whether targets are class indices.
        diagonal: whether the target is the diagonal, and no tensor is read for it.
        grouped: whether 8 neighbouring elements always lie in one row.
        special: whether the kernel holds two formulas.
        heavy: whether a formula has so much arithmetic that registers limit how many programs run at once.
    """
    if (tried := on_trial(ElementTiles)) is not None:
        return tried
    if n < 2**20:
        return ElementTiles(1024, 4)
    if diagonal:
        return ElementTiles(1024, 4, 8, 2) if itemsize == 4 else ElementTiles(2048, 4, 6, 4)
    if indices:
        if tensors > 3:
            return ElementTiles(1024, 4)
        if itemsize == 4:
            return ElementTiles(1024, 4, 8, 3)
        return ElementTiles(2048, 4, 6) if grouped and tensors == 2 and not heavy else ElementTiles(1024, 4, 8)
    if heavy:
        return ElementTiles(1024, 4, 8, 3) if itemsize == 4 else ElementTiles(1024, 4, 6 if tensors > 2 else 8)
    if special:
        return ElementTiles(1024, 4, 8, 2) if itemsize == 4 else ElementTiles(2048, 4, 6, 3)
    if tensors > 2:
        return ElementTiles(1024, 8) if itemsize == 4 else ElementTiles(1024, 4, 8, 2)
    return ElementTiles(4096, 16, 2)


class BoxTiles(NamedTuple):
    """Pairs of boxes in a tile, and warps of a program."""

    block: int
    warps: int


def box_tiles(itemsize: int) -> BoxTiles:
    """Choose tiles such that a lane reads 16 bytes at once: it then has one pair of boxes, or two in half precision."""
    return on_trial(BoxTiles) or BoxTiles(128 if itemsize == 4 else 256, 4)


class MatrixTiles(NamedTuple):
    """Rows and columns of a tile, which are classes or elements of vectors, and warps of a program."""

    rows: int
    columns: int
    warps: int


MOST_LISTED = 16384
"""The most classes of rows with lists of targets, which a program holds in registers."""


def margin_tiles(classes: int, lists: bool) -> MatrixTiles:
    """Choose tiles that hold whole rows; of rows with one target that are longer, a part."""
    size = max(16, min(next_power_of_2(classes), MOST_LISTED if lists else 4096))
    return MatrixTiles(max(1, 1024 // size), size, max(4, min(16, size // 1024)))


def vector_tiles(count: int) -> MatrixTiles:
    """Choose tiles that hold whole vectors of up to 2048 elements."""
    size = max(4, min(next_power_of_2(count), 2048))
    return MatrixTiles(max(1, min(256, 1024 // size)), size, 4)


class BinTiles(NamedTuple):
    """Tiles of rows of bins.

    Attributes:
        rows: of a tile.
        bins: of a tile.
        tail: bins of a second tile for the last few bins; 0: without a second tile.
        warps: of a program.
    """

    rows: int
    bins: int
    tail: int
    warps: int


def bin_tiles(bins: int) -> BinTiles:
    """Choose tiles of bins. If their number is not a power of two, rows begin at unaligned addresses; each program then has few warps
    (one up to 1024 bins), so that none waits for another.

    17 bins have tiles of 16 and of 1, because half of the lanes would be idle in a tile of 32.
    """
    if (tried := on_trial(BinTiles)) is not None:
        return tried
    whole = next_power_of_2(bins)
    if bins == whole:
        return BinTiles(max(1, 1024 // whole), whole, 0, max(4, whole // 512))
    half, tail = whole // 2, next_power_of_2(bins - whole // 2)
    size, tail = (half, tail) if tail <= half // 2 else (whole, 0)
    return BinTiles(max(1, min(32, 1024 // size)), size, tail, max(1, size // 1024))


class RowTiles(NamedTuple):
    """Tiles of rows of classes.

    Attributes:
        rows: of a tile.
        classes: of a tile.
        one: whether one tile holds a row.
        vector: neighbouring classes that a lane sums.
        warps: of a program.
        stages: tiles in flight at once.
        programs: as in ElementTiles.
    """

    rows: int
    classes: int
    one: bool
    vector: int
    warps: int
    stages: int = 1
    programs: int = 1


class BackwardTiles(NamedTuple):
    rows: int
    classes: int
    warps: int


def forward_tiles(classes: int, itemsize: int, rows_adjacent: bool, dense: bool, gradient: bool) -> RowTiles:
    """Choose tiles of a row-wise kernel's forward.

    Args:
        classes: of a row.
        itemsize: bytes of a logit.
        rows_adjacent: neighbouring rows, not classes, are adjacent in memory, as in (N, C, H, W).
        dense: targets of all classes are summed too, which takes twice the registers.
        gradient: a second sweep over the classes follows, which computes the gradient.
    """
    if (tried := on_trial(RowTiles)) is not None:
        return tried
    whole = next_power_of_2(classes)
    if rows_adjacent:
        tile = min(whole, 32 if dense else 64)
        if whole == tile and not dense:
            tile_rows = min(1024, 4096 // tile)
            return RowTiles(tile_rows, tile, True, 1, max(1, tile_rows // 256))
        return RowTiles(min(1024, max(32, (2048 if dense else 8192) // tile)), tile, whole == tile, 1, 4)
    if whole <= 8192:
        tile_rows = max(1, 2048 // whole)
        elements = whole * tile_rows
        if elements <= 2048:
            return RowTiles(tile_rows, whole, True, 1, 2 if tile_rows <= 4 else 4)
        return RowTiles(tile_rows, whole, True, 1, 8 if elements <= 4096 else 16)
    vector = 16 // itemsize
    if not gradient:
        return RowTiles(1, 4096, False, vector, 8 if dense or itemsize == 4 else 4, 1 if dense else 4)
    if dense:
        return RowTiles(1, 16384, False, vector, 16)
    return RowTiles(1, 8192, False, vector, 16) if classes * itemsize <= 128 * 1024 else RowTiles(1, 16384, False, vector, 32)


def backward_tiles(classes: int, shift: int, rows_adjacent: bool) -> BackwardTiles:
    """Choose tiles of a row-wise kernel's backward. shift: as in resident_tiles."""
    if (tried := on_trial(BackwardTiles)) is not None:
        return tried
    whole = next_power_of_2(classes)
    if rows_adjacent:
        tile = min(whole, max(32, whole // GRID_Y))
        return BackwardTiles(min(1024, 4096 // tile) if tile <= 32 else 32, tile, 4)
    tile = min(whole, max(4096 if shift > 1 else 2048, whole // GRID_Y))
    # 16: with more rows, but fewer than threads, Triton's compiler confuses the layouts of rows and tile
    return BackwardTiles(16 if tile == 64 else max(1, 2048 // tile), tile, 2 if tile in (32, 64) else 4)


class SimilarityTiles(MatrixTiles):
    """Rows and columns of a tile of similarities."""


class SimilarityGradientTiles(MatrixTiles):
    """The same of their gradient."""


class FeatureTiles(NamedTuple):
    """Rows, columns and features of a tile of similarities; rows of tiles that run together; warps, stages; programs a multiprocessor."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    programs: int


def feature_tiles(itemsize: int) -> FeatureTiles:
    """Choose tiles of a product of two matrices. In half precision two programs run on a multiprocessor: the sums of one take the time in
    which the other multiplies. Products in float32 do not use tensor cores."""
    return on_trial(FeatureTiles) or (FeatureTiles(128, 128, 64, 8, 8, 3, 2) if itemsize == 2 else FeatureTiles(64, 64, 32, 8, 4, 2, 1))


class ProductTiles(FeatureTiles):
    """The same of a product with an epilogue."""


def product_tiles(narrow: bool = False) -> ProductTiles:
    """Choose tiles of a product in which a loss is computed. They follow from the GPU alone, so that a row has the same bits in any batch.

    Args:
        narrow: on sm_100, where tiles of 256 columns take up to 311,344 bytes of shared memory, and there are 232,448.
    """
    return on_trial(ProductTiles) or ProductTiles(128, 128 if narrow else 256, 64, 8, 8, 3, 1)


def contrastive_tiles(rows: int, columns: int) -> SimilarityTiles:
    """Choose tiles of a matrix that is summed along both dimensions. Large tiles leave few parts to add up; small ones fill the GPU."""
    return on_trial(SimilarityTiles) or SimilarityTiles(64 if rows * columns <= 2**20 else 128, 64, 4)


def similarity_gradient_tiles() -> SimilarityGradientTiles:
    return on_trial(SimilarityGradientTiles) or SimilarityGradientTiles(32, 64, 4)


def divergence_tiles(classes: int, itemsize: int, rows_adjacent: bool, lean: bool, heavy: bool = False) -> RowTiles:
    """Choose tiles of two tensors of logits that are read together.

    Args:
        classes: of a row.
        itemsize: bytes of a logit, the smaller of both tensors'.
        rows_adjacent: as in forward_tiles.
        lean: whether 40 registers are enough for a thread.
        heavy: whether 64 are too few.
    """
    if (tried := on_trial(RowTiles)) is not None:
        return tried
    whole = next_power_of_2(classes)
    if rows_adjacent:
        tile = min(whole, 32)
        return RowTiles(2048 // tile, tile, whole == tile, 1, 4)
    if whole <= 8192:
        tile_rows = max(1, 1024 // whole)
        return RowTiles(tile_rows, whole, True, 1, max(2, min(16, whole * tile_rows * itemsize // 1024)))
    if itemsize == 4 and classes <= 65536 and not heavy:
        return RowTiles(1, 16384, False, 4, 32)
    return RowTiles(1, 8192, False, 16 // itemsize, 16, programs=3 if lean else 1)


class ResidentTiles(NamedTuple):
    """Chunks of rows that stay on chip.

    Attributes:
        chunk: classes of a chunk.
        ring: chunks in the ring in shared memory.
        held: chunks in registers.
        warps: of a program.
        programs: that share a multiprocessor.
    """

    chunk: int
    ring: int
    held: int
    warps: int
    programs: int


def resident_tiles(classes: int, itemsize: int, shift: int, pair: bool, smoothing: bool, bias: bool, shared: int) -> ResidentTiles | None:
    """Choose chunks of rows that stay on chip; None where the template's other kernel is as fast.

    Args:
        classes: of a row.
        itemsize: bytes of a logit.
        shift: elements of a vector if rows may begin in its middle, which takes registers; else 1.
        pair: whether each row has two targets, which takes registers.
        smoothing: whether labels are smoothed, which takes registers if shift is above 1.
        bias: whether a float32 value of each class lies beside the row in shared memory.
        shared: bytes of shared memory that a program may have.
    """
    if (tried := on_trial(ResidentTiles)) is not None:
        return tried
    lanes = classes + shift - 1
    if lanes * itemsize < 32 * 1024 or shared < 160 * 1024:
        return None
    room = (shared - 2048) // 8192
    chunk = 8192 // itemsize
    chunks = -(-lanes // chunk)
    if bias:
        return ResidentTiles(chunk, chunks, 0, 8, 1) if chunks * chunk * (itemsize + 4) <= shared - 2048 else None
    if 2 * chunks + 1 <= room or (itemsize == 4 and chunks <= 16):
        held = 0 if itemsize == 2 and smoothing and shift > 1 else 2
        return ResidentTiles(chunk, chunks - held, held, 8, 2)
    chunk, chunks, room = 2 * chunk, -(-lanes // (2 * chunk)), room // 2
    if itemsize == 2 and chunks <= 8:
        return ResidentTiles(chunk, chunks - 2, 2, 8, 2)
    if itemsize == 4 and chunks <= room:
        return ResidentTiles(chunk, chunks, 0, 8, 1)
    if itemsize == 2 and room < chunks <= room + 2:
        return ResidentTiles(chunk, chunks - 2, 2, 8, 1)
    most = 2 if pair else 6 if itemsize == 4 else 4 - (shift > 1)  # chunks that fit in registers
    held = 0 if chunks <= room else most
    return ResidentTiles(chunk, min(room, chunks - held), held, 16, 1)


def most_registers(warps: int, programs: int) -> dict[str, int]:
    """Limit a thread's registers, in steps of 8, such that `programs` fit on a multiprocessor. Returns the compiler's options."""
    return {"maxnreg": 65536 // (32 * warps * programs) // 8 * 8} if programs > 1 else {}


class ResidentPairTiles(ResidentTiles):
    """Chunks of logits and teacher that stay on chip. The ring holds chunks of both; registers hold chunks of the slopes h."""


def resident_pair_tiles(classes: int, itemsize: int, slopes: bool, shared: int) -> ResidentPairTiles | None:
    """Choose chunks of logits and teacher whose rows stay on chip; None where the template's other kernel is as fast.

    Args:
        classes: of a row.
        itemsize: bytes of a logit, the same in both.
        slopes: whether the slopes h need another sweep.
        shared: bytes of shared memory that a program may have.
    """
    if (tried := on_trial(ResidentPairTiles)) is not None:
        return tried
    chunk = 8192 // itemsize
    chunks, room = -(-classes // chunk), (shared - 2048) // 16384
    spare = 2 if slopes and itemsize == 4 else 0  # chunks that fit in registers
    if classes <= 8192 or chunks > room + spare or on_trial(RowTiles) is not None:
        return None
    if 2 * (chunks + 1) <= room:
        return ResidentPairTiles(chunk, room // 2, itemsize if slopes else 0, 8, 2)
    if slopes and itemsize == 4:  # large chunks need fewer barriers; in half precision they would need too many registers
        chunk, chunks, room = 2 * chunk, -(-classes // (2 * chunk)), room // 2
        return ResidentPairTiles(chunk, min(room, 2 * chunks), 8, 16, 1)
    if slopes:
        return ResidentPairTiles(chunk, min(room, 2 * chunks), 8 if chunks <= 8 else 4, 16, 1)
    return ResidentPairTiles(chunk, min(room, 2 * chunks), 0, 8, 1)


class OverlapTiles(NamedTuple):
    """Tiles of regions.

    Attributes:
        classes: of a tile.
        pixels: of a tile.
        warps: of a program.
        own: pixels of a lane, if a lane holds all classes of its pixels; else 0.
    """

    classes: int
    pixels: int
    warps: int
    own: int = 0


def overlap_tiles(classes: int, softmax: bool, pixels_adjacent: bool, more: bool, masked: bool) -> OverlapTiles:
    """Choose tiles of an overlap loss.

    Args:
        classes: of a pixel.
        softmax: whether a pixel's classes are read together, up to 512 in one tile.
        pixels_adjacent: neighbouring pixels are adjacent in memory, as in (N, C, H, W), not channels last.
        more: whether a class has more than three sums.
        masked: whether elements have a mask.
    """
    if (tried := on_trial(OverlapTiles)) is not None:
        return tried
    # registers hold the exponentials of a lane's pixels and three sums of every class; a cross entropy needs two more a class, as a mask
    own = [n for n in (8, 4, 2) if classes * (n + 3 + 2 * more + 2 * masked) <= 170 and (n < 8 or (classes <= 8 and not masked))]
    if softmax and pixels_adjacent and own:
        return OverlapTiles(classes, 64 * own[0], 2, own[0])
    whole = next_power_of_2(classes)
    if softmax:
        tile = whole if whole <= 512 else 64
    else:
        tile = min(whole, (8 if classes < 2**18 else 1024) if pixels_adjacent else 64)
    elements = min(max(2048, 64 * tile), 8192 if pixels_adjacent else 4096)
    if not pixels_adjacent:
        a_warp = 256
    elif softmax:
        a_warp = 2048 if tile >= 32 else 1024  # few pixels for each lane, which joins their classes
        a_warp = min(a_warp, 512 if more else 1024) if masked else a_warp
    else:
        a_warp = 512
    return OverlapTiles(tile, elements // tile, elements // a_warp)

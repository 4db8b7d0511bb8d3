"""Tile sizes and warps, by arithmetic over shape and dtype: nothing is tried at run time.

The constants were found on H200s by trials (results/tiles-h200.json has the last); `python -m lossforge.bench.tune` makes such trials on
the GPU at hand.
"""

from typing import NamedTuple

from triton import next_power_of_2

from lossforge.kernels.engine.launch import on_trial
from lossforge.kernels.math import INTERPRETED

PROGRAMS = 4096  # enough to fill any GPU many times over, few enough for one program to add up their parts
GRID_Y = 32768  # of the 65535 programs that a GPU takes along a grid's second axis, a power of two
COUNTED = 1024  # rows of class indices that a launch counts itself, in every program


class ElementTiles(NamedTuple):
    """Elements a tile; warps a program; programs a multiprocessor, for which registers may have to be few.

    stages: tiles on their way at once, where the kernel does not itself read one ahead.
    """

    block: int
    warps: int
    programs: int = 1
    stages: int = 1


def element_tiles(
    n: int, itemsize: int, tensors: int, indices: bool, diagonal: bool, grouped: bool, special: bool, heavy: bool
) -> ElementTiles:
    """tensors: how many a launch reads. indices: class-index targets; diagonal: it takes their place; grouped: 8 elements lie in one row.

    special: two formulas in one kernel. heavy: a formula of so much arithmetic that registers limit the programs under way.
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
    """Pairs of boxes a tile and warps a program."""

    block: int
    warps: int


def box_tiles(n: int, itemsize: int) -> BoxTiles:
    """A lane reads 16 bytes at once, so that it has one pair, or two in half precision."""
    if (tried := on_trial(BoxTiles)) is not None:
        return tried
    return BoxTiles(128 if itemsize == 4 else 256, 4)


class BinTiles(NamedTuple):
    """Rows of a tile, its bins, those of a second one for the last few bins (0: there is none), and warps."""

    rows: int
    bins: int
    tail: int
    warps: int


def bin_tiles(bins: int) -> BinTiles:
    """Where bins are no power of two, rows begin at no aligned address: a warp then has a tile of its own, and waits for no other.

    17 bins are tiles of 16 and of 1, because in one of 32 half of the lanes would be idle.
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
    """Rows and classes of a tile, whether a row fits one, neighbouring classes that a lane sums, warps, and tiles on their way at once.

    programs: as of ElementTiles.
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
    """rows_adjacent: neighbouring rows, not classes, lie next to each other in memory, as in (N, C, H, W).

    dense: targets of all classes are summed too, which takes twice the registers. gradient: a second sweep follows the first.
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
    """shift: as of resident_tiles."""
    if (tried := on_trial(BackwardTiles)) is not None:
        return tried
    whole = next_power_of_2(classes)
    if rows_adjacent:
        tile = min(whole, max(32, whole // GRID_Y))
        return BackwardTiles(min(1024, 4096 // tile) if tile <= 32 else 32, tile, 4)
    tile = min(whole, max(4096 if shift > 1 else 2048, whole // GRID_Y))
    # with more than 16 rows, but fewer than threads, Triton's compiler mixes up the layouts of rows and tile
    return BackwardTiles(16 if tile == 64 else max(1, 2048 // tile), tile, 2 if tile in (32, 64) else 4)


class SimilarityTiles(NamedTuple):
    rows: int
    columns: int
    warps: int


class SimilarityGradientTiles(SimilarityTiles):
    pass


def contrastive_tiles(rows: int, columns: int) -> SimilarityTiles:
    """Of a matrix that is summed along both sides: large tiles leave few parts to join, small ones fill the GPU."""
    if (tried := on_trial(SimilarityTiles)) is not None:
        return tried
    return SimilarityTiles(64, 64, 4) if rows * columns <= 2**20 else SimilarityTiles(128, 64, 4)


def similarity_gradient_tiles() -> SimilarityGradientTiles:
    return on_trial(SimilarityGradientTiles) or SimilarityGradientTiles(32, 64, 4)


def divergence_tiles(classes: int, itemsize: int, rows_adjacent: bool, lean: bool) -> RowTiles:
    """For two tensors of logits, read side by side. itemsize: the smaller of theirs. lean: 40 registers hold what a program needs."""
    if (tried := on_trial(RowTiles)) is not None:
        return tried
    whole = next_power_of_2(classes)
    if rows_adjacent:
        tile = min(whole, 32)
        return RowTiles(2048 // tile, tile, whole == tile, 1, 4)
    if whole <= 8192:
        tile_rows = max(1, 1024 // whole)
        return RowTiles(tile_rows, whole, True, 1, max(2, min(16, whole * tile_rows * itemsize // 1024)))
    if itemsize == 4 and classes <= 65536:
        return RowTiles(1, 16384, False, 4, 32)
    return RowTiles(1, 8192, False, 16 // itemsize, 16, programs=3 if lean else 1)


class ResidentTiles(NamedTuple):
    """Classes a chunk, chunks in the ring in shared memory, chunks in registers, warps, and programs a multiprocessor."""

    chunk: int
    ring: int
    held: int
    warps: int
    programs: int


def resident_tiles(classes: int, itemsize: int, shift: int, pair: bool, smoothing: bool, bias: bool, shared: int) -> ResidentTiles | None:
    """For rows that stay on chip, on a GPU whose programs may have `shared` bytes of shared memory; None where the template is as quick.

    shift: 1, or the elements of a vector where rows need not begin at one, which takes registers, as a pair of targets does, and smoothing
    beside a shift.
    bias: of the classes, float32 beside the row.
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
    most = 2 if pair else 6 if itemsize == 4 else 4 - (shift > 1)  # as many as registers hold
    held = 0 if chunks <= room else most
    return ResidentTiles(chunk, min(room, chunks - held), held, 16, 1)


def most_registers(warps: int, programs: int) -> dict[str, int]:
    """What a launch tells the compiler, for so many programs a multiprocessor to find the registers they need, 8 at a time a thread."""
    return {"maxnreg": 65536 // (32 * warps * programs) // 8 * 8} if programs > 1 else {}


class ResidentPairTiles(ResidentTiles):
    """The same of two rows: chunks of both in the ring, of h in registers."""


def resident_pair_tiles(classes: int, itemsize: int, slopes: bool, shared: int) -> ResidentPairTiles | None:
    """For logits and teacher whose rows stay on chip; as resident_tiles. itemsize: of both. slopes: h is found in a sweep of its own."""
    if (tried := on_trial(ResidentPairTiles)) is not None:
        return tried
    chunk = 8192 // itemsize
    chunks, room = -(-classes // chunk), (shared - 2048) // 16384
    spare = 2 if slopes and itemsize == 4 else 0  # chunks that find room in registers
    if classes <= 8192 or chunks > room + spare or on_trial(RowTiles) is not None:
        return None
    if 2 * (chunks + 1) <= room:
        return ResidentPairTiles(chunk, room // 2, itemsize if slopes else 0, 8, 2)
    if slopes and itemsize == 4:  # large chunks need fewer barriers, in half precision also more registers than there are
        chunk, chunks, room = 2 * chunk, -(-classes // (2 * chunk)), room // 2
        return ResidentPairTiles(chunk, min(room, 2 * chunks), 8, 16, 1)
    if slopes:
        return ResidentPairTiles(chunk, min(room, 2 * chunks), 8 if chunks <= 8 else 4, 16, 1)
    return ResidentPairTiles(chunk, min(room, 2 * chunks), 0, 8, 1)


class OverlapTiles(NamedTuple):
    """Classes and pixels of a tile, warps a program, and where a lane holds all classes of its own pixels, how many pixels."""

    classes: int
    pixels: int
    warps: int
    own: int = 0


def overlap_tiles(classes: int, softmax: bool, pixels_adjacent: bool, ce: bool) -> OverlapTiles:
    """softmax: a pixel's classes are read together, up to 512 in one tile. pixels_adjacent: as in (N, C, H, W), not channels last.

    ce: a cross entropy is summed too.
    """
    if (tried := on_trial(OverlapTiles)) is not None:
        return tried
    # registers hold the exponentials of a lane's pixels, three sums of every class, and what a fourth takes
    own = [n for n in (8, 4, 2, 1) if classes * (n + 3 + 2 * ce) <= 170 and (n < 8 or classes <= 8)]
    if softmax and pixels_adjacent and own and (classes <= 4 or not INTERPRETED):  # the interpreter's time goes by operations
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
        a_warp = 2048 if tile >= 32 else 1024  # a lane has few pixels, whose classes it joins
    else:
        a_warp = 512
    return OverlapTiles(tile, elements // tile, elements // a_warp)

"""Which kernel of mla_decode, how many parts: pure functions of host-known sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.device import PlannedGpu, Stated, launch_facts
from .decode_plan import Split

LATENT_DIM, ROPE_DIM = 512, 64
KEY_DIM = LATENT_DIM + ROPE_DIM
MAX_SEQLEN_Q = 16
# Whether the kernel for Hopper is used: None where it can be, False never. For tests.
choice: bool | None = None

_BOX_ROWS = 8  # the swizzle's rows, of which a box of the TMA holds whole ones
# Tiles that a block computes in the time that a part takes besides, and a merge.
_PART_TILES, _MERGE_TILES = 2, 2
# Sequences of which a warp holds the lengths where they are cut into shares (latent_shares.cuh).
_MOST_HELD = 32
# Where no item is longer, finding equal shares costs more than unequal ones do.
_SHORT_TILES = 16
_MOST_PARTS = 4  # a block, where items are cut for several
_MERGE_BLOCKS = 1024
# Parts of an item that are one cluster, blocks of a cluster, and multiprocessors that clusters of
# 4 and 8 do not fill.
_TEAMS, _MOST_CLUSTER, _LEFT_OVER = (4, 8), 8, 24
_FULL = 0.8  # of the blocks: they are as good as all
_SPARE_PARTS = 2
_ALL_UNITS = 1 << 30  # Work::shares_of: as many shares as `parallel` says
# Parts of a mean item up to which the block with its end merges them: of few rows, of 64. More are
# merged by a launch of many blocks.
_FEW_PARTS, _FEW_PARTS_64 = 4, 6
# Units that a part of a line takes besides, at most; units of a line, which the kernel counts in
# 32 bits.
_MOST_PART_UNITS, _MOST_LINE = 4, (1 << 31) - 1


class MlaGiven(NamedTuple):
    """The arguments of a step, in the order of its schema."""

    q: Any
    kv_cache: Any
    cache_seqlens: Any
    block_table: Any
    softmax_scale: Any
    num_splits: Any
    out: Any
    lse: Any = None


@dataclass(frozen=True, slots=True)
class MlaVariant:
    """A kernel: csrc/kv_cache/mla_decode.cu or mla_decode_sm90.cu; rows: of a block, if few."""

    cubin: str
    rows: int = 0

    @property
    def is_sm90(self) -> bool:
        """Whether it reads the cache by tensor maps, a block taking several parts."""
        return self.cubin != "mla_decode"

    @property
    def stated(self) -> Stated:
        """Threads, shared memory, block_m (rows) and block_n (tokens of a tile)."""
        return launch_facts(self.cubin, self.function("bf16"))

    @property
    def has_line(self) -> bool:
        """Whether it can cut all items as one line."""
        return self.is_sm90

    @property
    def line_unit(self) -> int:
        """Tokens at whose multiples a line is cut: those that are computed at a time."""
        return self.stated.sizes["block_n"] * (1 if self.rows else 2)

    def cluster_of(self, rows: int) -> int:
        """Blocks that share their tokens: two where that leaves none of them without rows."""
        blocks = -(-rows // self.stated.sizes["block_m"])
        return 2 if self == SM90 and blocks % 2 == 0 else 1

    def function(self, token: str) -> str:
        """The kernel's name for a dtype's token."""
        return f"{self.cubin}_{token}" + (f"_rows{self.rows}" if self.rows else "")


PORTABLE, SM90 = MlaVariant("mla_decode"), MlaVariant("mla_decode_sm90")
TEAM = MlaVariant("mla_team_sm90")
SM90_FEW = tuple(MlaVariant("mla_decode_sm90", rows) for rows in (16, 32))


def choose_variant(given: MlaGiven, device: PlannedGpu) -> MlaVariant:
    """The kernels for Hopper where there are pages, tables have columns, and boxes can be of 8
    tokens or more; of them the one of the fewest rows that a sequence has room in."""
    pages, page_size = given.kv_cache.shape[:2]
    table = given.block_table
    fits = table is None or (page_size % _BOX_ROWS == 0 and table.shape[1] > 0)
    is_there = pages > 0 and page_size > 0
    if choice is False or not (device.has_wgmma and fits and is_there):
        return PORTABLE
    rows = given.q.shape[1] * given.q.shape[2]
    return next((few for few in SM90_FEW if rows <= few.rows), SM90)


class LineCosts(NamedTuple):
    """What a line takes besides, in its units.

    part: a round of parts; merge: more where items are of several; cut: a place of items that are
        cut anywhere. last: the time of a last round, however few its parts are, by a whole one's:
        where memory binds, few blocks have more of its rate each.
    """

    part: float
    merge: float
    cut: float
    last: float


# As measured on an H100: of few rows, of 64, of 64 in clusters of two, which products bind.
_COSTS_FEW, _COSTS_64 = LineCosts(1.8, 1.0, 6.2, 0.75), LineCosts(1.5, 1.5, 5.6, 0.75)
_COSTS_CLUSTER = LineCosts(1.0, 1.0, 4.5, 1.0)


class Line(NamedTuple):
    """Items one after the other, cut into equal places (csrc/kv_cache/decode/sm90/latent_line.cuh).

    even: how many where lengths are nearly the same; uneven: else.
    """

    even: int
    uneven: int

    @property
    def most(self) -> int:
        """Places."""
        return max(self)

    @property
    def partials(self) -> int:
        """Parts of items that are cut: the end of one and the beginning of another a place."""
        return 2 * self.most


def choose_line(
    items: int, tokens: int, variant: MlaVariant, num_splits: int, blocks: int, cluster: int = 1
) -> Line | None:
    """Whether items are cut as a line, and how: not where they are so few that one is many parts,
    which a block alone would take long to merge."""
    few = _FEW_PARTS if variant.rows else _FEW_PARTS_64
    if not variant.has_line or num_splits > 0 or few * items < blocks:
        return None
    units = max(1, -(-tokens // variant.line_unit))
    if items * (units + _MOST_PART_UNITS) > _MOST_LINE:
        return None

    costs = _COSTS_FEW if variant.rows else _COSTS_64 if cluster == 1 else _COSTS_CLUSTER

    def time_of(parts: int) -> float:
        rounds, rest = divmod(items * parts, blocks)
        last = (max(costs.last, rest / blocks) if rounds else 1.0) if rest else 0.0
        besides = costs.part + (costs.merge if parts > 1 else 0.0)
        return (rounds + last) * -(-units // parts) + (rounds + (rest > 0)) * besides

    # Whole items, or equal parts; or places that cut items anywhere, each with two parts.
    parts = min(range(1, min(units, few) + 1), key=time_of)
    is_cut = time_of(parts) > items * units / blocks + costs.cut
    return Line(blocks if is_cut else items * parts, blocks)


def choose_team(
    items: int, tokens: int, variant: MlaVariant, num_splits: int, num_sms: int, cluster: int = 1
) -> int:
    """Into how many parts an item is cut whose blocks are one cluster, which merges them; 0: not.

    The launch that merges takes as long as a pair of tiles or two where all blocks have a part, and
    little where most have none; so where all would, parts may be a pair longer for it. Eight, which
    are slower to begin, are of use where they leave no more than half of the blocks idle.
    """
    tiles = max(1, -(-tokens // variant.stated.sizes["block_n"]))
    if variant != SM90 or num_splits > 0 or tiles < _TEAMS[0]:
        return 0
    blocks = num_sms // cluster
    apart = max(1, min(tiles, blocks // items))
    is_full = items * apart >= _FULL * blocks
    most = -(-tiles // (2 * apart)) + is_full
    room = num_sms - _LEFT_OVER
    few, many = _TEAMS
    fitting = [
        (-(-tiles // (2 * parts)), parts)
        for parts in ((few, many) if is_full and 2 * items * many >= room else (few,))
        if parts * cluster <= _MOST_CLUSTER and items * parts * cluster <= room
    ]
    pairs, parts = min(fitting, default=(0, 0))
    return parts if pairs <= most else 0


def promotion(variant: MlaVariant) -> str | None:
    """Of the cache's tensor map: pairs of lines are fetched twice where a line of each row's nine
    is asked for at a time, and again into the L2 (3 % of 128 heads, nothing of 16)."""
    return None if variant.rows else "128B"


def choose_split(
    items: int, tokens: int, tile: int, num_splits: int, blocks: int, batch_size: int = 1,
    rows: int = 0,
) -> Split:  # fmt: skip
    """How items, (sequence, block of rows) pairs of at most `tokens` tokens, are cut; rows: of a
    block, where they are few.

    The time of the blocks' rounds is made small as if all caches were full; where lengths differ,
    the kernel cuts as many equal shares from what they are.
    """
    tiles = max(1, -(-tokens // tile))
    if num_splits > 0:
        parts = min(num_splits, tiles)
        return Split(parts, items, items * parts, items if parts > 1 else 0, _ALL_UNITS)

    # Hopper's kernel has two tiles at a time, of few rows one, whose merge is short.
    is_quick = rows == 16 and tiles <= _SHORT_TILES
    step, merge_tiles = (1, 1) if is_quick else (2, _MERGE_TILES)

    def time_of(parts: int) -> int:
        rounds = -(-items * parts // blocks)
        steps = -(-tiles // (step * parts))
        return rounds * (step * steps + _PART_TILES) + (merge_tiles if parts > 1 else 0)

    most = max(1, min(tiles, _MOST_PARTS * blocks // items))
    parts = min(range(1, most + 1), key=time_of)
    if tiles <= _SHORT_TILES or batch_size > _MOST_HELD:
        return Split(parts, items, items * parts, items if parts > 1 else 0, _ALL_UNITS)
    parallel = items * parts
    if 2 * items <= blocks:
        # Caches of one length become `parts` each by any number of shares from items (parts - 7/8)
        # on. Where lengths differ there is half a part more an item than shares, or a few more: for
        # them to run in as many rounds there are fewer shares.
        rounds = -(-parallel // blocks)
        fewest = items * (parts - 1) + -(-items // 4)
        parallel = max(fewest, min(parallel, rounds * blocks - items // 2 - _SPARE_PARTS))
    # Work::splits_of: less than an item's shares + 1, and more than one only above 9/8 of a share.
    return Split(0, parallel, min(parallel + items, items * tiles), items, _ALL_UNITS)


def merge_grid(split: Split, rows: int) -> tuple[int, int, int]:
    """Blocks of decode_attention's merge for `rows` rows an item: one wave at most, as none of them
    fits beside a block that computes."""
    tasks = rows * -(-LATENT_DIM // 128)
    return split.num_merges, max(1, min(tasks, _MERGE_BLOCKS // split.num_merges)), 1

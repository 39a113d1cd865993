"""Which decode kernel, how many workers, how much workspace: pure functions of host-known sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core import common
from ..core.device import Stated, launch_facts


class DecodeGiven(NamedTuple):
    """The arguments of a decode step, in the order of its schema."""

    q: Any
    k_cache: Any
    v_cache: Any
    cache_seqlens: Any
    k: Any
    v: Any
    block_table: Any
    cos: Any
    sin: Any
    qkv_bias: Any
    k_scale: Any
    v_scale: Any
    alibi_slopes: Any
    sinks: Any
    tree_mask: Any
    interleaved: Any
    rotary_dim: Any
    softmax_scale: Any
    window_left: Any
    softcap: Any
    num_splits: Any
    out: Any
    lse: Any = None
    k_scale_cache: Any = None
    v_scale_cache: Any = None
    cache_ready: bool = False

    @property
    def max_tokens(self) -> int:
        """That a sequence's cache has room for."""
        page_size, table = self.k_cache.shape[1], self.block_table
        return int(page_size if table is None else page_size * table.shape[1])

    @property
    def scales(self) -> tuple[Any, Any]:
        """Of tokens."""
        return self.k_scale_cache, self.v_scale_cache

    @property
    def scaled(self) -> str:
        """What names the kernels of bytes other than e4m3 with a scale a head; "": others'."""
        if self.k_cache.dtype == torch.int8:
            return "_int8"
        return "" if self.k_scale_cache is None else "_e4m3_tokens"

    @property
    def scale_strides(self) -> list[int]:
        """What those kernels take besides; 0 where no scales are a token's."""
        scales = self.scales if self.scaled else ()
        return [s for x in scales for s in ((0, 0, 0) if x is None else x.stride())]


def given_of(*arguments: Any) -> DecodeGiven:
    """Those of a call, whose softmax_scale may be None: its plan alone asks what that is."""
    given = DecodeGiven(*arguments)
    if given.softmax_scale is None:
        return given._replace(softmax_scale=1.0 / math.sqrt(common.last_size(given.q) or 1))
    return given


MAX_SEQLEN_Q = 16
MAX_HEAD_DIM, MAX_HEAD_DIM_FP32 = 256, 128
CUBIN = "decode_attention"
WIDE_CUBIN = f"{CUBIN}_wide_sm90"
_OF_CACHE = {1: f"{CUBIN}_e4m3", 2: CUBIN, 4: f"{CUBIN}_fp32"}  # by bytes of an element
MAX_MERGE_BLOCKS = 264
# Blocks on this part of the multiprocessors read at full speed.
FULL = 0.85
_FP32_BYTES = 4  # of an element
# Where no item can be longer than this, and no part that is cut without the lengths (of more items
# than two a multiprocessor: 6 times as much), finding equal shares costs more than unequal ones do.
SHORT_TOKENS, SHORT_BYTES = 8192, 360 << 10
CROWD, CROWD_FACTOR = 2, 6
# Of those, Hopper's own of many columns are in two parts where memory is fast and an item has so
# many bytes, up to so many a multiprocessor.
MANY, LONG_BYTES = 6, 1 << 20
# A block that has no more than this under way, or so many columns, reads slower than two a
# multiprocessor, which earn their merge where there are few items of large caches.
FEW_BYTES, LARGE_BYTES, MANY_COLUMNS = 32 << 10, 128 << 20, 256
# More parts than this take longer to merge than they save, unless an item is twice as many units.
MANY_PARTS = 32
# A part less of an item that is no longer than this saves nothing that its merge does not take.
PART_BYTES = 96 << 10
# Parts of an item up to which those of one sequence are cut for as many blocks as others.
ALONE_PARTS = 8
# Shares of more than this, of all items, are of the sizes that `shares_of` knows.
FINE_BYTES = 30 << 20


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel of csrc/kv_cache/decode_attention.cu, or of its twins for other caches."""

    suffix: str
    head_dim: int
    cache_bytes: int  # of an element
    is_sm90: bool = False  # Hopper alone has it
    scaled: str = ""  # `DecodeGiven.scaled`

    @property
    def cubin(self) -> str:
        """Where it is."""
        if self.scaled:
            return CUBIN + self.scaled
        return WIDE_CUBIN if self.is_sm90 else _OF_CACHE[self.cache_bytes]

    @property
    def merging_cubin(self) -> str:
        """Where what merges its parts is."""
        return CUBIN if self.cache_bytes <= 2 else self.cubin

    def name(self, token: str) -> str:
        """Of queries of that dtype."""
        return f"{CUBIN}_{token}_hdim{self.head_dim}{self.suffix}"

    @property
    def stated(self) -> Stated:
        """Threads, shared memory and sizes."""
        return launch_facts(self.cubin, self.name("fp32" if self.cache_bytes == 4 else "bf16"))

    @property
    def rows(self) -> int:
        """Rows (tokens x query heads of one kv head) a block takes."""
        return self.stated.sizes["block_m"]

    @property
    def unit(self) -> int:
        """Tokens in a unit of work: a tile for each warp."""
        sizes = self.stated.sizes
        return sizes["warps"] * sizes["block_n"]

    @property
    def is_many_columns(self) -> bool:
        """Whether it is Hopper's own of the most columns."""
        return self.is_sm90 and self.head_dim == MANY_COLUMNS

    def bytes_under_way(self, head_dim: int) -> int:
        """What a block has asked for while it computes."""
        return self.unit * (self.stated.sizes["slots"] - 1) * head_dim * self.cache_bytes


VARIANTS = (
    Variant("", 192, 2, is_sm90=True),
    Variant("_slots3", MANY_COLUMNS, 2, is_sm90=True),  # before that of others
    *(
        Variant(suffix, head_dim, cache_bytes)
        for cache_bytes, token in ((2, ""), (1, "_e4m3"))
        for head_dim, suffix in (
            (64, token), (64, f"{token}_rows32"), (128, token), (128, f"{token}_rows32"),
            (256, token),
        )
    ),
    Variant("", MAX_HEAD_DIM_FP32, 4),
    *(
        Variant(scaled, head_dim, 1, scaled=scaled)
        for scaled in ("_int8", "_e4m3_tokens")
        for head_dim in (64, 128, 256)
    ),
)  # fmt: skip


def mask_strides(tree_mask: Any) -> tuple[int, int]:
    """Of a tree's mask, in words of 32 bits: between sequences and between tokens."""
    if tree_mask is None:
        return 0, 0
    words = tree_mask.element_size() // 4
    batch_stride = tree_mask.stride(0) if tree_mask.dim() == 2 else 0
    return words * batch_stride, words * tree_mask.stride(-1)


def merge_stated() -> Stated:
    """What the kernel that merges parts states."""
    return launch_facts(CUBIN, f"{CUBIN}_bf16_merge")


def choose_variant(
    head_dim: int, cache_bytes: int, rows: int, is_general: bool, is_sm90: bool = False,
    scaled: str = "",
) -> Variant:  # fmt: skip
    """The kernel for `rows` rows (seqlen_q x group); is_general: window, softcap or alibi;
    is_sm90: on Hopper; scaled: of `DecodeGiven`."""
    wanted = 16 if rows <= 16 or is_general else 32
    fitting = [
        v for v in VARIANTS
        if v.head_dim >= head_dim and v.cache_bytes == cache_bytes and v.is_sm90 <= is_sm90
        and v.scaled == scaled
    ]  # fmt: skip
    # The smallest head_dim; then the blocks of rows wanted, where there are such.
    least = min(v.head_dim for v in fitting)
    least_fitting = [v for v in fitting if v.head_dim == least]
    return next((v for v in least_fitting if v.rows == wanted), least_fitting[0])


@dataclass(frozen=True, slots=True)
class Split:
    """How items are cut into parts, a part a block.

    num_splits: parts an item; 0: the kernel cuts about `parallel` equal ones from the lengths.
    num_blocks: at most so many parts; num_merges: at most so many items in more than one part.
    fine_units: of all items; where there are more, shares are those of `shares_of`.
    """

    num_splits: int
    parallel: int
    num_blocks: int
    num_merges: int
    fine_units: int = 0


class Caches(NamedTuple):
    """What steps of a plan read: items are (sequence, kv head, block of rows) triples.

    tokens: the most that an item can have; seen: those of them in a window.
    token_bytes: a key and a value; num_bytes: all caches together; alone: of one sequence, its new
    tokens, else 0.
    """

    items: int
    tokens: int
    seen: int
    token_bytes: int
    num_bytes: int
    alone: int = 0


def blocks_for(variant: Variant, caches: Caches, head_dim: int, multiprocessors: int) -> int:
    """How many blocks items are cut for.

    Of fp32, whose products are in parts, one does not read as fast as a multiprocessor can.
    """
    is_double = variant.cache_bytes == _FP32_BYTES or (
        (variant.is_many_columns or variant.bytes_under_way(head_dim) <= FEW_BYTES)
        and 2 * caches.items <= multiprocessors
        and caches.num_bytes >= LARGE_BYTES
    )
    return 2 * multiprocessors if is_double else multiprocessors


def shares_of(items: int, units: int, fine_units: int, num_sms: int) -> int:
    """At most so many shares of more than `fine_units` units of all items, as `Work::shares_of`
    of the kernel has them."""
    if units <= 12 * fine_units:
        shares = min(3 * num_sms // 2, 2 * num_sms - items // 2)
    else:
        shares = (3 if units <= 24 * fine_units else 8) * num_sms
    return max(shares, -(-2 * items // 3))


def choose_split(
    caches: Caches, unit_tokens: int, num_splits: int, blocks: int, num_sms: int,
    is_wide: bool = False,
) -> Split:  # fmt: skip
    """blocks: of `blocks_for`; is_wide: of Hopper's own of many columns, and fast memory.

    Measured on an H200 (docs/notes/decode_attention.md): a block a multiprocessor is best, and
    reads as fast as two, but where it has little under way.
    """
    items, max_units = caches.items, max(1, -(-caches.tokens // unit_tokens))
    # As many parts of equal items as fill the GPU, or nearly.
    parts = max(1, blocks // items)
    if items * parts < FULL * blocks:
        parts += 1
    if num_splits == 0:
        fixed = min(parts, max(MANY_PARTS, max_units // 2))
        longest = -(-caches.seen // min(fixed, max_units)) * caches.token_bytes
        limit = SHORT_BYTES * (CROWD_FACTOR if items > CROWD * blocks else 1)
        if max_units * unit_tokens <= SHORT_TOKENS and longest <= limit:
            if is_wide and CROWD < items / blocks <= MANY and longest > LONG_BYTES:
                fixed = 2
            saved = caches.seen * caches.token_bytes * (fixed - 1) // fixed
            num_splits = 1 if saved < PART_BYTES else fixed
        elif caches.alone > 1:
            # Nothing is to be evened out: a block a multiprocessor, found without lengths.
            num_splits = max(1, num_sms // items, min(ALONE_PARTS, blocks // items))
    num_splits = min(num_splits, max_units)
    if num_splits == 1:
        return Split(1, items, items, 0)
    if num_splits > 1:
        return Split(num_splits, items, items * num_splits, items)
    parallel = items * parts if items < blocks else blocks
    # Work::splits_of: less than an item's shares + 1, and more than one only above 9/8 of a share.
    fine_units = max(1, FINE_BYTES // (unit_tokens * caches.token_bytes))
    units = items * max_units
    if caches.alone:  # its items are of one length: as many parts whatever that is
        fine_units = max(fine_units, units)
    most, even = parallel, 0
    if units > fine_units:
        # The kernel counts in fp32.
        most = max(most, shares_of(items, units + (units >> 20), fine_units, num_sms))
        # Work::shares_of, of items nearly as long as each other: no more parts in two rounds, but
        # an eighth of one for each that is a part though it is less: an eighth of them, or fewer.
        even = (2 if units <= 12 * fine_units else 4) * num_sms + items // 64
    num_blocks = min(max(most + items, even), units)
    return Split(0, parallel, num_blocks, min(items, most), fine_units)


def split_of(
    given: DecodeGiven, variant: Variant, items: int, max_tokens: int, num_sms: int, wide: bool
) -> Split:
    """The parts that a kernel of parts cuts its caches into."""
    batch_size, seqlen_q, _, head_dim = given.q.shape
    cache, left = given.k_cache, given.window_left
    seen = max_tokens if left < 0 else min(max_tokens, left + seqlen_q)
    token_bytes = 2 * head_dim * cache.element_size()
    num_bytes = batch_size * cache.shape[2] * seen * token_bytes
    alone = seqlen_q if batch_size == 1 else 0
    caches = Caches(items, max_tokens, seen, token_bytes, num_bytes, alone)
    blocks = blocks_for(variant, caches, head_dim, num_sms)
    return choose_split(caches, variant.unit, given.num_splits, blocks, num_sms, wide)


def merge_grid(split: Split, rows: int, head_dim: int) -> tuple[int, int, int]:
    """Blocks of the merge kernel for `rows` rows an item: (items, tasks, 1)."""
    tasks = rows * -(-head_dim // 128)
    # Few items may have many parts each: a block a task; else a warp a task.
    many = split.num_merges * tasks > MAX_MERGE_BLOCKS
    warps = merge_stated().sizes["warps"]
    return split.num_merges, -(-tasks // warps) if many else tasks, 1

"""The launch of attention in e4m3 on Hopper: which kernel, which numbers, and what it refuses.

Knows the canonical `Problem`, its scales and the kernels of
csrc/attention/flash_attention_fp8_sm90.cu;
shapes and dtypes were checked before (fp8.py).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import TensorError
from ..core import bounds, common
from ..core.counters import counters
from ..core.device import Stated, device_of, launch_facts
from ..core.launch import Launch, nothing
from .forward_sm90 import MAX_TILES, MAX_TOKENS, NUM_COUNTERS
from .packed_tile import TileCost, prompt_of, prompt_us
from .problem import (
    PANEL_BYTES,
    SCALES,
    Options,
    Problem,
    is_mappable,
    lse_strides_of,
    packed_tensor_map,
    strides_of,
    tensor_map,
)
from .tile_costs import heads_a_group

CUBIN = "flash_attention_fp8_sm90"
# Tokens that share a scale where scales are given for blocks.
SCALE_TOKENS = 128
OUT_DTYPES = (torch.bfloat16, torch.float16)
_OP = "flash_attention"
_ROWS = 64  # of a warpgroup
# How many heads may share them. For tests.
most_packed = 64
_ANY = "any"  # causal or not, as the launch says
_PANELS = {192: 64}  # bytes of a row in shared memory, of some widths; else PANEL_BYTES
_APART = (96, 160, 192, 224)  # columns of bodies whose heads do not share tiles
_ALL_KEYS = 1 << 29  # ahead of a query: its sum with two lengths stays in 32 bits


class Scales(NamedTuple):
    """fp32: x = x_fp8 * scale; None is 1. Of a tensor: () or (1,); of heads: (heads,) or
    (batch_size, heads); of blocks of SCALE_TOKENS tokens: (batch_size, heads, blocks)."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    @property
    def has_blocks_of_keys(self) -> bool:
        """Whether K or V has scales of blocks."""
        return any(scale is not None and scale.dim() == 3 for scale in (self.k, self.v))


@dataclass(frozen=True, slots=True)
class Body:
    """One compiled tile shape: `flash_attention_fp8_sm90_e4m3_hdim{head_dim}_{suffix}`.

    least_keys: of the longest sequence, for it to be the faster one; least_rows: of queries of all
    heads, of which larger tiles need more for all multiprocessors.
    """

    suffix: str
    head_dim: int
    least_keys: int = 0
    least_rows: int = 0

    @property
    def stated(self) -> Stated:
        """Threads, shared memory, block_m (queries) and block_n (keys) of a tile."""
        return launch_facts(CUBIN, self.name)

    @property
    def q_rows(self) -> int:
        """Queries of a warpgroup, which one copy brings."""
        sizes = self.stated.sizes
        return sizes["block_m"] // sizes["consumers"]

    @property
    def can_pack(self) -> bool:
        """Whether heads may share the rows of its tiles."""
        return self.head_dim not in _APART and not self.suffix.endswith("_blocks")

    @property
    def is_long(self) -> bool:
        """Whether it is the one for more keys."""
        return self.suffix.endswith("_long")

    @property
    def name(self) -> str:
        """The function's name."""
        return f"{CUBIN}_e4m3_hdim{self.head_dim}_{self.suffix}"


# Of the rows with a problem's suffix, the smallest head_dim that holds its own, and of these the
# largest least_keys that it reaches; docs/notes/flash_attention_fp8_sm90.md says why these.
BODIES = (
    Body("full", 64),
    Body("full_long", 64, 2048),
    Body("causal", 64),
    Body("causal_long", 64, 1 << 14),
    Body("full_blocks", 64),
    Body("causal_blocks", 64),
    Body("full", 96, 1024),
    Body("causal", 96, 1024),
    Body("full", 128),
    Body("full_long", 128, 2048),
    Body("causal", 128),
    Body("causal_long", 128, 2560, least_rows=96 << 10),
    Body("causal_long", 128, 8192),
    Body("full_blocks", 128),
    Body("causal_blocks", 128),
    Body(_ANY, 160),
    Body("full", 192),
    Body("causal", 192),
    Body(_ANY, 224),
    Body("full", 256),
    Body("causal", 256),
    Body("full_blocks", 256),
    Body("causal_blocks", 256),
)


# Rounds of tiles of 128 rows, by the head_dim of the body that they are taken for.
_FEW_ROUNDS = {64: 1, 96: 2}
# A block of keys, and a tile's beginning and end (packed_tile.TileCost), by width and whether it is
# for more keys; heads up to _NARROW may be better in kernels of that width, wider ones
# that share keys in the widest, whose tiles they can share.
_COSTS = {
    (64, False): (1.20, 1.8), (64, True): (1.48, 2.0), (96, False): (1.36, 2.0),
    (128, False): (1.12, 1.6), (128, True): (1.16, 2.4), (160, False): (1.32, 2.0),
    (192, False): (1.45, 2.2), (224, False): (1.56, 3.0), (256, False): (1.24, 3.2),
}  # fmt: skip
_NARROW, _WIDEST, _SURELY, _MASKS = 128, 256, 0.95, ("full", "causal")
# Rounds of causal tiles in which some heads may better begin before the others, shares of those
# that come last, and how much that must be better.
_FEWEST_ROUNDS, _MOST_ROUNDS, _LAST, _SURELY_APART = 2, 4, (0.875, 0.75, 0.625), 0.99


def check_device(q: torch.Tensor) -> None:
    """Only Hopper has these kernels."""
    device = device_of(q.device)
    if not device.has_wgmma:
        major, minor = device.compute_capability
        raise TensorError(
            f"{_OP}: q: expected float16 or bfloat16 on {device.name} (compute capability "
            f"{major}.{minor}), as e4m3 takes 9.0 (Hopper), found {common.say(q)}"
        )


def check_problem(problem: Problem) -> None:
    """What the TMA and the kernel's 32-bit sums need."""
    for argument, x in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        if x.numel() and not is_mappable(x):
            raise common.refuse(
                _OP, argument, "e4m3 rows that start at multiples of 16 bytes and do not overlap "
                "(call .contiguous() first)", x,
            )  # fmt: skip
    if not SCALES[0] <= problem.softmax_scale <= SCALES[1]:
        expected = f"a number from {SCALES[0]} to {SCALES[1]} with e4m3"
        raise common.refuse(_OP, "softmax_scale", expected, problem.softmax_scale)
    q_rows = BODIES[0].q_rows
    num_rows = max(1, -(-problem.max_seqlen_q // q_rows))
    num_tiles = num_rows * problem.batch_size * problem.q.shape[-2]
    tokens = max(*problem.q.shape[:-2], *problem.k.shape[:-2], problem.max_seqlen_q)
    if tokens > MAX_TOKENS or num_tiles > MAX_TILES:
        expected = f"at most {MAX_TOKENS} tokens and {MAX_TILES} tiles of {q_rows} queries"
        raise common.refuse(_OP, "q", expected, problem.q)


def choose(
    head_dim: int, is_causal: bool, has_blocks: bool, seqlen_k: int, rows: int, num_sms: int,
    seqlen_q: int,
) -> Body:  # fmt: skip
    """The row of BODIES for such a problem; rows: of queries of all heads."""
    mask = "causal" if is_causal else "full"
    suffixes = (f"{mask}_blocks",) if has_blocks else (mask, f"{mask}_long", _ANY)
    fitting = [
        body
        for body in BODIES
        if body.suffix in suffixes
        and body.head_dim >= head_dim
        and body.least_keys <= seqlen_k
        and body.least_rows <= rows
    ]
    best = min(fitting, key=lambda body: (body.head_dim, -body.least_keys))
    if best.suffix == mask and best.head_dim < 128 and seqlen_q > 0:
        # Tiles of fewer rows, if they are dealt in as many rounds.
        fewer = next(x for x in fitting if x.suffix == mask and x.head_dim == 128)
        rounds = [
            -(-(-(-seqlen_q // x.stated.sizes["block_m"]) * (rows // seqlen_q)) // num_sms)
            for x in (fewer, best)
        ]
        if rounds[0] <= min(rounds[1], _FEW_ROUNDS[best.head_dim]):
            return fewer
    return best


def _alike(problem: Problem, scales: Scales) -> int:
    """How many heads side by side share keys and q's scale."""
    num_heads, num_kv_heads = problem.q.shape[-2], max(1, problem.k.shape[-2])
    alike = max(1, num_heads // num_kv_heads)
    if scales.q is not None and scales.q.numel() > 1:
        alike = 1 if scales.q.dim() == 3 else math.gcd(alike, num_heads // scales.q.shape[-1])
    return alike


def _packs(alike: int, most: int) -> list[tuple[int, int]]:
    """(heads of a pack, packs) that such heads side by side may come in, up to `most` a pack: all
    of a size where that is possible; of more heads than rows, the last ones overlap."""
    if alike <= _ROWS:
        return [(heads, alike // heads) for heads in range(1, most + 1) if alike % heads == 0]
    sizes = [(-(-alike // packs), packs) for packs in range(2, alike + 1)]
    fewest = {heads: packs for heads, packs in reversed(sizes) if heads <= most}
    return sorted(fewest.items())


def _tile(body: Body, heads: int) -> TileCost:
    """Of a body, whose rows so many heads share."""
    sizes = body.stated.sizes
    tokens = _ROWS // heads * sizes["consumers"]
    return TileCost(tokens, sizes["block_n"], *_COSTS[body.head_dim, body.is_long])


def _cheapest(problem: Problem, own: Body, alike: int) -> tuple[Body, int, int]:
    """The body, how many heads share the rows of a warpgroup, and in how many packs, that cost
    least; `own`: what the rules say of heads apart, which is left where that is surely faster."""
    num_heads, right = problem.q.shape[-2], 0 if problem.window_right == 0 else -1
    apart = prompt_of(problem, num_heads, -1, right)
    if apart is None:
        return own, 1, alike
    num_sms = device_of(problem.q.device).num_sms
    best = math.inf, own, 1, alike
    for body in _others(own, problem.q.shape[-1], alike, right == 0):
        for heads, packs in _packs(alike, min(_ROWS, most_packed) if body.can_pack else 1):
            tile = _tile(body, heads)
            prompt = apart._replace(heads=apart.heads / alike * packs)
            us = prompt_us(prompt, tile, num_sms) * (_SURELY if body == own else 1.0)
            # Of equals with a diagonal, whose tiles see less: rows of few tokens.
            best = min(
                best, (us, body, heads, packs), key=lambda x: (x[0], x[2] if right else -x[2])
            )
    return best[1:]


def _others(own: Body, head_dim: int, alike: int, is_causal: bool) -> list[Body]:
    """What may be taken instead of a body, and that."""
    kind, widest = own.suffix.removesuffix("_long"), max(own.head_dim, _NARROW)
    if alike > 1 and own.head_dim > _NARROW and not own.can_pack:
        widest = _WIDEST
    if kind == _ANY:
        kind = _MASKS[is_causal]
    if kind not in _MASKS:
        return [own]
    suffixes = kind, f"{kind}_long"
    fitting = [x for x in BODIES if x.suffix in suffixes and head_dim <= x.head_dim <= widest]
    return list({body.name: body for body in (*fitting, own)}.values())


def _begin_last(seqlen_q: int, seqlen_k: int, packs: int, tile: TileCost, num_sms: int) -> int:
    """How many of the (sequence, pack) pairs begin last of few causal tiles, dealt the longest
    first to who is free. Those of the last round would follow tiles that all end at about the same
    time; where some pairs go through theirs before, they fill gaps."""
    rows = -(-seqlen_q // tile.tokens)
    ends = [seqlen_k - max(0, seqlen_q - row * tile.tokens) for row in range(rows, 0, -1)]
    costs = [tile.begin_us + -(-end // tile.block_n) * tile.unit_us for end in ends if end > 0]

    def us(last: int) -> float:
        loads = [0.0] * num_sms
        for count in (packs - last, last):
            for cost in costs:
                for _ in range(count):
                    heapq.heapreplace(loads, loads[0] + cost)
        return max(loads) * (_SURELY_APART if last == packs else 1.0)

    # Of equals the most, which are the fewest before them.
    return min((packs, *(math.ceil(packs * share) for share in _LAST)), key=us)


def _are_few(problem: Problem, packs: int, tile: TileCost) -> bool:
    """Whether causal tiles of so many (sequence, pack) pairs are dealt in few rounds, and the keys
    of all stay in the L2 together."""
    rounds = -(-problem.max_seqlen_q // tile.tokens) * packs / device_of(problem.q.device).num_sms
    if problem.window_right != 0 or not _FEWEST_ROUNDS <= rounds < _MOST_ROUNDS:
        return False
    num_pairs = problem.batch_size * problem.q.shape[-2]
    is_one_length = problem.cu_seqlens_q is None
    return is_one_length and heads_a_group(problem, problem.max_seqlen_k) >= num_pairs > 1


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    """(batch, head, block) strides; 0 where one scale holds for all."""
    if scale is None or scale.numel() == 1:
        return 0, 0, 0
    steps = [
        step if size > 1 else 0 for size, step in zip(scale.shape, scale.stride(), strict=True)
    ]
    if scale.dim() == 1:
        return 0, steps[0], 0
    return steps[0], steps[1], steps[2] if scale.dim() == 3 else 0


def plan(problem: Problem, scales: Scales, out: torch.Tensor, lse: torch.Tensor | None) -> Launch:
    """The launch for out (fp16 or bf16) and, unless it is None, lse (fp32, its last dimension
    contiguous).

    Lengths on the device (cu_seqlens, cache_seqlens) may be anything.
    """
    check_device(problem.q)
    check_problem(problem)
    q, k = problem.q, problem.k
    num_heads, head_dim = q.shape[-2:]
    num_kv_heads = k.shape[-2]
    seqlen_q, seqlen_k = problem.seqlens
    has_tables = problem.cu_seqlens_k is not None or problem.cache_seqlens is not None
    is_causal, rows = problem.window_right == 0, q.numel() // head_dim
    body = choose(
        head_dim, is_causal, scales.has_blocks_of_keys, seqlen_k, rows,
        device_of(q.device).num_sms, seqlen_q,
    )  # fmt: skip
    alike = _alike(problem, scales)
    body, heads, packs = _cheapest(problem, body, alike)
    stated = body.stated
    num_consumers, tokens = stated.sizes["consumers"], _ROWS // heads
    num_packs = num_heads // alike * packs
    tiles_a_pack = -(-seqlen_q // (tokens * num_consumers))
    num_pairs = problem.batch_size * num_packs
    num_tiles = tiles_a_pack * num_pairs
    packs_a_group = heads_a_group(problem, seqlen_k) // alike * packs
    tile = _tile(body, heads)
    if _are_few(problem, num_pairs, tile):
        num_sms = device_of(q.device).num_sms
        packs_a_group = _begin_last(seqlen_q, seqlen_k, num_pairs, tile, num_sms)
    q_scale_heads = num_heads
    if scales.q is not None and scales.q.numel() > 1:
        q_scale_heads = scales.q.shape[0 if scales.q.dim() == 1 else 1]
    numbers = (
        *strides_of(out), *lse_strides_of(lse), *_scale_strides(scales.q),
        *_scale_strides(scales.k), *_scale_strides(scales.v), problem.batch_size, num_packs,
        head_dim, seqlen_q, seqlen_k, *problem.totals, num_heads // max(1, num_kv_heads),
        max(1, num_heads // max(1, q_scale_heads)),
        packs_a_group,
        int(has_tables or seqlen_k == 0), int(out.dtype == torch.float16), problem.softmax_scale,
        0 if problem.window_right == 0 else _ALL_KEYS, heads, tokens,
        -(-(1 << 16) // heads), alike, packs, tiles_a_pack,
    )  # fmt: skip
    grid = (min(num_tiles, device_of(q.device).num_sms), 1, 1)
    function = common.shipped(CUBIN, body.name) if num_tiles else nothing
    panel_bytes = _PANELS.get(body.head_dim, PANEL_BYTES)
    boxes = (tokens, heads, stated.sizes["block_n"], panel_bytes)  # of q, of k and v, of all
    return Launch(function, grid, stated.block, stated.shared_bytes, numbers, boxes)


def maps(planned: Launch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[bytes, ...]:
    """The descriptors that the launch takes instead of q, k and v."""
    if not planned.maps:
        return ()
    tokens, heads, k_rows, panel_bytes = planned.maps
    # Where there are no keys, descriptors of something: nothing is loaded.
    keys = [tensor_map(x if x.numel() else q, k_rows, panel_bytes=panel_bytes) for x in (k, v)]
    return packed_tensor_map(q, tokens, heads, panel_bytes), *keys


def launch(
    planned: Launch, maps: tuple[bytes, ...], q: torch.Tensor, scales: Scales, out: torch.Tensor,
    lse: torch.Tensor | None, options: Options,
) -> None:  # fmt: skip
    """Run what `plan` made of tensors of these shapes and strides, dtypes and devices."""
    function, grid, block, shared_bytes, numbers, _, _ = planned
    params = (
        out, lse, bounds.flag(_OP, q), *maps, *scales, options.cu_seqlens_q, options.cu_seqlens_k,
        options.cache_seqlens, counters(q.device, NUM_COUNTERS), *numbers,
    )  # fmt: skip
    function(grid, block, shared_bytes, None, params)

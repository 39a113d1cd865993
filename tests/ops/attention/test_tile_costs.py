"""Which tiles whole prompts have on Hopper, by what they cost, and those that few problems take."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_devices import taken
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops.attention.packed_tile import PackedTile, Prompt, TileCost, prompt_us
from kernel_hub.ops.attention.problem import Problem, sizes_of
from kernel_hub.ops.core.device import PlannedGpu, has_wgmma, pretend
from kernel_hub.ops.core.launch import forget_all

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
COSTS: Any = importlib.import_module("kernel_hub.ops.attention.tile_costs")


def body(
    batch_size: int, seqlen: int, heads: int, head_dim: int, left: int = -1, right: int = -1,
    dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> str:  # fmt: skip
    q = torch.empty(batch_size, seqlen, heads, head_dim, dtype=dtype, device="meta")
    problem = Problem(q, q, q, batch_size, seqlen, seqlen, 0.1, left, right, **options)
    with pretend(PlannedGpu((9, 0), 132)):
        found = SM90._choose(problem)
    return f"{found.head_dim} {found.mask}{found.suffix}"


def test_who_has_tiles_of_more_rows() -> None:
    """us on an H100: 128 rows, 192."""
    for more in (
        (2, 4614, 16, 88, 2047, 2047),  # 481, 346
        (3, 16761, 16, 72, 1023, 1023),  # 1369, 1091
        (1, 6883, 16, 88, 2047, 0),  # 173, 143
        (4, 5094, 4, 88),  # 357, 298
        (24, 339, 16, 88),  # 77, 65
    ):
        assert body(*more) == "96 window_rows192"
    for wide in (
        (7, 5207, 4, 104),  # 671, 505
        (2, 23_000, 8, 104, 511, 511),  # 440, 374
        (1, 12_795, 2, 104, 4095, 0),  # 108, 75
    ):
        assert body(*wide) == "112 window_rows192"
    for fewer in (
        (2, 32_530, 2, 80, 511, 511),  # 114, 127
        (12, 3011, 1, 80, 255, 0),  # 21, 25
        (13, 585, 8, 72, 64, 0),  # 29, 34
        (130, 206, 8, 72),  # 88, 109
        (3, 1237, 2, 80),  # 19, 22
    ):
        assert body(*fewer) == "96 window"
    for causal in (
        (53, 733, 16, 104, -1, 0),  # 343, 293
        (1, 8249, 8, 104, -1, 0),  # 223, 195
    ):
        assert body(*causal) == "112 window_rows192"
    assert body(64, 251, 8, 104, -1, 0) == "128 causal"  # 50.7, 68
    assert body(755, 81, 2, 104) == "128 full"  # 44.6, 57.4 in those of 112 columns
    long = 2, 4614, 16, 88, 2047, 2047
    assert body(*long, softcap=20.0) == body(*long, batch_invariant=True) == "96 window"
    for capped in (
        (64, 129, 16, 88),  # us on an H200: 81, 49
        (64, 518, 8, 96),  # 193, 163
        (1, 9728, 2, 88),  # 244, 175
        (56, 140, 32, 96, -1, 0),  # 110, 75
    ):
        assert body(*capped, softcap=50.0) == "96 window_capped"
        assert body(*capped, softcap=60.0) == "96 window"  # no scores are tiny
        assert body(*capped, softcap=50.0, batch_invariant=True) == "96 window"
        assert body(*capped, softcap=50.0, dtype=torch.float16) == "128 window"
    assert body(3, 128, 16, 72, -1, 0, softcap=50.0) == "96 window"  # 9.3, 11.4
    assert body(64, 256, 2, 80, -1, 0, softcap=50.0) == "96 window"  # 19.6, 27.5
    assert body(*long, softcap=20.0, dtype=torch.float16) == "128 window"
    assert body(2, 4614, 16, 88, -1, 0) == "96 causal"
    assert body(2, 4614, 16, 128, 2047, 2047) == "128 window"


def test_costs() -> None:
    """A round more costs as much as the one before; masks leave half."""
    tile = TileCost(128, 128, 1.0, 2.0)
    one, two = (prompt_us(Prompt(n, 1024, 1024, -1, -1), tile, 132) for n in (16, 17))
    assert two - one == pytest.approx(10.0)
    full, causal = (prompt_us(Prompt(512, 1024, 1024, -1, n), tile, 132) for n in (-1, 0))
    assert 0.5 < causal / full < 0.75
    narrow = prompt_us(Prompt(512, 4096, 4096, 255, 0), tile, 132)
    assert narrow < prompt_us(Prompt(512, 4096, 4096, 1023, 0), tile, 132) < causal * 16


def prompts(batch_size: int, seqlen: int, heads: tuple[int, int], head_dim: int = 128) -> Problem:
    q, k = (
        torch.empty(batch_size, seqlen, n, head_dim, dtype=torch.bfloat16, device="meta")
        for n in heads
    )
    return Problem(q, k, k, batch_size, seqlen, seqlen, 0.1, -1, 0)


def together(
    problem: Problem, keys: int, rounds: float, width: int = 128, rows: int = 128
) -> int:  # fmt: skip
    with pretend(PlannedGpu((9, 0), 132)):
        sizes, tile = sizes_of(problem)[0], PackedTile(width, rows, 128)
        return int(COSTS.pairs_together(problem, sizes, keys, rounds, tile))


def test_which_pairs_run_together_in_turn() -> None:
    """us on an H100, pair by pair and together."""
    few = prompts(6, 651, (8, 1))
    assert together(few, 768, 1.9) == 6  # 22.5, 18.8
    assert together(prompts(25, 559, (32, 4)), 640, 26.5) == 34  # 169.5, 163.0
    assert together(prompts(46, 184, (16, 8)), 256, 8.4) > 50  # 47.9, 43.9
    assert together(prompts(128, 167, (40, 8)), 256, 54.3) == 1  # 208.5, 227
    assert together(prompts(768, 69, (12, 1)), 128, 40.7) == 1  # 127.9, 180.4
    short = prompts(64, 183, (4, 2))
    assert together(short, 256, 2.9) == 128
    assert together(short._replace(softcap=50.0), 256, 2.9) == 1  # 25.9, 29.4
    assert together(few, 768, 0.9) == 1
    assert together(few._replace(window_right=-1), 768, 1.9) == 1
    assert together(few._replace(window_left=300), 768, 1.9) == 1
    assert together(prompts(6, 651, (8, 1), 256), 720, 1.9, 256) == 3
    wide = prompts(29, 140, (4, 1), 256)  # us on an H200: 20.5, 17.5
    assert together(wide, 160, 1.1, 256) == 29
    assert together(wide._replace(softcap=50.0), 160, 1.1, 256) == 29  # 22.5, 18.3
    assert together(prompts(50, 160, (8, 4), 256), 160, 4.5, 256) != 200  # 39.0, 42.1


def test_blocks_of_80_keys_are_surely_fewer() -> None:
    """us on an H200: whole tiles with blocks of 64 keys, in turn."""

    def is_sure(
        batch_size: int, seqlen: int, heads: tuple[int, int], softcap: float = 50.0
    ) -> bool:
        problem = prompts(batch_size, seqlen, heads, 256)._replace(softcap=softcap)
        with pretend(PlannedGpu((9, 0), 132)):
            tile = PackedTile(256, 128, 80)
            return bool(COSTS.is_surely_in_turn(problem, tile, sizes_of(problem)[0]))

    assert is_sure(64, 71, (16, 8))  # 59.8, 51.3
    assert is_sure(64, 137, (2, 1))  # 28.2, 25.1
    assert not is_sure(64, 137, (2, 1), 0.0) and not is_sure(70, 133, (1, 1))  # -; 22.3, 23.8
    assert not is_sure(2, 74, (8, 4))  # 9.1, 10.0
    assert not is_sure(64, 110, (4, 2))  # 24.4, 25.0


def test_sequences_that_are_alike_run_together() -> None:
    """Where lengths are on the device: in groups about alike, of what the L2 holds."""
    table = torch.empty(18, dtype=torch.int32, device="meta")
    for batch_size, seqlen, sequences in ((5, 674, 5), (17, 700, 9), (6, 16_000, 1), (3, 1400, 3)):
        problem = prompts(batch_size, seqlen, (8, 2))._replace(cache_seqlens=table)
        assert COSTS.heads_a_group(problem, seqlen) == 8 * sequences
    # A chunk over more than the L2 holds: its tiles side by side read it once.
    long = torch.empty(64, 20_580, 2, 128, dtype=torch.bfloat16, device="meta")
    plain = prompts(64, 151, (2, 2))._replace(k=long, v=long, max_seqlen_k=20_580)
    assert COSTS.heads_a_group(plain, 20_580) == 2  # us on an H200: 485, of all of them 646
    chunks = prompts(43, 270, (4, 4), 224)._replace(cache_seqlens=table)
    assert COSTS.heads_a_group(chunks, 26_274) == 4


FEW = [
    Case(num_heads=4, num_kv_heads=2, head_dim=72, lengths_q=(150,) * 2, softcap=20.0),
    Case(num_heads=8, num_kv_heads=1, head_dim=128, lengths_q=(170,) * 2, softcap=5.0, causal=True),
    Case(num_heads=6, num_kv_heads=2, head_dim=40, lengths_q=(150,) * 2, softcap=2.0, causal=True),
    Case(num_heads=2, num_kv_heads=2, head_dim=64, lengths_q=(200,), softcap=50.0),
    Case(num_heads=3, num_kv_heads=3, head_dim=104, lengths_q=(200,) * 3),
    Case(num_heads=2, num_kv_heads=2, head_dim=80, lengths_q=(333,), causal=True, dtype="fp16"),
    Case(num_heads=4, num_kv_heads=4, head_dim=96, lengths_q=(190,) * 5, window_size=(64, 0)),
    Case(num_heads=2, num_kv_heads=1, head_dim=128, lengths_q=(300,), window_size=(100, 100)),
]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_tiles_of_few_rows(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Of prompts of one length, two blocks a multiprocessor."""
    found = taken(monkeypatch, SPLIT, lambda planned, *_: planned.function.name)
    case = dataclasses.replace(case, lengths_k=case.lengths_q, twice=True)
    with contextlib.nullcontext() if hopper_way.is_gpu else hopper_attention(monkeypatch, 61):
        run(case, hopper_way.device)
    assert found and all("rows64" in name for name in found)


def test_blocks_in_turn_are_as_many_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pieces nothing numbers them. us on an H200, 256 blocks and 264: 33.6, 21.2."""
    monkeypatch.setattr(SPLIT, "cuts_tiles", False)
    problem = prompts(3, 785, (7, 1))._replace(window_right=-1, softcap=15.0)
    with pretend(PlannedGpu((9, 0), 132)):
        monkeypatch.setattr(COSTS, "wants_few_rows", lambda *_: True)
        assert SPLIT.plan(problem, problem.q, None).grid == (264, 1, 1)
        assert SPLIT.plan(problem._replace(softcap=0.0), problem.q, None).grid == (256, 1, 1)


def wants_few(*of: Any, left: int = -1, right: int = 0, softcap: float = 0.0) -> bool:
    problem = prompts(*of)._replace(window_left=left, window_right=right, softcap=softcap)
    with pretend(PlannedGpu((9, 0), 132)):
        return bool(COSTS.wants_few_rows(problem, sizes_of(problem)[0]))


def test_who_has_tiles_of_few_rows() -> None:
    """us on an H200: as it was, in tiles of 64 rows."""
    assert wants_few(1, 199, (4, 4), 96)  # 8.2, 6.9
    assert wants_few(5, 139, (8, 8), 104, right=-1)  # 10.5, 8.6
    assert wants_few(46, 134, (5, 1), right=-1)  # 19.8, 16.3
    assert wants_few(64, 129, (12, 4), right=-1)  # 42.3, 38.4
    assert not wants_few(109, 161, (14, 2), right=-1)  # 73.3, 74.1
    assert not wants_few(2, 461, (2, 2), 40, right=-1)  # in 128 rows 9.9, 10.5
    assert wants_few(1, 272, (6, 6), 64, left=64, right=64)  # 10.4, 7.9
    assert not wants_few(3, 605, (2, 2), 40, right=-1)  # 11.3, 11.8
    assert not wants_few(5, 715, (2, 2), 104, right=-1)  # 14.6, 15.1
    assert not wants_few(24, 192, (8, 8), 88, right=-1)  # 17.7, 23.2
    assert wants_few(148, 161, (32, 8), left=64)  # 254, 181
    assert wants_few(5, 285, (3, 1), left=64)  # 9.6, 8.4
    assert not wants_few(9, 7035, (8, 2), left=127)  # 148, 158
    assert not wants_few(151, 151, (16, 16), 96, left=64)  # 95, 111
    assert wants_few(42, 192, (2, 2), 88, right=-1, softcap=30.0)  # 18.0, 13.2
    assert wants_few(64, 148, (20, 4), softcap=15.0)  # 75, 62
    assert wants_few(64, 76, (16, 2), 64, softcap=50.0)  # 30.0, 21.7
    assert wants_few(64, 207, (32, 2), 64, softcap=50.0)  # 164, 94
    assert wants_few(1, 121, (10, 10), 64, right=-1, softcap=15.0)  # 8.3, 6.9
    assert not wants_few(64, 721, (8, 2), 64, softcap=50.0)  # 141, 161
    assert not wants_few(89, 99, (8, 8), 88, right=-1, softcap=15.0)  # 28.9, 34.3
    assert not wants_few(121, 320, (8, 8), 104, right=-1, softcap=50.0)  # 167, 203


def is_short(problem: Problem) -> bool:
    with pretend(PlannedGpu((9, 0), 132)):
        return bool(SM90.is_short(problem))


def test_who_takes_short_prompts() -> None:
    """us on an H200: Hopper's kernels, the portable ones."""
    for few, of, left, right in (
        (False, (1, 1028, (16, 16), 192), 64, 0),
        (False, (3, 73, (2, 2), 192), -1, 0),  # 6.6, 7.3
        (False, (19, 257, (6, 6), 64), -1, -1),  # 16.1, 20.9: two rounds of the portable ones
        (False, (64, 320, (1, 1), 40), -1, -1),  # 11.1, 12.9
        (False, (10, 256, (12, 12), 64), -1, -1),  # 11.8, 12.4
        (False, (12, 128, (25, 25), 64), -1, -1),  # 12.1, 15.4
        (True, (29, 114, (8, 8), 40), -1, -1),  # 10.8, 9.1
        (True, (7, 196, (12, 12), 32), -1, -1),  # 11.0, 9.3
        (False, (159, 181, (3, 3), 32), -1, -1),  # 21.5, 23.7
        (False, (243, 192, (12, 12), 64), 64, 64),  # 114, 155
        (True, (49, 192, (3, 3), 64), 64, 64),  # 15.4, 14.4
        (True, (113, 245, (1, 1), 40), 64, 64),  # 16.0, 10.5
    ):
        problem = prompts(*of)._replace(window_left=left, window_right=right)
        assert is_short(problem) == few, (of, left, right)


def side_by_side(
    batch_size: int, total: int, longest: int, heads: tuple[int, int], head_dim: int
) -> Problem:
    table = torch.empty(batch_size + 1, dtype=torch.int32, device="meta")
    q, k = (
        torch.empty(total, n, head_dim, dtype=torch.bfloat16, device="meta") for n in heads
    )  # fmt: skip
    tables = {"cu_seqlens_q": table, "cu_seqlens_k": table}
    return Problem(q, k, k, batch_size, longest, longest, 0.1, -1, 0, **tables)


def test_wide_heads_side_by_side() -> None:
    """Of many rounds, with a second tile here and there. us on an H200: portable, ours."""
    packed = side_by_side(128, 8090, 256, (16, 8), 256)
    for few, problem in (
        (False, packed),  # 104.5, 78.4
        (False, side_by_side(128, 6430, 208, (16, 16), 192)),  # 115.9, 88.2
        (False, side_by_side(96, 5900, 204, (32, 32), 224)),  # 166, 154
        (True, side_by_side(128, 5504, 157, (32, 32), 224)),  # 152, 170
        (True, side_by_side(128, 6093, 188, (16, 16), 224)),  # 89.0, 95.1
        (True, side_by_side(128, 6430, 224, (2, 2), 160)),  # 16.7, 19.4
        (True, side_by_side(128, 4430, 121, (16, 16), 224)),  # 66.6, 78.9
    ):
        assert is_short(problem) == few
    with pretend(PlannedGpu((9, 0), 132)):
        found = SPLIT.best_way(packed, 128)
        tile, sizes = PackedTile(256, 128, 80), sizes_of(packed)[0]
        assert not found.is_cut and found.us == 0.0  # whole 98.6
        assert COSTS.short_blocks(sizes, tile) < COSTS.short_blocks(sizes, tile._replace(width=192))


def test_one_tile_of_wide_heads() -> None:
    """us on an H200: in turn, whole."""
    for batch_size, seqlen, heads, is_better in (
        (256, 103, 16, True),  # 157.4, 169.4
        (606, 81, 4, False),
        (64, 94, 8, False),
        (386, 132, 16, False),
    ):
        problem = prompts(batch_size, seqlen, (heads, heads), 192)
        tile = PackedTile(192, 128, 112)
        with pretend(PlannedGpu((9, 0), 132)):
            sizes = sizes_of(problem)[0]
            assert COSTS.is_surely_in_turn(problem, tile, sizes) == is_better
            narrow = problem._replace(v=problem.v[..., :128])  # who have a kernel of their own
            assert not COSTS.is_surely_in_turn(narrow, tile, sizes)
    assert together(prompts(256, 103, (16, 16), 192), 112, 31.0, 192) > 1


def test_blocks_of_wide_heads() -> None:
    """Of 64 keys with masks: 128 rows and a window of 64 keys are three of them."""
    sizes = {x.mask: x.stated.sizes["block_n"] for x in SM90.BODIES if x.mean_width == 192}
    assert sizes == {"full": 112, "causal": 64, "window": 64}


def test_two_rounds_are_dealt() -> None:
    """us on an H200, as they are drawn and dealt."""

    def is_dealt(batch_size: int, seqlen: int, heads: int, **options: Any) -> bool:
        problem = prompts(batch_size, seqlen, (heads, heads))._replace(**options)
        with pretend(PlannedGpu((9, 0), 132)):
            return bool(SM90.is_dealt(problem, -(-seqlen // 128) * batch_size * heads, 128))

    assert is_dealt(7, 629, 5)  # 16.6, 14.3
    assert not is_dealt(7, 629, 5, window_left=300)
    assert not is_dealt(7, 629, 5, window_right=-1)
    assert not is_dealt(7, 629, 5, cache_seqlens=torch.empty(7, dtype=torch.int32, device="meta"))
    assert not is_dealt(3, 629, 5) and not is_dealt(14, 629, 5)
    narrow = prompts(100, 150, (2, 2), 96)  # a tile of 192 rows each
    with pretend(PlannedGpu((9, 0), 132)):
        assert SM90.is_dealt(narrow, 200, 128) and not SM90.is_dealt(narrow, 200, 192)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "window"])
@pytest.mark.parametrize("head_dim", [72, 88, 96, 104, 112])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tiles_of_more_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: str, head_dim: int, mask: str
) -> None:  # fmt: skip
    if not has_wgmma(torch.cuda.get_device_capability()):
        pytest.skip("not compute capability 9.0")
    tiles = {key: (x._replace(unit_us=1e3), *rest) for key, (x, *rest) in COSTS._TILES.items()}
    monkeypatch.setattr(COSTS, "_TILES", tiles)
    monkeypatch.setattr(COSTS, "_RAGGED_ROUNDS", 0.0)
    monkeypatch.setattr(SM90, "_SHORT", 0)
    monkeypatch.setattr(SPLIT, "choice", False)
    forget_all()
    window: dict[str, Any] = {"window_size": (70, 19)} if mask == "window" else {}
    case = Case(dtype=dtype, head_dim=head_dim, num_heads=4, num_kv_heads=2, twice=True, **window)
    for sinks in ("", "fp32"):
        long: dict[str, Any] = {"lengths_q": (515,) * 2, "lengths_k": (515,) * 2, "sinks": sinks}
        run(dataclasses.replace(case, **long), "cuda")
    run(dataclasses.replace(case, layout="strided", lengths_q=(97,), lengths_k=(333,)), "cuda")
    run(dataclasses.replace(case, lengths_q=(333,), lengths_k=(97,), seed=1), "cuda")
    lengths: dict[str, Any] = {
        "lengths_q": (1, 77, 300, 513, 64, 0, 130), "lengths_k": (1, 200, 129, 513, 0, 5, 5)
    }  # fmt: skip
    run(dataclasses.replace(case, layout="varlen", seed=2, **lengths), "cuda")
    forget_all()

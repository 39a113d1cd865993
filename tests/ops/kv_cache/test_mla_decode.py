"""mla_decode against fp64, by both kernels: heads, tokens, pages, splits, finished rows."""

from __future__ import annotations

import contextlib
import importlib
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import ways
from arena import Arena
from back_to_back import check_back_to_back
from bits import same_bits
from decode_step import check_nan_stays
from emulated import written_just_ahead
from mla_step import KEY_DIM, LATENT_DIM, LatentStep, draw_step
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import mla_decode
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.kv_cache import mla_plan

DTYPES = [torch.float16, torch.bfloat16]
LENGTHS = [130, 0, 1, 64]
LOTS = 24


@pytest.fixture
def portable(way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """The kernel for every GPU, on Hopper too."""
    monkeypatch.setattr(mla_plan, "choice", False)
    forget_all()
    yield way


@contextlib.contextmanager
def from_lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches are cut into equal shares on the device, though they are short."""
    monkeypatch.setattr(mla_plan, "_SHORT_TILES", 0)
    forget_all()
    yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(portable: Way, dtype: torch.dtype) -> None:
    LatentStep(portable, LENGTHS, dtype).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_on_hopper(hopper_way: Way, dtype: torch.dtype) -> None:
    LatentStep(hopper_way, LENGTHS, dtype).check()


def check_drawn(way: Way, kind: str, lot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, by_eights = random.Random(f"{kind} {lot}"), kind != "mla"
    with from_lengths(monkeypatch) if lot % 2 else contextlib.nullcontext():
        step = draw_step(drawn, way, is_small=not way.is_gpu, by_eights=by_eights)
        print(step)
        step.check()


@pytest.mark.parametrize("lot", range(LOTS))
def test_drawn(portable: Way, lot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_drawn(portable, "mla", lot, monkeypatch)


@pytest.mark.parametrize("lot", range(LOTS))
def test_drawn_on_hopper(hopper_way: Way, lot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_drawn(hopper_way, "mla on hopper", lot, monkeypatch)


@pytest.mark.parametrize("num_heads, seqlen_q", [(128, 1), (16, 5), (70, 2)])
def test_blocks_of_rows_on_hopper(hopper_way: Way, num_heads: int, seqlen_q: int) -> None:
    # Several blocks of rows a sequence, the last of few.
    LatentStep(hopper_way, [70, 3], num_heads=num_heads, seqlen_q=seqlen_q).check()


@pytest.mark.parametrize("num_splits", [0, 1, 2, 5])
def test_more_parts_than_blocks_on_hopper(hopper_way: Way, num_splits: int) -> None:
    # A block has several parts, of one tile and of more, some of sequences without keys.
    lengths = [200, 0, 64, 390, -1, 129, 1]
    LatentStep(hopper_way, lengths, num_heads=3, num_splits=num_splits).check()


@pytest.mark.parametrize(
    "num_heads, lengths",
    [
        (3, [200, 0, 64, 390, -1, 129, 1]),
        (3, [130, 1, 1300]),
        (9, [500, 490, 470]),
        (70, [330, 70, 900]),
        (128, [700, 10, 0, 60]),
    ],
)
def test_a_line_on_hopper(
    hopper_way: Way, num_heads: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks with the end of an item, whole ones and the beginning of another; the next launch's
    # tickets are zeros again, and its bits the same.
    taken: list[torch.Tensor] = []

    def kept(device: torch.device, count: int) -> torch.Tensor:
        taken[:] = taken or [torch.zeros(count, dtype=torch.int32, device=device)]
        assert len(taken[0]) == count
        return taken[0]

    module = importlib.import_module("kernel_hub.ops.kv_cache.mla_decode")
    monkeypatch.setattr(module, "counters", kept)
    monkeypatch.setattr(mla_plan, "_FEW_PARTS", 999)
    monkeypatch.setattr(mla_plan, "_FEW_PARTS_64", 999)
    forget_all()
    step = LatentStep(hopper_way, lengths, num_heads=num_heads)
    first = step.check()
    assert not bool(taken[0].any())
    for found, expected in zip(step.run(), first, strict=True):
        same_bits(found, expected)
    assert not bool(taken[0].any())


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("before", [[200, 40, 0, 64, 390, 5], [7, 700, -1, 64, 2**30, 1]])
def test_lengths_that_the_launch_before_writes(
    hopper_way: Way, num_heads: int, before: list[int]
) -> None:
    # The first part of a line is found of lengths that may not be written yet.
    if hopper_way.is_gpu:
        pytest.skip("the emulator knows when a launch has ended; a GPU shows it now and then")
    step = LatentStep(hopper_way, [390, 64, 3, 200, 0, 70], num_heads=num_heads)
    expected = step.check()
    with written_just_ahead(step.options["cache_seqlens"], torch.tensor(before).int()):
        for found, each in zip(step.run(), expected, strict=True):
            same_bits(found, each)


@pytest.mark.parametrize("num_splits", [0, 3])
def test_shares_of_lengths_that_come_late_on_hopper(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, num_splits: int
) -> None:
    # The same where caches are cut into shares; they are as many before, or the merge would differ,
    # which in truth begins when the launch before its own has ended.
    if hopper_way.is_gpu:
        pytest.skip("the emulator knows when a launch has ended; a GPU shows it now and then")
    with from_lengths(monkeypatch), pretend(PlannedGpu((9, 0), 40)):
        step = LatentStep(hopper_way, [390, 0, 200], num_heads=3, num_splits=num_splits)
        expected = step.check()
        lengths = step.options["cache_seqlens"]
        with written_just_ahead(lengths, torch.tensor([385, 0, 193]).int()):
            for found, each in zip(step.run(), expected, strict=True):
                same_bits(found, each)


def test_more_sequences_than_a_warp_has_lanes_on_hopper(hopper_way: Way) -> None:
    LatentStep(hopper_way, [70, 0, 130, -1] * 9, num_heads=3, num_splits=2).check()
    for batch_size, is_given in ((32, False), (33, True)):
        split = mla_plan.choose_split(batch_size, 1 << 20, 64, 0, 132, batch_size)
        assert (split.num_splits > 0) == is_given


def test_more_parts_than_are_merged_at_once_on_hopper(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 39 parts of one item, in groups of 4; on a GPU as many as it has multiprocessors.
    monkeypatch.setattr(mla_plan, "_FEW_PARTS", 999)
    forget_all()
    with contextlib.nullcontext() if hopper_way.is_gpu else pretend(PlannedGpu((9, 0), 40)):
        most = 64 * (140 if hopper_way.is_gpu else 40)
        LatentStep(hopper_way, [most - 3, 30], num_heads=3).check()


@pytest.mark.parametrize("ones, tokens, num_heads", [(3, 4224, 64), (5, 3904, 32)])
def test_a_merge_whose_last_levels_are_empty(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, ones: int, tokens: int, num_heads: int
) -> None:
    """17 parts of one item, or a few more: nobody asks for what lies behind the partials."""
    if hopper_way.is_gpu:
        LatentStep(hopper_way, [1] * 31 + [2400], num_heads=num_heads).check()
        return
    new_tensor = torch.empty
    monkeypatch.setattr(ways, "EMULATED_SMS", 24)
    forget_all()
    with Arena("cpu", random.Random(3)) as memory, pretend(PlannedGpu((9, 0), 24)):

        def apart(*shape: Any, **options: Any) -> torch.Tensor:
            if options.get("dtype") == torch.float32 and shape[0] > 500_000:
                return memory.empty("partials", shape, torch.float32)
            return new_tensor(*shape, **options)

        monkeypatch.setattr(torch, "empty", apart)
        LatentStep(hopper_way, [1] * ones + [tokens], num_heads=num_heads).check()


def test_pages_of_the_slower_kernel(hopper_way: Way) -> None:
    given = LatentStep(hopper_way, [70, 9], num_heads=4, page_size=20)
    arguments = mla_plan.MlaGiven(
        given.q, given.kv_cache, None, given.options["block_table"], 1.0, 0, None
    )
    device = mla_plan.PlannedGpu((9, 0), 132)
    assert mla_plan.choose_variant(arguments, device) == mla_plan.PORTABLE
    wide = given.kv_cache.new_empty(3, 24, KEY_DIM)
    assert mla_plan.choose_variant(arguments._replace(kv_cache=wide), device).is_sm90
    empty = arguments._replace(kv_cache=wide, block_table=arguments.block_table[:, :0])
    assert mla_plan.choose_variant(empty, device) == mla_plan.PORTABLE
    ada = mla_plan.PlannedGpu((8, 9), 132)
    assert mla_plan.choose_variant(arguments._replace(kv_cache=wide), ada) == mla_plan.PORTABLE


def large_scores(way: Way) -> None:
    step = LatentStep(way, [150, 40], num_heads=2, seqlen_q=2)
    step.q.mul_(300)
    step.kv_cache[step.options["block_table"][0, 1].long(), 7, 540] = -math.inf
    step.q[..., 540] = step.q[..., 540].abs()
    step.check()
    step.with_(num_splits=2).check()


def test_large_scores_and_minus_inf(portable: Way) -> None:
    large_scores(portable)


def test_large_scores_and_minus_inf_on_hopper(hopper_way: Way) -> None:
    large_scores(hopper_way)


def test_a_nan_in_a_query_stays_in_its_row(portable: Way) -> None:
    check_nan_stays(LatentStep(portable, [100, 70], num_heads=3, seqlen_q=2))


def test_a_nan_in_a_query_stays_in_its_row_on_hopper(hopper_way: Way) -> None:
    check_nan_stays(LatentStep(hopper_way, [100, 70], num_heads=3, seqlen_q=2))


def test_the_same_bits_every_time(hopper_way: Way) -> None:
    step = LatentStep(hopper_way, [300, 7, 129], num_heads=8, seqlen_q=2, num_splits=3)
    first = step.run()
    for _ in range(20 if hopper_way.is_gpu else 1):
        for found, expected in zip(step.run(), first, strict=True):
            same_bits(found, expected)


@pytest.mark.parametrize("shape", [(0, 1, 4), (2, 1, 0)])
def test_nothing_to_do(way: Way, shape: tuple[int, int, int]) -> None:
    q = way.randn(*shape, KEY_DIM, dtype=torch.float16)
    cache = way.randn(shape[0], 8, KEY_DIM, dtype=torch.float16)
    lengths = torch.zeros(shape[0], dtype=torch.int32, device=way.device)
    out, lse = mla_decode(q, cache, cache_seqlens=lengths, softmax_scale=0.1, return_lse=True)
    assert out.shape == (*shape, LATENT_DIM) and lse.shape == (shape[0], shape[2], 1)


@pytest.mark.parametrize("rooms", [(3, 0), (0, 64)], ids=str)
def test_caches_without_rooms(way: Way, rooms: tuple[int, int]) -> None:
    q = way.randn(3, 1, 4, KEY_DIM, dtype=torch.float16)
    cache = way.randn(*rooms, KEY_DIM, dtype=torch.float16)
    lengths = torch.zeros(3, dtype=torch.int32, device=way.device)
    table = torch.zeros(3, 1, dtype=torch.int32, device=way.device) if rooms[1] else None
    out, lse = mla_decode(
        q, cache, cache_seqlens=lengths, softmax_scale=0.1, block_table=table, return_lse=True
    )
    assert not bool(out.any()) and bool((lse == -math.inf).all())


def test_by_torch_on_the_cpu() -> None:
    for lot in range(20):
        step = draw_step(random.Random(lot), Way("cpu", "cpu"), is_small=True, by_eights=False)
        step.check()


@pytest.mark.gpu
def test_graph_with_growing_lengths() -> None:
    step = LatentStep(Way("gpu", "cuda"), [300, 340], page_size=64, room=640)
    step.kv_cache.nan_to_num_(0.25)
    step.options["block_table"] = torch.arange(20, dtype=torch.int32, device="cuda").view(2, 10)
    lengths = step.options["cache_seqlens"]
    mla_decode(step.q, step.kv_cache, **step.options)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_decode(step.q, step.kv_cache, **step.options)
    for _ in range(40):
        lengths += 7
        graph.replay()
        truth, own = step.truth(torch.float64)[0], step.truth(step.dtype)[0]
        assert float((out - truth).abs().max()) <= 2 * float((own - truth).abs().max()) + 0.01


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    pages = (1 << 31) // (64 * KEY_DIM) + 7
    cache = torch.full((pages, 64, KEY_DIM), math.nan, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randn(2, 256, KEY_DIM, device="cuda").bfloat16()
    table = torch.arange(pages - 8, pages, dtype=torch.int32, device="cuda").view(2, 4)
    cache[table.long()] = tokens.view(2, 4, 64, KEY_DIM)
    q = torch.randn(2, 1, 16, KEY_DIM, device="cuda").bfloat16()
    lengths = torch.tensor([256, 100], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"cache_seqlens": lengths, "softmax_scale": 0.1}
    out = mla_decode(q, cache, **options, block_table=table)
    same_bits(out, mla_decode(q, tokens, **options))


Q, CACHE = torch.zeros(2, 1, 4, KEY_DIM).half(), torch.zeros(2, 8, KEY_DIM).half()
N = torch.tensor([3, 5], dtype=torch.int32)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
OUT = torch.zeros(2, 1, 4, LATENT_DIM).half()
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": None}, "q: expected a torch tensor"),
    ({"q": Q.float()}, "q: expected dtype float16 or bfloat16"),
    ({"q": Q[0]}, r"q: expected shape \(batch_size, seqlen_q, num_heads, 576\)"),
    ({"q": Q[..., :512]}, "q: expected 576 columns"),
    ({"q": Q.expand(2, 17, 4, KEY_DIM)}, "q: expected 1 to 16 tokens"),
    ({"q": torch.zeros(2, 1, 4, KEY_DIM + 4).half()[..., :KEY_DIM]}, "q: expected strides that"),
    ({"q": torch.zeros(2 * 4 * KEY_DIM + 8).half()[1:-7].view(Q.shape)}, "q: expected memory al"),
    ({"kv_cache": CACHE[0]}, r"kv_cache: expected shape \(batch_size, max_seqlen, 576\)"),
    ({"kv_cache": CACHE.bfloat16()}, "kv_cache: expected dtype float16"),
    ({"kv_cache": CACHE[..., :512]}, r"kv_cache: expected shape \(2, 8, 576\)"),
    ({"kv_cache": CACHE[:1]}, r"kv_cache: expected shape \(2, 8, 576\)"),
    ({"kv_cache": CACHE.unsqueeze(2).expand(2, 8, 2, KEY_DIM)}, r"kv_cache: expected shape"),
    ({"cache_seqlens": N.long()}, "cache_seqlens: expected dtype int32"),
    ({"cache_seqlens": N[:1]}, r"cache_seqlens: expected shape \(2,\)"),
    ({"block_table": TABLE[0]}, r"block_table: expected shape \(batch_size, max_pages\)"),
    ({"block_table": TABLE.long()}, "block_table: expected dtype int32"),
    ({"softmax_scale": "1"}, "softmax_scale: expected a number"),
    ({"softmax_scale": math.nan}, "softmax_scale: expected a"),
    ({"num_splits": -1}, "num_splits: expected"),
    ({"out": OUT[..., :511]}, r"out: expected shape \(2, 1, 4, 512\)"),
    ({"out": OUT.float()}, "out: expected dtype float16"),
    ({"out": OUT[:1].expand(2, 1, 4, LATENT_DIM)}, "out: expected an output whose elements"),
    ({"out": Q[..., :LATENT_DIM]}, "out: expected memory of its own"),
    ({"cache_seqlens": N + 4}, "cache_seqlens: expected 0 to 8 at index 1"),
    ({"block_table": TABLE + 2}, r"block_table: expected pages from 0 to 1 at \[0, 0\]"),
]


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    given = {"q": Q, "kv_cache": CACHE, "cache_seqlens": N, "softmax_scale": 0.1, **changes}
    with pytest.raises(TensorError, match=f"mla_decode: {text}"):
        mla_decode(**given)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_registered_op_passes_opcheck(device: str) -> None:
    given = (x.clone().to(device) for x in (Q, CACHE, N))
    torch.library.opcheck(
        torch.ops.kernel_hub.mla_decode.default,
        (*given, None, 0.1, 0, OUT.clone().to(device), None),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back("""
cache = randn(64, 64, 576)
table = torch.randperm(64).int().cuda().view(4, 16)
lengths = torch.tensor([1000, 3, -1, 512], dtype=torch.int32).cuda()
def run(heads):
    q = randn(4, 1, heads, 576)
    return lambda: ops.mla_decode(
        q, cache, cache_seqlens=lengths, block_table=table, softmax_scale=0.1)
cases = [run(heads) for heads in (16, 128, 1)]
""")

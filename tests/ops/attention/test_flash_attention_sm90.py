"""Hopper's own forward kernels: which problems they take, and on an H200 whether they are right."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_devices import taken
from bits import same_bits
from emulated import ROOT

from kernel_hub.errors import TensorError
from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention.problem import Problem, is_mappable
from kernel_hub.ops.core.device import PlannedGpu, has_wgmma, pretend
from kernel_hub.ops.core.launch import forget_all

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
DTYPES = ["fp16", "bf16"]
# Those of the compiled kernels, and some that fill one in part.
HEAD_DIMS = [16, 64, 72, 96, 128, 136, 192, 256]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 19)},
}
LAUNCHES_SECONDS = 40


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The masks of the launches that the Hopper kernels took."""
    if not has_wgmma(torch.cuda.get_device_capability()):
        pytest.skip("not compute capability 9.0")

    def mask(*given: Any) -> str:
        left, right = given[-1].window_size
        is_causal = given[-1].causal or right >= 0
        return "window" if left >= 0 else "causal" if is_causal else "full"

    found = taken(monkeypatch, SM90, mask)
    monkeypatch.setattr(SPLIT, "choice", False)  # test_flash_attention_split_sm90.py
    monkeypatch.setattr(SM90, "_SHORT", 0)  # short ones too
    forget_all()
    yield found


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel(hopper: list[str], dtype: str, head_dim: int, mask: str) -> None:
    case = Case(
        dtype=dtype, head_dim=head_dim, num_heads=4, num_kv_heads=2, twice=True, **MASKS[mask]
    )  # fmt: skip
    run(dataclasses.replace(case, lengths_q=(1,), lengths_k=(1,)), "cuda")
    run(dataclasses.replace(case, lengths_q=(515,) * 2, lengths_k=(515,) * 2, seed=1), "cuda")
    # nan around k and v, and past the end of every sequence.
    run(dataclasses.replace(case, layout="strided", lengths_q=(97,), lengths_k=(333,)), "cuda")
    ragged = dataclasses.replace(
        case, lengths_q=(1, 77, 300, 513, 64, 0, 130), lengths_k=(1, 200, 129, 513, 0, 5, 5)
    )
    run(dataclasses.replace(ragged, layout="varlen", seed=2), "cuda")
    ragged = dataclasses.replace(ragged, lengths_q=(200,) * 7, layout="cache")
    run(dataclasses.replace(ragged, lengths_k=(1, 200, 129, 321, 0, 5, 80)), "cuda")
    assert set(hopper) == {mask} and len(hopper) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "kvpacked", "qkvpacked", "gqapacked", "varlen_packed"])
def test_layouts(hopper: list[str], layout: str) -> None:
    heads = 2 if layout == "qkvpacked" else 1
    case = Case(layout=layout, num_kv_heads=heads, lengths_q=(150,) * 2, lengths_k=(150,) * 2)
    for causal in (False, True):
        run(dataclasses.replace(case, causal=causal, head_dim=128), "cuda")
    assert hopper


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 112, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_pages(hopper: list[str], head_dim: int, page_size: int) -> None:
    # Table entries past a sequence's end are garbage, and so is the rest of its last page.
    case = Case(head_dim=head_dim, num_heads=4, num_kv_heads=2, page_size=page_size, twice=True)
    case = dataclasses.replace(case, lengths_k=(1, 200, 700, 513, 0, 5, 80), layout="varlen_paged")
    case = dataclasses.replace(case, lengths_q=(1, 77, 300, 513, 64, 0, 130), dtype="fp16")
    for seed, mask in enumerate(MASKS.values()):
        run(dataclasses.replace(case, seed=seed, **mask), "cuda")
    case = dataclasses.replace(case, lengths_q=(150,) * 7, dtype="bf16")
    for seed, layout in ((3, "paged"), (4, "paged_bhsd")):
        run(dataclasses.replace(case, layout=layout, causal=True, seed=seed), "cuda")
    assert len(hopper) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.7, 30.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_softcap(hopper: list[str], head_dim: int, softcap: float) -> None:
    case = Case(head_dim=head_dim, num_heads=4, softcap=softcap, softmax_scale=0.3, twice=True)
    case = dataclasses.replace(case, lengths_q=(530,) * 2, lengths_k=(530,) * 2)
    for mask in MASKS.values():
        run(dataclasses.replace(case, **mask), "cuda")
        run(dataclasses.replace(case, layout="varlen_paged", dtype="fp16", **mask), "cuda")
    assert len(hopper) == 12


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 128, 256])
def test_softcap_gives_the_same_bits(hopper: list[str], head_dim: int) -> None:
    # Tiles without keys come first, so that the first one of a block is drawn.
    generator = torch.Generator("cuda").manual_seed(head_dim)
    shapes = (40, 198, 16, head_dim), (40, 12, 4, head_dim), (40, 12, 4, head_dim)
    q, k, v = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes
    )
    lengths = torch.randint(0, 13, (40,), device="cuda", generator=generator, dtype=torch.int32)
    options = {"causal": True, "softcap": 20.0, "cache_seqlens": lengths, "return_lse": True}
    first = flash_attention(q, k, v, **options)
    for _ in range(50):
        for name, a, b in zip(
            ("out", "lse"), first, flash_attention(q, k, v, **options), strict=True
        ):
            same_bits(a, b, name=name)
    assert len(hopper) == 51


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_blocks_on_the_diagonal(hopper: list[str], head_dim: int) -> None:
    # Every place of the diagonal in a block of keys, and tiles whose first rows see no keys.
    for i, (seqlen_q, seqlen_k) in enumerate(
        [(192, 192), (256, 256), (384, 400), (640, 333), (1100, 1100), (200, 968), (129, 16)]
    ):
        case = Case(head_dim=head_dim, num_heads=8, causal=True, seed=i, twice=True)
        run(dataclasses.replace(case, lengths_q=(seqlen_q,), lengths_k=(seqlen_k,)), "cuda")
        run(dataclasses.replace(case, lengths_q=(seqlen_q,) * 9, lengths_k=(seqlen_k,) * 9), "cuda")
    assert set(hopper) == {"causal"}


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 33, 255, 300])
def test_ragged_batches(hopper: list[str], batch_size: int) -> None:
    # Up to 256 sequences are sorted by length.
    lengths_q = tuple(i * i % 71 * (i % 7 != 3) for i in range(batch_size))
    lengths_k = tuple(i * 37 % 97 * (i % 11 != 5) for i in range(batch_size))
    case = Case(layout="varlen", num_heads=3, head_dim=128, twice=True)
    for causal in (False, True):
        run(dataclasses.replace(case, causal=causal, lengths_q=(*lengths_q, 400),
            lengths_k=(*lengths_k, 900)), "cuda")  # fmt: skip
    assert len(hopper) == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "expanded"}, {"layout": "unaligned"}, {"layout": "paged", "page_size": 100},
        {"alibi": "heads"}, {"softcap": 2.0, "alibi": "batch"}, {"softmax_scale": -0.3},
        {"softmax_scale": 0.0}, {"softmax_scale": 1e-30}, {"lengths_k": (0, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_the_portable_kernels_take_the_rest(hopper: list[str], options: dict[str, Any]) -> None:
    run(Case(**options), "cuda")
    assert not hopper


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles_without_keys(hopper: list[str], head_dim: int) -> None:
    # Far more than a block has places for in its ring of tiles.
    case = Case(head_dim=head_dim, num_heads=16, num_kv_heads=4, causal=True)
    run(dataclasses.replace(case, lengths_q=(2048,) * 4, lengths_k=(64,) * 4), "cuda")
    lengths = tuple(300 * (i % 9 == 4) for i in range(40))
    run(dataclasses.replace(case, layout="varlen_cache", lengths_q=(300,) * 40, lengths_k=lengths),
        "cuda")  # fmt: skip
    assert len(hopper) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("window_size", [(0, 0), (9, 0), (-1, 3), (300, 200), (2, -1), (5000, 5)])
def test_windows(hopper: list[str], window_size: tuple[int, int]) -> None:
    for lengths_q, lengths_k in (((330,), (900,)), ((900,), (330,))):
        case = Case(lengths_q=lengths_q, lengths_k=lengths_k, window_size=window_size)
        for head_dim in (64, 128):
            run(dataclasses.replace(case, head_dim=head_dim, num_heads=4), "cuda")
    assert hopper


@pytest.mark.gpu
def test_large_scores(hopper: list[str]) -> None:
    for dtype, seed in (("fp16", 0), ("bf16", 1)):
        run(Case(dtype=dtype, magnitude=35.0, causal=True, seed=seed, lengths_q=(400,),
                 lengths_k=(700,)), "cuda")  # fmt: skip
    assert hopper


@pytest.mark.gpu
def test_switched_off(hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    own = flash_attention(q, q, q)
    assert hopper.pop() == "full"
    monkeypatch.setattr(SM90, "is_enabled", False)
    torch.testing.assert_close(flash_attention(q, q, q), own, rtol=2e-2, atol=2e-2)
    assert not hopper


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_portable_kernels_on_hopper(
    hopper: list[str], dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SM90, "is_enabled", False)
    case = Case(dtype=dtype, head_dim=head_dim, lengths_q=(129,), lengths_k=(200,))
    for causal in (False, True):
        run(dataclasses.replace(case, causal=causal), "cuda")
    assert not hopper


@pytest.mark.gpu
def test_a_tensor_of_another_dtype_or_device_is_refused(hopper: list[str]) -> None:
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    flash_attention(q, q, q)
    for other in (q.half(), q.cpu()):
        with pytest.raises(TensorError, match=r"flash_attention: [kv]: expected"):
            flash_attention(q, other, q)
        with pytest.raises(TensorError, match=r"flash_attention: [kv]: expected"):
            flash_attention(q, q, other)


@pytest.mark.gpu
def test_graphs_beside_launches(hopper: list[str]) -> None:
    q, k, v = (torch.randn(4, 1024, 8, 128, device="cuda").half() for _ in range(3))
    expected = flash_attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = flash_attention(q, k, v, causal=True)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(other):
            apart = flash_attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    same_bits(found, expected)
    same_bits(apart, expected)
    assert set(hopper) == {"causal"}


BACK_TO_BACK = """
import torch
from kernel_hub.ops import flash_attention
streams = [torch.cuda.Stream() for _ in range(3)]
cases = []
for i, (batch, length, heads, head_dim) in enumerate(
    [(4, 1024, 8, 128), (1, 130, 2, 64), (2, 700, 16, 256), (9, 515, 4, 96), (3, 333, 6, 192)]
):
    q, k, v = (torch.randn(batch, length, heads, head_dim, device="cuda").half() for _ in range(3))
    options = [{}, {"causal": True}, {"window_size": (100, 7)}][i % 3]
    cases.append((q, k, v, options, flash_attention(q, k, v, **options)))
for i, (batch, length, heads, head_dim) in enumerate(
    [(4, 1024, 8, 64), (3, 777, 16, 256), (9, 515, 4, 128), (2, 2048, 8, 64)]
):
    q = torch.randn(batch, length, heads, head_dim, device="cuda").half()
    pages = [[p * batch + b for p in range(-(-length // 16))] for b in range(batch)]
    table = torch.tensor(pages, device="cuda", dtype=torch.int32)
    k, v = (torch.randn(table.numel(), 16, 2, head_dim, device="cuda").half() for _ in range(2))
    used = torch.tensor([length - 100 * b for b in range(batch)], device="cuda").int()
    options = {"causal": i % 2 == 0, "softcap": 20.0 * (i % 3 == 1)}
    options |= {"block_table": table, "cache_seqlens": used}
    cases.append((q, k, v, options, flash_attention(q, k, v, **options)))
    q, k, v = (torch.randn(batch, length, heads, head_dim, device="cuda").half() for _ in range(3))
    options = {"causal": True, "softcap": 20.0 * (i % 2)}
    cases.append((q, k, v, options, flash_attention(q, k, v, **options)))
torch.cuda.synchronize()
differs = []
for i in range(1000):
    q, k, v, options, expected = cases[i % len(cases)]
    with torch.cuda.stream(streams[i % 7 % 3]):
        out = flash_attention(q, k, v, **options)
        if i % 9 == 8:
            differs.append((out != expected).any())
torch.cuda.synchronize()
assert not any(differs), differs
print("done")
"""


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back(hopper: list[str]) -> None:
    # In a process of its own: one that hangs is ended.
    done = subprocess.run(
        [sys.executable, "-c", BACK_TO_BACK], cwd=ROOT, capture_output=True, text=True,
        timeout=LAUNCHES_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_cpu_tensors_never_take_them() -> None:
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    assert not SM90.applies(Problem(q, q, q, 1, 8, 8, 0.1), torch.empty_like(q))


def test_short_sequences_are_the_portable_kernels() -> None:
    """Of little sequences, and of short ones of narrow heads, as far as the host knows."""

    def problem(seqlen_q: int, seqlen_k: int, head_dim: int = 64, **options: Any) -> Problem:
        q, k = (torch.zeros(1, n, 2, head_dim).half() for n in (seqlen_q, seqlen_k))
        return Problem(q, k, k, 1, seqlen_q, seqlen_k, 0.1, **options)

    def varlen(longest: int, total: int, group: int = 1, head_dim: int = 96) -> Problem:
        bounds = torch.zeros(9, dtype=torch.int32)
        q, k = (torch.zeros(total, n, head_dim).half() for n in (4 * group, 4))
        return Problem(q, k, k, 8, longest, longest, 0.1, cu_seqlens_q=bounds, cu_seqlens_k=bounds)

    window = {"window_left": 60, "window_right": 0}
    for short in (
        problem(64, 64), problem(16, 50), problem(200, 200, **window),
        problem(200, 200, 32, softcap=2.0), problem(50, 50, 256, window_right=0),
        problem(128, 128, window_right=0), problem(128, 128, 72),
        varlen(200, 8 * 64), varlen(60, 400, 2, 256),
        problem(100, 100, 96, window_right=0), problem(140, 140, 104)._replace(batch_size=40),
        varlen(150, 8 * 60, 1, 256),
    ):  # fmt: skip
        with pretend(PlannedGpu((9, 0), 132)):
            assert SM90.is_short(short)
    lengths = torch.zeros(1, dtype=torch.int32)
    for other in (
        problem(256, 77, 40), problem(257, 257), problem(320, 320), problem(321, 321),
        problem(50, 300), problem(300, 200), problem(16, 65),
        problem(129, 129, 72), problem(300, 300, 32, softcap=2.0), problem(140, 140, 96),
        problem(140, 140, 104), problem(129, 129, window_right=0), problem(65, 65, softcap=2.0),
        varlen(321, 8 * 64),
        problem(100, 100, 128, window_right=0), problem(140, 140, 104, window_right=0),
        problem(129, 129, 96, window_right=0), problem(161, 161, 104), varlen(219, 8 * 60, 1, 256),
        varlen(200, 8 * 65), varlen(60, 400, 2), varlen(60, 400, 4, 256),
        problem(50, 50, cache_seqlens=lengths), problem(50, 50, batch_invariant=True),
    ):  # fmt: skip
        with pretend(PlannedGpu((9, 0), 132)):
            assert not SM90.is_short(other)
    nobody = varlen(1, 0)._replace(batch_size=0)
    assert SM90.is_short(nobody)


def test_what_the_tma_takes() -> None:
    x = torch.zeros(2, 8, 4, 72, dtype=torch.bfloat16)
    for good in (x, x[:, :1], x[:1], x.transpose(1, 2), x[..., 8:], x[:, 1:, ::2], x[0]):
        assert is_mappable(good), good.stride()
    narrow = torch.zeros(2, 8, 4, 68, dtype=torch.bfloat16)[..., :64]
    bad = [x[:0], x[..., 1:65], narrow, x[:1].expand(2, -1, -1, -1), x[:, :, :1].expand(x.shape)]
    bad += [x[..., ::2], x[..., :4]]
    for each in bad:
        assert not is_mappable(each), each.stride()


def test_softcap_has_bodies_of_its_own() -> None:
    """Of bf16: its windows of 64 columns know no softcap, whatever else is asked; and for heads of
    129 to 160."""

    def suffix(dtype: torch.dtype, head_dim: int = 64, **options: Any) -> str:
        q = torch.zeros(1, 512, 2, head_dim, dtype=dtype)
        body = SM90._choose(Problem(q, q, q, 1, 512, 512, 0.1, **options))
        return str(body.suffix if body.mask == "window" else body.mask)

    window = {"window_left": 60, "window_right": 0}
    for options in ({}, window, {"window_right": 0}, {"batch_invariant": True}):
        assert suffix(torch.bfloat16, softcap=20.0, **options) == "_capped"
        assert suffix(torch.float16, softcap=20.0, **options) == ""
        assert suffix(torch.bfloat16, 136, softcap=20.0, **options) == "_capped"
        assert suffix(torch.bfloat16, 168, softcap=20.0, **options) == ""
        assert suffix(torch.float16, 160, softcap=20.0, **options) == ""
    assert suffix(torch.bfloat16, **window) == ""
    assert suffix(torch.bfloat16) == "full"

"""`cache_ready`: places of tokens, and older tokens of caches, are read ahead of the launch before
where a caller promises that they are there, and nowhere else; what this step writes never."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bits import same_bits
from emulated import written_just_ahead
from refused import check_refused
from test_weights_ready import check_in_turn, force, variants
from ways import Way

from kernel_hub import ops
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.kv_cache import decode_short

Run = Callable[..., torch.Tensor]


def drawn_step(way: Way, lot: random.Random) -> tuple[Run, dict[str, torch.Tensor], int]:
    """A step of the short kernels, its tensors and its new tokens a sequence."""
    seqlen_q, head_dim, page_size = lot.choice((1, 1, 3)), lot.choice((104, 128)), 16
    lengths = [lot.choice((0, -1, seqlen_q, 16, 17, 255, 256, 320, lot.randrange(3, 320)))
               for _ in range(lot.choice((1, 3)))]  # fmt: skip
    q = way.randn(len(lengths), seqlen_q, 4, head_dim, dtype=torch.bfloat16)
    table = torch.randperm(20 * len(lengths), generator=torch.Generator().manual_seed(3))
    caches = [
        way.randn(len(table), page_size, 2, head_dim, dtype=torch.bfloat16, seed=seed)
        for seed in (1, 2)
    ]
    given = {
        "q": q, "k_cache": caches[0], "v_cache": caches[1],
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=way.device),
        "block_table": table.int().view(len(lengths), -1).to(way.device),
    }  # fmt: skip

    def run(**how: Any) -> torch.Tensor:
        found = ops.decode_attention(**given, **how)  # type: ignore[arg-type]
        assert isinstance(found, torch.Tensor)
        return found

    return run, given, seqlen_q


def without_new(given: dict[str, torch.Tensor], name: str, seqlen_q: int) -> torch.Tensor:
    """A cache before the launch ahead has written each sequence's last tokens."""
    old = given[name].clone()
    for pages, length in zip(given["block_table"], given["cache_seqlens"].tolist(), strict=True):
        for token in range(max(0, length - seqlen_q), length):
            old[pages[token // 16], token % 16] = float("nan")
    return old


@pytest.mark.parametrize("shape", [(4, 1), (8, 1), (8, 2), (4, 8)], ids=str)
def test_steps_ahead_of_the_launch_before(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    if hopper_way.is_gpu:
        pytest.skip("the emulator knows when a launch has ended; a GPU shows it now and then")
    monkeypatch.setattr(decode_short, "choice", True)
    monkeypatch.setattr(decode_short, "shape_for", lambda _: shape)
    forget_all()
    lot, were_early = random.Random(f"cache ready {shape}"), 0
    for _ in range(8):
        run, given, seqlen_q = drawn_step(hopper_way, lot)
        expected = run()
        same_bits(run(cache_ready=True), expected)
        for name in ("q", "k_cache", "v_cache"):
            old = torch.full_like(given[name], float("nan"))
            with written_just_ahead(given[name], old):
                same_bits(run(), expected)
            if name != "q":
                were_early += breaks(run, given[name], old, expected)
                old = without_new(given, name, seqlen_q)
            with written_just_ahead(given[name], old):
                same_bits(run(cache_ready=True), expected)
    assert were_early > 3


def breaks(run: Run, tensor: torch.Tensor, old: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a broken promise changes what is found."""
    with written_just_ahead(tensor, old):
        return not torch.equal(run(cache_ready=True).nan_to_num(), expected.nan_to_num())


def test_places_ahead_of_the_launch_before(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hopper_way.is_gpu:
        pytest.skip("the emulator knows when a launch has ended; a GPU shows it now and then")
    for name, m in hopper_way.some(variants("qkv_linear"), 5, "places"):
        x = hopper_way.randn(m, 1, 264, dtype=torch.bfloat16)
        w = hopper_way.randn(512, 264, dtype=torch.bfloat16, seed=1) / 16
        force(monkeypatch, "qkv_linear", name, hopper_way.num_sms, m, 512, 264)
        caches = [torch.zeros(m, 32, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
        lengths = torch.arange(m, dtype=torch.int32) % 32
        table = torch.randperm(m, generator=torch.Generator().manual_seed(m)).int()[:, None]
        angles = torch.arange(32)[:, None] * 3.0 ** -torch.arange(32)
        how: dict[str, Any] = {
            "num_heads": 4, "num_kv_heads": 2, "cos": angles.cos(), "sin": angles.sin(),
            "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": lengths,
            "block_table": table,
        }  # fmt: skip

        def run(x: torch.Tensor = x, w: torch.Tensor = w, how: Any = how, **ready: bool) -> Any:
            for cache in (how["k_cache"], how["v_cache"]):
                cache.zero_()
            q = ops.qkv_linear(x, w, **how, **ready)[0]
            return torch.cat([y.flatten() for y in (q, how["k_cache"], how["v_cache"])])

        both = {"weights_ready": True, "cache_ready": True}
        expected = run()
        for ready in (both, {"cache_ready": True}):
            same_bits(run(**ready), expected)
        with written_just_ahead(x, torch.full_like(x, 9.0)):
            same_bits(run(**both), expected)
        with written_just_ahead(lengths, (lengths + 1) % 32):
            for ready in ({}, {"weights_ready": True}, {"cache_ready": True}):
                same_bits(run(**ready), expected)
            is_early = not torch.equal(run(**both), expected)
        # Consumers of other tiles find places beside the producer, which waits.
        assert is_early or not name.startswith("swapped"), name
        assert not is_early or not name.startswith("m"), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 16, 40, 64])
def test_launches_just_ahead(hopper_way: Way, count: int, dtype: torch.dtype) -> None:
    """A step behind a slow launch: rows normed, projected into the cache and attended to."""
    if not hopper_way.is_gpu:
        pytest.skip("one launch after another")
    way, lot = hopper_way, random.Random(f"steps behind {count}")
    half: dict[str, Any] = {"dtype": dtype}
    x, w = way.randn(count, 1, 2048, **half), way.randn(3072, 2048, seed=1, **half) / 32
    slow, norm = x.new_ones(3000, 4096), x.new_ones(2048)
    before = [lot.choice((0, 15, 16, 255, lot.randrange(1500))) for _ in range(count)]
    table = torch.randperm(100 * count).int().view(count, 100).to(way.device)
    caches = [way.randn(100 * count, 16, 4, 128, seed=seed, **half) for seed in (2, 3)]
    angles = (torch.arange(1600)[:, None] * 0.9 ** torch.arange(64)).to(way.device)
    cos, sin = angles.cos(), angles.sin()
    lengths = torch.tensor(before, dtype=torch.int32, device=way.device)
    after, rows = lengths + 1, torch.arange(count, device=way.device)
    new, nan = (
        (table[rows, lengths // 16].long(), (lengths % 16).long()),
        x.new_tensor(float("nan")),
    )

    def run(ready: bool) -> torch.Tensor:
        for cache in caches:
            cache.index_put_(new, nan)
        ops.silu_and_mul(slow)
        h = ops.rms_norm(x, norm, weights_ready=ready)
        q, _, _ = ops.qkv_linear(
            h, w, num_heads=16, num_kv_heads=4, cos=cos, sin=sin,
            k_cache=caches[0], v_cache=caches[1], cache_seqlens=lengths, block_table=table,
            weights_ready=ready, cache_ready=ready,
        )  # fmt: skip
        found = ops.decode_attention(
            q, *caches, cache_seqlens=after, block_table=table, cache_ready=ready
        )
        assert isinstance(found, torch.Tensor)
        return found

    check_in_turn(partial(run, True), f"{count} sequences")
    same_bits(run(True), run(False))


def test_it_is_true_or_false() -> None:
    q, cache = torch.ones(1, 1, 2, 64).half(), torch.ones(1, 8, 2, 64).half()
    x, w = torch.ones(2, 16).half(), torch.ones(256, 16).half()
    step = partial(ops.decode_attention, q, cache, cache, cache_seqlens=torch.ones(1).int())
    product = partial(ops.qkv_linear, x, w, num_heads=6, num_kv_heads=1)
    for op, run in (("decode_attention", step), ("qkv_linear", product)):
        found: Any = run(cache_ready=True)
        expected: Any = run()
        same_bits(found[0], expected[0])
        refused = partial(run, cache_ready="soon")  # type: ignore[arg-type]
        check_refused(op, refused, ["cache_ready", "True or False", "'soon'"])

"""flash_attention of 16-bit queries over caches of e4m3 and int8: by lot against fp64, what it
refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import random
from typing import Any

import pytest
import torch
from attention_cases import Case, Inputs, call, check_lse, make
from back_to_back import check_back_to_back
from bits import same_bits
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import append_kv, decode_attention, flash_attention
from kernel_hub.ops.core import bounds
from kernel_hub.testing.compare import attention_parts_atol, check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_attention

MODULE: Any = importlib.import_module("kernel_hub.ops.attention.caches.widened")
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LAYOUTS = ("bshd", "bhsd", "cache", "varlen", "varlen_k", "varlen_cache", "paged", "paged_bhsd",
           "varlen_paged")  # fmt: skip
LENGTHS = (0, 1, 15, 16, 17, 33, 63, 64, 65, 100, 129)
SCALES = ("none", "tensor", "one", "heads", "strided heads", "k", "v", "tokens", "strided tokens")
STEP = 1 / 40  # of int8


def drawn(seed: int, head_dims: tuple[int, ...] = (16, 32, 64, 128)) -> tuple[Case, str, int]:
    """A case, what kind of scales it has, and how many bytes a share may take."""
    lot = random.Random(seed)
    layout, batch_size = lot.choice(LAYOUTS), lot.choice((1, 2, 3))
    kv_heads, group = lot.choice((1, 2, 3)), lot.choice((1, 2, 4))
    lengths_q = tuple(lot.choice(LENGTHS) for _ in range(batch_size))
    lengths_k = tuple(lot.choice((*LENGTHS, 300, 600)) for _ in range(batch_size))
    if "varlen" not in layout or layout == "varlen_k":
        lengths_q = lengths_q[:1] * batch_size
    if layout in ("bshd", "bhsd"):
        lengths_k = lengths_k[:1] * batch_size
    window = (-1, -1)
    if lot.random() < 0.5:
        window = (lot.choice((-1, 0, 5, 64, 150)), lot.choice((-1, 0, 7)))
    case = Case(
        layout=layout, dtype=lot.choice(("fp16", "bf16")), head_dim=lot.choice(head_dims),
        num_heads=kv_heads * group, num_kv_heads=kv_heads, lengths_q=lengths_q,
        lengths_k=lengths_k, causal=lot.random() < 0.6, window_size=window,
        softcap=lot.choice((0.0, 0.0, 20.0)), alibi=lot.choice(("", "", "heads", "batch")),
        softmax_scale=lot.choice((None, None, 0.05)), page_size=lot.choice((1, 7, 8, 16, 64, 256)),
        bound=lot.choice(("tight", "loose", "none")), return_lse=lot.random() < 0.7, seed=seed,
        sinks=lot.choice(("", "", "fp32", "bf16")),
        own_head_dim_v=lot.choice((None, None, *head_dims)),
    )  # fmt: skip
    return case, lot.choice(SCALES), lot.choice((1 << 29, 1 << 29, 1))


def dtype_of(kind: str, seed: int) -> torch.dtype:
    """Of the caches: int8 has both scales."""
    return INT8 if seed % 2 and kind not in ("none", "k", "v") else E4M3


def scales_of(
    kind: str, seed: int, caches: tuple[torch.Tensor, torch.Tensor], heads: int
) -> dict[str, torch.Tensor]:
    """Around 1/2, of int8 by STEP; what there is of scales, those of tokens that are not NaN."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, cache in zip("kv", caches, strict=True):
        if kind == "none" or (kind in ("k", "v") and kind != name):
            continue
        of_tokens = "tokens" in kind
        shape = {"tensor": (), "one": (1,)}.get(kind, cache.shape[:-1] if of_tokens else (heads,))
        scale = 0.5 * 2.0 ** (2 * torch.rand(shape, generator=generator) - 1)
        if dtype_of(kind, seed) == INT8:
            scale *= STEP
        scale = scale.to(cache.device)
        if of_tokens:
            scale[cache.isnan().any(-1)] = float("nan")
        if "strided" in kind:
            scale = torch.stack((scale, torch.full_like(scale, float("nan"))), -1)[..., 0]
        found[f"{name}_scale{'_cache' * of_tokens}"] = scale
    return found


def padded(x: torch.Tensor, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """x in bytes, now and then in rows that lie apart, NaN, or the most there is, between them."""
    none = 127.0 if dtype == INT8 else float("nan")
    if dtype == INT8:
        x = (x / STEP).nan_to_num(none).round().clamp(-127, 127)
    x = x.to(dtype)
    if seed % 3:
        return x
    room = torch.full((*x.shape[:-1], x.shape[-1] + 16), none, device=x.device).to(dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def dequantised(x: torch.Tensor, scale: torch.Tensor | None, layout: str) -> torch.Tensor:
    """In fp64."""
    if scale is None:
        return x.double()
    if scale.dim() > 1:
        return x.double() * scale.double()[..., None]
    factor = scale.double().reshape(-1, 1, 1) if "bhsd" in layout else scale.double().reshape(-1, 1)
    return x.double() * factor


class Poisoned:
    """What the op widens caches to is NaN before, and lies in guard bands."""

    def __init__(self) -> None:
        self.made: list[Guarded] = []

    def __call__(self, q: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        self.made.append(Guarded(shape, q.dtype, q.device))
        return self.made[-1].tensor


def run(case: Case, kind: str, device: str, **more: Any) -> Poisoned:
    """Hold a case against fp64 of what its bytes are times its scales."""
    inputs = make(case, device)
    q, k, v = inputs.tensors
    byte = dtype_of(kind, case.seed)
    caches = padded(k, case.seed, byte), padded(v, case.seed + 1, byte)
    scales = scales_of(kind, case.seed, (k, v), case.num_kv_heads)
    values = [
        dequantised(x, scales.get(f"{name}_scale", scales.get(f"{name}_scale_cache")), case.layout)
        for name, x in zip("kv", caches, strict=True)
    ]
    dtype = case.torch_dtype
    truth, truth_lse = reference_attention(q, *values, **inputs.options)
    own, _ = reference_attention(q, *(x.to(dtype) for x in values), **inputs.options, dtype=dtype)
    guarded = Guarded(inputs.out_shape, dtype, device, row_stride=case.head_dim_v + 8)
    poisoned = Poisoned()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "_new", poisoned)
        given = Inputs([q, *caches], inputs.options, inputs.out_shape, inputs.own_options)
        result = call(case, given, out=guarded.tensor, return_lse=case.return_lse, **scales, **more)
    out, lse = result if case.return_lse else (result, None)
    guarded.check()
    for each in poisoned.made:
        each.check("what was widened")
    check(out, truth, own, atol=attention_parts_atol(truth, dtype, case.softcap))
    if lse is not None:
        # Scores of rounded keys: fp64 of them is what fp32 is held to.
        rounded = [x.to(dtype).double() for x in values]
        if q.is_cuda or poisoned.made:
            truth_lse = reference_attention(q, *rounded, **inputs.options)[1]
        rows = slice(None)  # of no sequence: not written
        if "cu_seqlens_q" in inputs.options:
            rows = slice(int(inputs.options["cu_seqlens_q"][-1]))
        check_lse(lse[..., rows], truth_lse[..., rows], 4 * case.head_dim**0.5, case.softcap)
    return poisoned


def hoppers(way: Way, monkeypatch: pytest.MonkeyPatch) -> contextlib.AbstractContextManager[Any]:
    """Hopper's kernels behind it, emulated as well."""
    return contextlib.nullcontext() if way.is_gpu else hopper_attention(monkeypatch, 3)


# ---- everywhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_reference_on_the_cpu_by_lot(seed: int) -> None:
    case, kind, _ = drawn(seed, (16, 48, 96, 256))
    run(case, kind, "cpu")


@pytest.mark.parametrize("seed", range(24))
def test_cases_by_lot(way: Way, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kind, most = drawn(1000 + seed)
    monkeypatch.setattr(MODULE, "most_bytes", most)
    poisoned = run(case, kind, way.device)
    empty = max(case.lengths_q) == 0
    assert len(poisoned.made) == 2 * (case.num_kv_heads if most == 1 else 1) or empty


@pytest.mark.parametrize("seed", range(12))
def test_hoppers_kernels_by_lot(
    hopper_way: Way, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, kind, most = drawn(2000 + seed, (64, 128))
    monkeypatch.setattr(MODULE, "most_bytes", most)
    with hoppers(hopper_way, monkeypatch):
        run(dataclasses.replace(case, alibi=""), kind, hopper_way.device)


@pytest.mark.parametrize("byte", [E4M3, INT8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("value", ["fp16", "bf16"])
def test_every_byte_is_exact(way: Way, value: str, byte: torch.dtype) -> None:
    """A single key of each row: out is its value, bit for bit."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[value]
    v = torch.arange(256, dtype=torch.uint8).view(byte).reshape(1, 1, 8, 32).to(way.device)
    q, one = way.randn(1, 1, 8, 32, dtype=dtype), torch.ones(1, device=way.device)
    out = flash_attention(q, torch.zeros_like(v), v, k_scale=one, v_scale=one)
    torch.testing.assert_close(out, v.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_keys_before_a_window_are_left_alone(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but a margin of them."""
    poisoned = Poisoned()
    monkeypatch.setattr(MODULE, "_new", poisoned)
    q, k = way.randn(1, 20, 2, 32, dtype=torch.bfloat16), way.randn(1, 600, 1, 32).to(E4M3)
    flash_attention(q, k, k, causal=True, window_size=(50, -1))
    first = 600 - 20 - 50 - 256
    for each in poisoned.made:
        same_bits(each.tensor[:, first:], k[:, first:].bfloat16())
        written = each.tensor[:, :first] == k[:, :first].bfloat16()
        assert not bool(written.all(-1).any())


@pytest.mark.parametrize("byte", [E4M3, INT8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("of_tokens", [False, True], ids=["heads", "tokens"])
def test_caches_that_append_kv_wrote(way: Way, byte: torch.dtype, of_tokens: bool) -> None:
    """A chunk of 17 by flash_attention, 16 of it by decode_attention: one cache."""
    kv_heads, head_dim, page_size, held = 2, 64, 16, 70
    pages = torch.zeros(8, page_size, kv_heads, head_dim, device=way.device).to(byte)
    k_cache, v_cache = pages.clone(), pages.clone()
    table = torch.tensor([[5, 2, 0, 7, 1, 3]], dtype=torch.int32, device=way.device)
    scales = {
        "k_scale": torch.tensor([0.02, 0.05], device=way.device),
        "v_scale": torch.tensor([0.03, 0.01], device=way.device),
    }
    if of_tokens:
        apart = torch.full((*pages.shape[:3], 2), float("nan"), device=way.device)
        scales = {f"{name}_cache": apart.clone()[..., 0] for name in scales}
    k = way.randn(1, held, kv_heads, head_dim, dtype=torch.bfloat16, seed=1)
    v = way.randn(1, held, kv_heads, head_dim, dtype=torch.bfloat16, seed=2)
    empty = torch.zeros(1, dtype=torch.int32, device=way.device)
    append_kv(k, v, k_cache, v_cache, block_table=table, cache_seqlens=empty, **scales)
    q = way.randn(1, 17, 4, head_dim, dtype=torch.bfloat16, seed=3)
    lengths = torch.full_like(empty, held)
    where = {"block_table": table, "cache_seqlens": lengths, **scales}
    chunk = flash_attention(q, k_cache, v_cache, causal=True, **where)
    steps = decode_attention(q[:, 1:], k_cache, v_cache, **where)
    torch.testing.assert_close(chunk[:, 1:], steps, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("byte", "deterministic"), [(E4M3, False), (E4M3, "batch"), (INT8, "batch")]
)
def test_the_bits_of_a_cache_of_16_bits(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, byte: torch.dtype, deterministic: Any
) -> None:
    """Which holds the same keys, as it can where nothing is scaled."""
    q = hopper_way.randn(2, 33, 4, 64, dtype=torch.bfloat16)
    k, v = (hopper_way.randn(2, 150, 2, 64, seed=i).mul(4).to(byte) for i in (1, 2))
    one = torch.ones(2, device=hopper_way.device)
    lengths = torch.tensor([150, 77], dtype=torch.int32, device=hopper_way.device)
    options = {"causal": True, "cache_seqlens": lengths, "deterministic": deterministic}
    with hoppers(hopper_way, monkeypatch):
        found = flash_attention(q, k, v, k_scale=one, v_scale=one, **options)
        same_bits(found, flash_attention(q, k.bfloat16(), v.bfloat16(), **options))


@pytest.mark.parametrize("page", [-1, 4, 2**31 - 1])
def test_pages_that_are_not_there_are_zeros(way: Way, page: int) -> None:
    """And the table is named."""
    q, pages = way.randn(1, 20, 2, 32, dtype=torch.bfloat16), way.randn(4, 16, 1, 32).to(E4M3)
    table = torch.tensor([[3, page, 0]], dtype=torch.int32, device=way.device)
    lengths = torch.tensor([40], dtype=torch.int32, device=way.device)
    out = flash_attention(q, pages, pages, block_table=table, cache_seqlens=lengths)
    assert bounds.take(q) == {"flash_attention": ("block_table",)}
    keys = torch.cat((pages[3], torch.zeros_like(pages[0]), pages[0]))[None, :40]
    torch.testing.assert_close(out, flash_attention(q, keys, keys), rtol=1e-2, atol=1e-2)
    assert not bounds.take(q)


def test_lengths_beyond_what_is_there_are_clamped(way: Way) -> None:
    q, k = way.randn(2, 20, 2, 32, dtype=torch.bfloat16), way.randn(2, 40, 1, 32).to(E4M3)
    lengths = torch.tensor([10**9, -1], dtype=torch.int32, device=way.device)
    out, lse = flash_attention(q, k, k, cache_seqlens=lengths, return_lse=True)
    assert bounds.take(q) == {"flash_attention": ("cache_seqlens",)}
    torch.testing.assert_close(out[:1], flash_attention(q[:1], k[:1], k[:1]), rtol=1e-2, atol=1e-2)
    assert not bool(out[1].any()) and bool((lse[1] == -torch.inf).all())


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back(
        """
def case(i, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim):
    q = randn(batch, seqlen_q, heads, head_dim)
    k, v = (randn(batch, seqlen_k, kv_heads, head_dim).to(e4m3) for _ in range(2))
    scale = torch.rand(kv_heads, device="cuda") + 0.5
    options = [{}, {"k_scale": scale, "window_size": (300, 0)}, {"v_scale": scale}][i % 3]
    return partial(ops.flash_attention, q, k, v, causal=True, **options)
shapes = [(4, 256, 2048, 8, 2, 128), (1, 17, 5000, 8, 1, 64), (2, 700, 900, 16, 16, 256)]
cases = [case(i, *shape) for i, shape in enumerate(shapes)]
"""
    )


# ---- what torch.compile knows --------------------------------------------------------------------


def small() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    k = torch.randn(2, 30, 2, 64).to(E4M3)
    return torch.randn(2, 20, 4, 64).bfloat16(), k, torch.randn(2, 30, 2, 64).to(E4M3)


def test_compiled_on_the_cpu() -> None:
    q, k, v = small()
    scale = torch.tensor([0.5, 0.3])
    compiled = torch.compile(flash_attention, backend="eager", fullgraph=True)
    options = {"causal": True, "softcap": 5.0, "window_size": (9, -1), "k_scale": scale}
    same_bits(compiled(q, k, v, **options), flash_attention(q, k, v, **options))


def test_registered_ops_pass_opcheck_on_the_cpu() -> None:
    q, k, v = small()
    options = (True, 0.1, [-1, -1], 0.0, *[None] * 8, False, True)
    operators = torch.ops.kernel_hub
    # test_schema multiplies its inputs, which torch cannot in e4m3.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for scales in ((torch.tensor(0.5), *[None] * 3), (None, None, *[ONES(2, 30, 2)] * 2)):
        given = (q, k, v, *scales, *options)
        for op, arguments in (
            (operators.flash_attention_byte_caches, given),
            (operators.flash_attention_byte_caches_out, (*given, torch.empty_like(q))),
        ):
            torch.library.opcheck(op.default, arguments, test_utils=checks)


# ---- refusals ------------------------------------------------------------------------------------

ONES = torch.ones
BAD: list[tuple[str, dict[str, Any]]] = [
    ("q", {"q": torch.zeros(2, 20, 4, 64)}),
    ("v", {"v": torch.zeros(2, 30, 2, 64).bfloat16()}),
    ("k", {"q": torch.zeros(2, 20, 4, 72).half(), "k": torch.zeros(2, 30, 2, 72).to(E4M3),
           "v": torch.zeros(2, 30, 2, 64).to(E4M3)}),
    ("v", {"v": torch.zeros(2, 30, 2, 72).to(E4M3)}),
    ("k", {"k": torch.zeros(2, 30, 2, 72).to(E4M3)[..., 8:]}),
    ("k", dict.fromkeys(("k", "v"), torch.zeros(1, 30, 2, 64).to(E4M3))),
    ("q_scale", {"q_scale": ONES(())}),
    ("out_dtype", {"out_dtype": torch.float16}),
    ("k_scale", {"k_scale": ONES(4)}),
    ("k_scale", {"k_scale": 0.5}),
    ("k_scale", {"k_scale": ONES(2, 2)}),
    ("v_scale", {"v_scale": ONES(2).double()}),
    ("v_scale", {"v_scale": ONES(2, device="meta")}),
    ("v_scale_cache", {"k_scale_cache": ONES(2, 30, 2)}),
    ("v_scale", {"k_scale_cache": ONES(2, 30, 2), "v_scale_cache": ONES(2, 30, 2),
                 "v_scale": ONES(2)}),
    ("v_scale_cache", {"k_scale_cache": ONES(2, 30, 2), "v_scale_cache": ONES(2, 30, 1)}),
    ("k_scale", dict.fromkeys(("k", "v"), torch.zeros(2, 30, 2, 64).to(INT8))),
    ("v_scale", {"k_scale": ONES(2)} | dict.fromkeys("kv", torch.zeros(2, 30, 2, 64).to(INT8))),
    ("v", {"v": torch.zeros(2, 30, 2, 64).to(INT8)}),
    ("k_scale_cache", {"k_scale_cache": ONES(2, 30, 2),
                       **dict.fromkeys("kv", torch.zeros(2, 30, 2, 64).bfloat16())}),
    ("out", {"out": torch.zeros(2, 20, 4, 64).half()}),
    ("sinks", {"sinks": ONES(3)}),
    ("cache_seqlens", {"cache_seqlens": ONES(2)}),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "more"), BAD, ids=lambda x: str(x)[:40])
def test_refusals(argument: str, more: dict[str, Any]) -> None:
    given = dict(zip("qkv", small(), strict=True)) | more
    q, k, v = given.pop("q"), given.pop("k"), given.pop("v")
    with pytest.raises(TensorError, match=f"^flash_attention: {argument}: expected"):
        flash_attention(q, k, v, **given)


def test_gradients_are_refused() -> None:
    q, k, v = small()
    with pytest.raises(TensorError, match=r"over caches of bytes: q: "):
        flash_attention(q.requires_grad_(), k, v)


def test_an_out_that_meets_the_cache() -> None:
    q, k, v = small()
    out = torch.zeros(2 * 20 * 4 * 64, dtype=torch.bfloat16)
    meets = out.view(E4M3)[: k.numel()].view(k.shape)
    with pytest.raises(TensorError, match=r"^flash_attention: out: "):
        flash_attention(q, meets, v, out=out.view(q.shape))

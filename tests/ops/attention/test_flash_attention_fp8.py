"""flash_attention of e4m3 tensors: what it refuses, its CPU reference, and Hopper's kernels."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_fp8_cases import E4M3, Case, spread
from back_to_back import check_back_to_back
from bits import same_bits

from kernel_hub.errors import TensorError
from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core.device import PlannedGpu, has_wgmma
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.testing.guard import Guarded

FP8: Any = importlib.import_module("kernel_hub.ops.attention.forward_fp8")
SCALES = ["none", "tensor", "heads", "batch", "blocks", "k blocks", "v blocks", "q blocks"]


# ---- everywhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("kind", SCALES)
def test_the_reference_on_the_cpu(kind: str, varlen: bool) -> None:
    case = Case((150, 150), (270, 270), 4, 2, 32, kind, varlen)
    for causal in (False, True):
        out, lse = case.call(causal=causal, return_lse=True)
        truth, truth_lse = case.reference(causal)
        rows = slice(case.rows)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out[rows].double(), truth[rows], rtol=8e-3, atol=8e-3)
        torch.testing.assert_close(lse[..., rows].double(), truth_lse[..., rows], rtol=0, atol=1e-4)


def test_out_and_layouts_on_the_cpu() -> None:
    case = Case((40,), (40,), head_dim=64)
    expected = case.call()
    half = case.call(out_dtype=torch.float16)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected.float(), rtol=1e-2, atol=1e-2)
    out = torch.empty(expected.shape, dtype=torch.float16)
    assert case.call(out=out) is out
    same_bits(out, half)
    swapped = [x.transpose(1, 2).contiguous() for x in case.tensors]
    found = flash_attention(*swapped, layout="bhsd", **case.options)
    same_bits(found.transpose(1, 2).contiguous(), expected)


def test_compiled_on_the_cpu() -> None:
    case = Case((40,), (40,), head_dim=64)
    compiled = torch.compile(flash_attention, backend="eager", fullgraph=True)
    same_bits(compiled(*case.tensors, causal=True, **case.options), case.call(causal=True))


def test_registered_ops_pass_opcheck_on_the_cpu() -> None:
    q, k, v = Case((40,), (40,), head_dim=64).tensors
    given = (q, k, v, None, None, None, True, 0.1, [-1, -1], 0.0, *[None] * 8)
    operators, out = torch.ops.kernel_hub, torch.empty(q.shape, dtype=torch.bfloat16)
    for op, arguments in (
        (operators.flash_attention_fp8, (*given, False, torch.float16, True)),
        (operators.flash_attention_fp8_out, (*given, False, False, out)),
    ):
        # test_schema multiplies its inputs, which torch cannot in e4m3.
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op.default, arguments, test_utils=checks)


def tensors(**more: Any) -> dict[str, Any]:
    q = torch.zeros(2, 200, 4, 64).to(E4M3)
    k = torch.zeros(2, 300, 2, 64).to(E4M3)
    return {"q": q, "k": k, "v": k} | more


ONES = torch.ones
BAD: list[tuple[str, dict[str, Any]]] = [
    ("window_size", {"window_size": (5, -1)}),
    ("window_size", {"window_size": (-1, 3)}),
    ("softcap", {"softcap": 2.0}),
    ("alibi_slopes", {"alibi_slopes": ONES(4)}),
    ("sinks", {"sinks": ONES(4)}),
    ("block_table", {"block_table": torch.zeros(2, 3, dtype=torch.int32)}),
    ("k", {"k": torch.zeros(2, 300, 2, 64).bfloat16()}),
    ("v", {"v": torch.zeros(2, 300, 2, 64)}),
    ("q", {"q": torch.zeros(2, 200, 4, 72).to(E4M3),
           "k": torch.zeros(2, 300, 2, 72).to(E4M3), "v": torch.zeros(2, 300, 2, 72).to(E4M3)}),
    ("q_scale", {"q_scale": 0.5}),
    ("q_scale", {"q_scale": ONES(3)}),
    ("q_scale", {"q_scale": ONES(2, 2, 2)}),
    ("q_scale", {"q_scale": ONES(2, 4, 3)}),
    ("k_scale", {"k_scale": ONES(4)}),
    ("k_scale", {"k_scale": ONES(1, 2)}),
    ("k_scale", {"k_scale": ONES(2, 2, 2)}),
    ("v_scale", {"v_scale": ONES(2, 2, 3).double()}),
    ("v_scale", {"v_scale": ONES(2, 2, device="meta")}),
    ("v_scale", {"v_scale": ONES(1, 2, 2, 3)}),
    ("out_dtype", {"out_dtype": torch.float32}),
    ("out", {"out": torch.zeros(2, 200, 4, 64)}),
    ("out", {"out": torch.zeros(2, 200, 4, 64).half(), "out_dtype": torch.bfloat16}),
    ("out", {"out": torch.zeros(2, 200, 4, 68).half()[..., :64]}),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "more"), BAD, ids=lambda x: str(x)[:40])
def test_refusals(argument: str, more: dict[str, Any]) -> None:
    given = tensors(**more)
    q, k, v = given.pop("q"), given.pop("k"), given.pop("v")
    with pytest.raises(TensorError, match=f"^flash_attention: {argument}: expected"):
        flash_attention(q, k, v, **given)


def test_scales_belong_to_e4m3() -> None:
    q = torch.zeros(1, 8, 2, 64).half()
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(
            TensorError, match=f"{name}: expected None where q is not float8_e4m3fn"
        ):
            flash_attention(q, q, q, **{name: torch.ones(())})
    with pytest.raises(TensorError, match="out_dtype: expected None"):
        flash_attention(q, q, q, out_dtype=torch.float16)


def test_no_gradients() -> None:
    case = Case((8,), (8,), head_dim=64)
    case.options["q_scale"].requires_grad_()
    with pytest.raises(TensorError, match="q_scale: requires grad"):
        case.call()


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FP8, "device_of", lambda _: PlannedGpu((8, 9), 100, "Some GPU"))
    with pytest.raises(TensorError, match=r"q: expected float16 or bfloat16 on Some GPU"):
        FP8.check_device(torch.zeros(1, 8, 2, 64).to(E4M3))


def test_what_the_launch_needs() -> None:
    q = torch.zeros(2, 8, 4, 80).to(E4M3)

    def problem(q: torch.Tensor, scale: float = 0.1) -> Problem:
        return Problem(q, q, q, 2, 8, 8, scale)

    for good in (q, q[:, 1:], q[..., 16:], q.transpose(1, 2)):
        FP8.check_problem(problem(good))
    for bad in (q[..., 8:72], q[:1].expand(2, -1, -1, -1)):
        with pytest.raises(TensorError, match="q: expected e4m3 rows"):
            FP8.check_problem(problem(bad))
    for scale in (0.0, -1.0, 1e-30):
        with pytest.raises(TensorError, match="softmax_scale"):
            FP8.check_problem(problem(q, scale))


def test_the_table_holds_every_case() -> None:
    numbers = itertools.product(
        range(16, 257, 16), [False, True], [False, True], [0, 900, 3000, 1 << 20], [900, 1 << 20]
    )
    chosen = set()
    for head_dim, causal, blocks, keys, rows in numbers:
        body = FP8.choose(head_dim, causal, blocks, keys, rows, 132, max(1, min(keys, rows)))
        chosen.add(body)
        assert body.head_dim >= head_dim and body.least_keys <= keys and body.least_rows <= rows
        assert body.suffix.startswith(("causal" if causal else "full", "any"))
        assert ("blocks" in body.suffix) == blocks
        assert body.stated.shared_bytes <= 226 * 1024
    assert chosen == set(FP8.BODIES)


def test_few_tiles_are_of_fewer_rows() -> None:
    """Of 128, for the first round; wider heads for two that are as many as those of 192."""

    def width(head_dim: int, batch_size: int, seqlen: int, heads: int, causal: bool = False) -> int:
        rows = batch_size * seqlen * heads
        body = FP8.choose(head_dim, causal, False, seqlen, rows, 132, seqlen)
        return int(body.head_dim)

    for case in (32, 1, 266, 12), (64, 2, 320, 12), (64, 1, 893, 12), (80, 13, 1024, 2):
        assert width(*case) == 128
    assert width(64, 2, 575, 4, True) == 128
    for case in (64, 64, 293, 12), (32, 13, 851, 3), (32, 53, 541, 3):
        assert width(*case) == 64
    assert width(80, 7, 1548, 2) == 96


# ---- on Hopper -----------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> Iterator[None]:
    if not has_wgmma(torch.cuda.get_device_capability()):
        pytest.skip("not compute capability 9.0")
    yield


def run(case: Case, causal: bool) -> None:
    """Into a guarded output, twice."""
    shape = case.tensors[0].shape
    guarded = Guarded(shape, torch.bfloat16, "cuda", row_stride=shape[-1] + 8)
    out, lse = case.call(causal=causal, out=guarded.tensor, return_lse=True)
    guarded.check()
    case.check(causal, out, lse)
    rows = slice(case.rows)
    same_bits(case.call(causal=causal)[rows].contiguous(), out[rows].contiguous(), name="again")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["batch", "blocks"])
@pytest.mark.parametrize(
    ("head_dim", "is_own"),
    [(n, True) for n in (16, 64, 80, 128)]
    + [(n, False) for n in (16, 64, 80, 128, 144, 160, 192, 208, 224, 256)],
)
def test_every_kernel(
    hopper: None, monkeypatch: pytest.MonkeyPatch, head_dim: int, is_own: bool, kind: str,
    causal: bool,
) -> None:  # fmt: skip
    """is_own: by the kernels of the table, whatever others would cost."""
    if is_own:
        monkeypatch.setattr(FP8, "_FEW_ROUNDS", dict.fromkeys(FP8._FEW_ROUNDS, 0))
        monkeypatch.setattr(FP8, "_cheapest", lambda problem, own, alike: (own, 1, alike))
    forget_all()  # what was planned by the other rule
    one = [(1, 1), (97, 333), (300, 64), (64, 2000), (1100, 1100), (130, 16500)]
    for lengths_q, lengths_k in [((515,) * 2, (515,) * 2)] + [((a,), (b,)) for a, b in one]:
        run(Case(lengths_q, lengths_k, 4, 2, head_dim, kind, device="cuda"), causal)
    lengths_q, lengths_k = (1, 77, 300, 513, 64, 0, 130), (1, 200, 129, 513, 0, 5, 5)
    run(Case(lengths_q, lengths_k, 4, 2, head_dim, kind, True, "cuda", 2), causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 160, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (14, 2), (5, 1), (16, 1), (142, 2)])
def test_heads_share_tiles(
    hopper: None, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> None:  # fmt: skip
    forget_all()
    for lengths_q, lengths_k, kind in (
        ((216,) * 3, (216,) * 3, "shared"), ((33,) * 9, (333,) * 9, "none"),
    ):  # fmt: skip
        case = Case(lengths_q, lengths_k, heads, kv_heads, head_dim, kind, device="cuda")
        run(case, causal)
    lengths_q, lengths_k = (1, 77, 300, 10, 64, 0, 130), (1, 200, 129, 5, 0, 5, 5)
    run(Case(lengths_q, lengths_k, heads, kv_heads, head_dim, "shared", True, "cuda", 2), causal)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SCALES)
def test_scales(hopper: None, kind: str) -> None:
    for heads, kv_heads in ((4, 4), (8, 2), (4, 1)):
        case = Case((515, 515), (700, 700), heads, kv_heads, 128, kind, device="cuda", seed=heads)
        run(case, heads == 8)


@pytest.mark.gpu
def test_scales_of_blocks_far_apart(hopper: None) -> None:
    # V's largest scale first and last of what the kernel sees, and a block of 0.
    case = Case((200,), (900,), 2, 1, 128, "blocks", device="cuda")
    for factors in ([1, 4, 16, 64, 256, 1024, 4096, 2**14], [2**14, 1, 1, 0, 1, 1, 2**8, 1]):
        scale = torch.tensor([[factors]], dtype=torch.float32)
        by_value = spread(scale, case.truth[2].cpu(), None).cuda()
        case.truth[2] = case.tensors[2].float() * by_value
        case.shares = by_value[..., 0] / 2**14
        case.options["v_scale"] = scale.cuda()
        run(case, False)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_layouts_and_lengths(hopper: None, head_dim: int) -> None:
    case = Case((150,) * 3, (333,) * 3, 4, 2, head_dim, device="cuda")
    expected = case.call(causal=True)
    swapped = [x.transpose(1, 2).contiguous() for x in case.tensors]
    found = flash_attention(*swapped, layout="bhsd", causal=True, **case.options)
    same_bits(found.transpose(1, 2).contiguous(), expected)
    half = case.call(causal=True, out_dtype=torch.float16)
    torch.testing.assert_close(half.float(), expected.float(), rtol=1e-2, atol=1e-2)
    # cache_seqlens: what lies beyond is nan.
    lengths = torch.tensor([333, 0, 130], dtype=torch.int32, device="cuda")
    for x in case.tensors[1:]:
        for row, length in enumerate(lengths.tolist()):
            x.view(torch.uint8)[row, length:] = 0x7F
    out = case.call(cache_seqlens=lengths)
    for row, length in enumerate(lengths.tolist()):
        if not length:
            assert not bool(out[row].any())
            continue
        part = [
            case.tensors[0][row : row + 1],
            *(x[row : row + 1, :length] for x in case.tensors[1:]),
        ]
        options = dict(case.options)
        for name in ("q_scale", "k_scale", "v_scale"):
            options[name] = options[name][row : row + 1]
        same_bits(flash_attention(*part, **options)[0], out[row].contiguous())


@pytest.mark.gpu
def test_no_keys(hopper: None) -> None:
    q, k = (torch.zeros(2, n, 2, 128, device="cuda").to(E4M3) for n in (70, 0))
    for causal in (False, True):
        out, lse = flash_attention(q, k, k, causal=causal, return_lse=True)
        assert not bool(out.any()) and bool((lse == -math.inf).all())


@pytest.mark.gpu
def test_large_scores(hopper: None) -> None:
    for causal in (False, True):
        run(Case((400,), (700,), magnitude=6.0, device="cuda"), causal)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles_without_keys(hopper: None, head_dim: int) -> None:
    # Far more than a block has places for in its ring of tiles.
    run(Case((2048,) * 4, (64,) * 4, 16, 4, head_dim, device="cuda"), True)
    lengths = tuple(300 * (i % 9 == 4) for i in range(40))
    run(Case((300,) * 40, lengths, 16, 4, head_dim, varlen=True, device="cuda"), True)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back(hopper: None) -> None:
    check_back_to_back(
        """
def case(i, batch, length, heads, head_dim):
    q, k, v = (randn(batch, length, heads, head_dim).to(e4m3) for _ in range(3))
    scale = torch.rand(batch, heads, -(-length // 128), device="cuda") + 0.5
    options = [{}, {"causal": True}, {"v_scale": scale}][i % 3]
    return partial(ops.flash_attention, q, k, v, **options)
shapes = [(4, 1024, 8, 128), (1, 130, 2, 64), (2, 700, 16, 256), (9, 515, 4, 128), (3, 333, 6, 64)]
cases = [case(i, *shape) for i, shape in enumerate(shapes)]
"""
    )

"""Every kernel compiled into the ops' cubins is one some plan chooses, and the example kernel."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import SOURCES, CannotEmulateError, build
from ways import DTYPES, Way

from kernel_hub.ops.core import common
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.kv_cache.append_checks import AppendGiven
from kernel_hub.ops.matmul import linear_plan, paired_plan
from kernel_hub.ops.sampling.verification import VerifyGiven
from kernel_hub.tuning import Gpu


def exported(cubin: str) -> set[str]:
    """The extern "C" kernels of a source, as the compiler sees them."""
    try:
        library = Path(build(cubin)._name)
    except CannotEmulateError as missing:
        pytest.skip(str(missing))
    names = re.findall(rb"\b%s_[a-z0-9_]+" % cubin.encode(), library.read_bytes())
    found = {name.decode() for name in names}
    # Some kernels are the same for all types.
    tokens = ("fp16", "bf16", "fp32", "moe_", "copy_blocks_vec", "copy_blocks_byte")
    return {name for name in found if any(token in name for token in tokens)}


def exported_linear() -> set[str]:
    """The same of the cubins of linear, of which the emulator cannot build Hopper's."""
    cubins = ("linear", "linear_fp32", "linear_small_m", "linear_sm90")
    return exported_by_macros("linear", cubins)


def exported_paired(op: str) -> set[str]:
    """The same of swiglu_linear or qkv_linear."""
    return exported_by_macros(op, (op, f"{op}_sm90"))


def exported_by_macros(op: str, cubins: Sequence[str]) -> set[str]:
    """What the macros at the ends of these sources make."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler (g++)")
    names: set[str] = set()
    for cubin in cubins:
        source = SOURCES[cubin].read_text()
        done = subprocess.run(
            [compiler, "-E", "-P", "-x", "c++", "-"],
            input=source[source.index("#define EXPORT_") :],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        names |= set(re.findall(rf"\b{op}_(?:fp16|bf16|fp32)_\w+", done.stdout))
    return names


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr(common, "shipped", lambda cubin, name: names.add(name))
    return names


def module(name: str) -> Any:
    return importlib.import_module(f"kernel_hub.ops.{name}")


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_rms_norm(chosen: set[str]) -> None:
    hiddens = [8, 129, *(2**i for i in range(5, 16)), 5120, 40960]
    for dtype, hidden, rows in itertools.product(DTYPES, hiddens, [1, 1024, 8192, 32768]):
        x, weight = meta(rows, hidden, dtype=dtype), meta(hidden, dtype=dtype)
        module("rowwise.rms_norm")._plan(x, None, weight, x, None, 0, False)
        module("rowwise.rms_norm")._plan(x, None, weight, x, None, 0, False, True)
        module("rowwise.rms_norm")._plan(x, x, weight, x, x.clone(), 0, False)
        wide = meta(rows, 2 * hidden, dtype=dtype)[:, :hidden]
        module("rowwise.rms_norm")._plan(wide, None, weight, x, None, 0, False)
        module("rowwise.rms_norm")._plan(wide, x, weight, x, x.clone(), 0, False)
    assert chosen == exported("rms_norm")


def test_layer_norm_and_rms_norm_joined(chosen: set[str]) -> None:
    parts = module("rowwise.norm")
    norms = module("rowwise.layer_norm")._norm, module("rowwise.rms_norm")._joined
    hiddens = [8, 129, *(2**i for i in range(5, 16)), 5120, 40960]
    for dtype, kind, hidden, rows in itertools.product(
        DTYPES, [None, torch.float8_e4m3fn, torch.int8], hiddens, [1, 1024, 8192, 32768]
    ):
        x = meta(rows, hidden, dtype=dtype)
        given = parts.NormGiven(x, x[0], None, None, 1e-5, 0.0, False)
        for norm in norms:
            norm.plan(given, norm.new(given, kind, parts.Outs(None, None, None)), 0)
    assert chosen == exported("layer_norm") | exported("rms_norm_joined")


@pytest.mark.parametrize(
    "op, options",
    [
        ("silu_and_mul", [()]),
        ("gelu_and_mul", [(True,), (False,)]),
        ("swigluoai_and_mul", [(1.7, 7.0, True), (1.7, 7.0, False)]),
        ("gelu", [(True,), (False,)]),
        ("relu_squared", [()]),
    ],
    ids=["silu_and_mul", "gelu_and_mul", "swigluoai", "gelu", "relu_squared"],
)
def test_gated(chosen: set[str], op: str, options: list[Any]) -> None:
    found = module(f"rowwise.{op}")
    gated = getattr(found, "_gated", None) or getattr(found, f"_{op}")
    sizes = [(4, 129), (4, 256), (4, 2048), (4, 4096), (4, 16384), (300, 20480), (4, 40960)]
    for dtype, (rows, size), given in itertools.product(DTYPES, sizes, options):
        wide = meta(rows, 4 * size, dtype=dtype)[:, : gated.parts * size]
        for x in (meta(*wide.shape, dtype=dtype), wide):
            gated.plan(x, given, gated.new_out(x), None, 0)
            gated.plan(x, given, gated.new_out(x, torch.float8_e4m3fn), gated.new_scale(x), 0)
    assert chosen == exported(op)


def test_softmax(chosen: set[str]) -> None:
    parts = module("rowwise.softmax_plan")
    with pretend(PlannedGpu((9, 0), 132)):
        for dtype, size in itertools.product(DTYPES, [8, 129, 4096, 40960, 140001, 600000]):
            x = meta(4, size, dtype=dtype)
            token = common.DTYPE_TOKENS[dtype]
            for op, kind in (("softmax", token), (parts.BACKWARD, f"backward_{token}")):
                parts.plan(op, kind, (x, x, None), 0, 4)
    assert chosen == exported("softmax")


def test_quantize_e4m3(chosen: set[str]) -> None:
    op = module("rowwise.quantize_e4m3")
    with pretend(PlannedGpu((9, 0), 132)):
        for dtype, size, per in itertools.product(
            DTYPES, [129, 256, 4096, 16384, 40960], ["tensor", "row", "1x128", "128x128"]
        ):
            for rows in (4, 2048):
                x = meta(rows, size, dtype=dtype)
                out, scale = op._new_out(x), op._new_scale(x, per)
                op._plan(x, None, per, out, scale, 0)
                op._plan(x, scale, per, out, None, 0)
                op._plan(x, None, per, out, scale, 1)
    assert chosen == exported("quantize_e4m3")


def test_sample(chosen: set[str]) -> None:
    op = module("sampling.sample")
    given = dict.fromkeys(op.SampleGiven._fields)
    for dtype in DTYPES:
        logits = meta(3, 129, dtype=dtype)
        op._plan(op.SampleGiven(**{**given, "logits": logits, "softcap": 0.0}), (0, 0))
    assert chosen == {"sample"}


def test_verify_draft(chosen: set[str]) -> None:
    drafts = meta(3, 2, dtype=torch.int64)
    for op, parents in (("verify_draft", None), ("verify_tree", drafts.int())):
        for size in (128, 129):
            logits = meta(3, 3, size, dtype=torch.float16)
            given = VerifyGiven(drafts, parents, logits, *[None] * 7)
            module(f"sampling.{op}")._verification.plan(given, 0)
    ops = ("verify_draft", "verify_tree")
    assert chosen == {*ops, *(f"{op}_scalar" for op in ops)}


def test_copy_blocks(chosen: set[str]) -> None:
    plan, pairs = module("kv_cache.copy_blocks")._plan, meta(2, 2, dtype=torch.int32)
    for size in (64, 18):
        cache = meta(9, size, dtype=torch.float16)
        plan(cache, cache, pairs, 0)
    assert chosen == exported("copy_blocks")


def test_mla_decode(chosen: set[str]) -> None:
    step, plan = module("kv_cache.mla_decode")._step, module("kv_cache.mla_plan")
    few_and_many = (16, 32, 128)
    for dtype, heads, capability in itertools.product(DTYPES[:2], few_and_many, [(8, 0), (9, 0)]):
        q, cache = meta(64, 1, heads, 576, dtype=dtype), meta(64, 4096, 576, dtype=dtype)
        given = plan.MlaGiven(q, cache, None, None, 0.1, 0, q[..., :512])
        with pretend(PlannedGpu(capability, 132)):
            made = step(given)  # on Hopper most are merged where they are made
        assert made.merge.numbers or capability == (9, 0)
        with pretend(PlannedGpu((9, 0), 132)):
            step(given._replace(q=q[:3], kv_cache=cache[:3, :500], out=given.out[:3]))
    kernels = set().union(*map(exported, ("mla_decode", "mla_decode_sm90", "mla_team_sm90")))
    assert chosen == kernels | {f"decode_attention_{x}_merge" for x in ("fp16", "bf16")}


def test_pad_input(chosen: set[str]) -> None:
    op, bounds = module("tokens.pad_input"), meta(3, dtype=torch.int32)
    for size in (64, 12, 7):
        x, padded = meta(9, size, dtype=torch.int8), meta(2, 4, size, dtype=torch.int8)
        op._pad.plan(x, bounds, 4, padded, 0)
        op._unpad.plan(padded, bounds, 9, x, 0)
    kinds = ("vec", "word", "byte")
    assert chosen == {f"{op}_{kind}" for op in ("pad_input", "unpad_input") for kind in kinds}


def test_embedding(chosen: set[str]) -> None:
    op = module("tokens.embedding")
    for dtype, hidden, tokens in itertools.product(DTYPES, [64, 18, 8192], [1, 300]):
        ids, weight = meta(tokens, dtype=torch.int32), meta(9, hidden, dtype=dtype)
        given = op.EmbeddingGiven(ids, weight, None, None, None, 0, None)
        op._plan(given, meta(tokens, hidden, dtype=dtype), 0)
    assert chosen == exported("embedding")


def test_rope(chosen: set[str]) -> None:
    for dtype, table32, interleaved, tokens, head_dim in itertools.product(
        DTYPES, [False, True], [False, True], [1, 1024, 8192, 32768], [16, 64, 128, 80, 18]
    ):
        table = meta(tokens, head_dim // 2, dtype=torch.float32 if table32 else dtype)
        k = meta(tokens, 8, head_dim, dtype=dtype)
        for num_heads in (32, 64):
            q = meta(tokens, num_heads, head_dim, dtype=dtype)
            plan = module("rowwise.rope")._plan
            plan(q, k, table, table, None, interleaved, head_dim, q, k, 0)
            wide = meta(tokens, num_heads, 2 * head_dim, dtype=dtype)[..., :head_dim]
            plan(wide, k, table, table, None, interleaved, head_dim, q, k, 0)
    assert chosen == exported("rope")


def test_append_kv(chosen: set[str]) -> None:
    e4m3 = torch.float8_e4m3fn
    for dtype, quantised, head_dim in itertools.product(DTYPES, [False, True], [64, 18]):
        k, weight = meta(2, 5, 4, head_dim, dtype=dtype), meta(head_dim, dtype=dtype)
        cache = meta(2, 9, 4, head_dim, dtype=e4m3 if quantised else dtype)
        for interleaved, norm in itertools.product([False, True], [None, weight]):
            given = (k, k, cache, cache, *[None] * 8, interleaved, 0, *[None] * 5, norm)
            module("kv_cache.append_plan").launch_of(AppendGiven(*given), True)
    assert chosen == exported("append_kv")


def test_append_kv_quantised(chosen: set[str]) -> None:
    for dtype, head_dim in itertools.product(DTYPES[:2], [64, 18]):
        k, scale = meta(2, 5, 4, head_dim, dtype=dtype), meta(2, 9, 4, dtype=torch.float32)
        cache = meta(2, 9, 4, head_dim, dtype=torch.int8)
        arguments = AppendGiven(k, k, cache, cache, *[None] * 8, False, 0, *[None] * 4)
        scaled = arguments._replace(k_scale_cache=scale, v_scale_cache=scale)
        for given in (arguments, scaled):
            module("kv_cache.append_plan").launch_of(given, True)
    assert chosen == exported("append_kv_quantised")


def test_merge_states(chosen: set[str]) -> None:
    for dtype, tokens, head_dim in itertools.product(DTYPES, [1, 1024, 32768], [128, 18]):
        out, lse = meta(tokens, 8, head_dim, dtype=dtype), meta(8, tokens, dtype=torch.float32)
        module("attention.merge_states")._plan(out, lse, out, lse, out, lse, 0)
        module("attention.merge_states")._plan(out, lse.t().contiguous().t(), out, lse, out, lse, 0)
    assert chosen == exported("merge_states")


def test_moe(chosen: set[str]) -> None:
    for dtype, hidden, tokens in itertools.product(DTYPES, [128, 18], [4, 4096]):
        rows, places = meta(tokens, hidden, dtype=dtype), meta(tokens, 2, dtype=torch.int32)
        for k in (2, 4, 6, 8):
            slots = meta(tokens, k, dtype=torch.int32)
            module("moe.moe_combine")._plan(rows, slots, None, rows, 0)
        out = meta(2 * tokens, hidden, dtype=dtype)
        module("moe.moe_permute")._plan(rows, places, 8, out, 0)
        module("moe.moe_permute")._plan(rows, places, 8, out, 2)
    much = meta(1 << 20, 64, dtype=torch.float16)
    module("moe.moe_permute")._plan(much, meta(1 << 20, 1, dtype=torch.int32), 8, much, 0)
    route = module("moe.moe_route")
    for num_experts in (8, 256, 512):
        rule = route._Rule(1, 0, False, 1, 1, 1.0, False)
        route._plan(meta(4, num_experts, dtype=torch.float32), None, rule, 0)
    expected = set[str]().union(*(exported(f"moe_{op}") for op in ("combine", "permute", "route")))
    assert chosen == expected and len(expected) == 24


def test_linear(chosen: set[str]) -> None:
    launch = importlib.import_module("kernel_hub.ops.matmul.linear_launch")
    rows = [1, 5, 8, 16, 17, 33, 64, 65, 128, 160, 200, 256, 300, 512, 700]
    rows += [777, 1024, 1500, 3000, 8192]
    weights = [(8, 64), (5120, 256), (18944, 64)]
    weights += itertools.product((8, 512, 1536, 3072, 5120, 14336), (512, 1024, 2048, 4096, 8192))
    for section in linear_plan.TABLE.shipped():
        weights += [tuple(linear_plan.TABLE.layout.parse(key).values()) for key in section.choices]
    for device in (PlannedGpu((8, 0), 108), PlannedGpu((9, 0), 132)):
        with pretend(device):
            for dtype, m, (n, k), wide in itertools.product(DTYPES, rows, weights, [0, 1]):
                a, b = meta(m, k, dtype=dtype), meta(n, k, dtype=dtype)
                out = meta(m, n, dtype=torch.float32 if wide else dtype)
                launch.plan_launch(a, b, None, 0, None, False, False, out)
    assert chosen == exported_linear()


@pytest.mark.parametrize("op", paired_plan.TABLES)
def test_paired(op: str) -> None:
    rows = [1, 5, 8, 12, 16, 17, 32, 33, 64, 65, 128, 256, 300, 512, 1024, 3000, 4096, 8192]
    weights = [(96, 64), (1536, 512), (5120, 1024)]
    weights += itertools.product(
        (96, 1536, 3584, 5120, 9216, 18944), (1024, 2048, 3584, 8192, 18944)
    )
    rows += [190, 200, 220, 440, 1700]
    for section in paired_plan.TABLES[op].shipped():
        keys = map(paired_plan.TABLES[op].layout.parse, section.choices)
        weights += [(int(key["n"]), int(key["k"])) for key in keys]
    variants = {
        paired_plan.choose(op, gpu, m, n, k, True).variant
        for gpu in (Gpu((8, 0), 108), Gpu((9, 0), 132))
        for m, (n, k) in itertools.product(rows, weights)
    }
    assert {f"{op}_{token}_{variant}" for token in ("fp16", "bf16") for variant in variants} == (
        exported_paired(op)
    )


@pytest.mark.parametrize("name", SOURCES)
def test_the_list_of_variants_ends_the_file(name: str) -> None:
    lines = SOURCES[name].read_text().rstrip().splitlines()
    if any(line.startswith("#define EXPORT_") for line in lines):
        assert any(line.lstrip().startswith("EXPORT_") for line in lines[-12:])


@pytest.mark.gpu
def test_matmul_cache_kernel(way: Way) -> None:
    from kernel_hub import Kernel

    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.full((512, 512), float("nan"), device="cuda")
    kernel = Kernel("matmul_cache_kernel", function_names=["matmul_cache_kernel_0d1d2d"])
    kernel.matmul_cache_kernel_0d1d2d(
        gridDim=(8, 8, 1), blockDim=(32, 32, 1), sharedMemBytes=16384, stream=0, params=[a, b, c]
    )
    torch.cuda.synchronize()
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)

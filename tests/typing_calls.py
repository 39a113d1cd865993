"""Calls as users write them, for type checkers: never run. A line with `type: ignore` is wrong, and
a checker that does not say so fails `tests/house/test_types.py`."""

from __future__ import annotations

import numpy as np
import torch
from typing_extensions import assert_type

import kernel_hub
from kernel_hub import (
    BoundLaunch,
    CompileError,
    DeviceArray,
    Event,
    Kernel,
    KernelFunction,
    KernelHubError,
    MissingPackageError,
    Stream,
    TableError,
    formats,
    ops,
    registry,
    synchronize,
)
from kernel_hub.registry import Found, Registry

x: torch.Tensor = torch.zeros(4, 256)
maybe: torch.Tensor | None = x if len(registry) else None
flag: bool = bool(len(registry))


def kernels() -> None:
    assert_type(registry.rms_norm, Kernel)
    assert_type(registry["rms_norm"], Kernel)
    assert_type(registry.rms_norm.rms_norm_bf16_vec1, KernelFunction)
    assert_type(registry.find(arch="sm90"), list[Found])
    assert_type(registry.collection("theirs"), Registry)
    assert_type(registry.packages(), dict[str, str])
    assert_type(list(registry), list[str])
    assert_type("rope" in registry, bool)
    function = Kernel("rope")["rope_fp32_scalar"]
    function(4, (256, 1, 1), 0, None, [1, 2.0])
    assert_type(function.bind((4,), 256, params={"n": 1}), BoundLaunch)
    registry.find(arch=90)  # type: ignore[arg-type]
    registry.find(sm="sm90")  # type: ignore[call-arg]
    Kernel.from_source("code", option="-O3")  # type: ignore[call-arg]


def arrays() -> None:
    with Stream("cuda:0") as stream:
        assert_type(stream, Stream)
        array = DeviceArray.from_numpy(np.zeros(4), stream=stream)
        assert_type(array, DeviceArray)
        assert_type(array.shape, tuple[int, ...])
        assert_type(stream.record(), Event)
        stream.wait(stream.record())
        stream.wait(3)  # type: ignore[arg-type]
    synchronize()
    assert_type(Event(timing=True).elapsed_ms(Event(timing=True)), float)
    DeviceArray.zeros((4,), like=array)  # type: ignore[call-arg]


def results() -> None:
    assert_type(ops.rms_norm(x, x), torch.Tensor)
    assert_type(ops.rms_norm(x, x, residual=x), tuple[torch.Tensor, torch.Tensor])
    assert_type(
        ops.rms_norm(x, x, residual=maybe), "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
    )
    assert_type(ops.linear(x, x, out_dtype=torch.float32), torch.Tensor)
    assert_type(ops.flash_attention(x, x, x, causal=True), torch.Tensor)
    assert_type(ops.flash_attention(x, x, x, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(
        ops.flash_attention(x, x, x, return_lse=flag),
        "torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
    )
    assert_type(
        ops.flash_attention_qkvpacked(x, return_lse=True), tuple[torch.Tensor, torch.Tensor]
    )
    assert_type(ops.decode_attention(x, x, x, cache_seqlens=x), torch.Tensor)
    assert_type(
        ops.decode_attention(x, x, x, cache_seqlens=x, return_lse=True),
        tuple[torch.Tensor, torch.Tensor],
    )
    assert_type(ops.mla_decode(x, x, cache_seqlens=x, softmax_scale=0.1), torch.Tensor)
    assert_type(
        ops.mla_decode(x, x, cache_seqlens=x, softmax_scale=0.1, return_lse=True),
        tuple[torch.Tensor, torch.Tensor],
    )
    assert_type(ops.append_kv(x, x, x, x), None)
    assert_type(ops.append_kv(x, x, x, x, q=x), torch.Tensor)
    assert_type(
        ops.qkv_linear(x, x, num_heads=4, num_kv_heads=4),
        tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    )
    assert_type(
        ops.qkv_linear(x, x, num_heads=4, num_kv_heads=4, k_cache=x, v_cache=x),
        tuple[torch.Tensor, None, None],
    )
    ops.flash_attention(x, x, x, return_lse=True).cuda()  # type: ignore[attr-defined]
    ops.rms_norm(x, x, epsilon=1e-6)  # type: ignore[call-overload]
    ops.rms_norm(x, x, eps="1e-6")  # type: ignore[call-overload]
    ops.linear(x, x, out_dtype="float32")  # type: ignore[arg-type]
    ops.linear(np.zeros(4), x)  # type: ignore[arg-type]


def names() -> None:
    errors: list[type[KernelHubError]] = [CompileError, MissingPackageError, TableError]
    errors += [kernel_hub.errors.ParamsError, kernel_hub.ProbeError]
    print(formats.carray.load, formats.triton.load, formats.fmha_v2.load, formats.c_export.export)
    print(formats.nothing)  # type: ignore[attr-defined]
    print(kernel_hub.Nothing)  # type: ignore[attr-defined]

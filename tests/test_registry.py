"""The registry: what is shipped by name, architecture and dtype, and what is not."""

from __future__ import annotations

import pytest

from kernel_hub import registry
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import CubinNotFoundError


def test_find_filters_by_arch_and_dtype() -> None:
    archs = {arch for entries in open_collection().manifest.cubins.values() for arch in entries}
    everything = registry.find()
    assert {found.arch for found in everything} == archs
    for arch in archs:
        assert registry.find(arch=arch) == [found for found in everything if found.arch == arch]
    for spelled in ("sm_90", "SM90", "90", "9.0", (9, 0)):
        assert registry.find(arch=spelled) == registry.find(arch="sm90")  # type: ignore[arg-type]
    exact = registry.find(arch="sm_90a")
    assert exact and set(exact) < set(registry.find(arch="sm90"))
    some = registry.find(arch="sm90", dtype="bf16")
    assert some and all("bf16" in found.function.split("_") for found in some)
    assert registry.find(dtype="e5m2") == []  # a dtype there is, of which nothing is shipped yet


def test_find_refuses_what_there_is_not() -> None:
    for arch in ("bogus", "sm75", "", "9"):
        with pytest.raises(CubinNotFoundError, match="sm80, sm89, sm90") as caught:
            registry.find(arch=arch)
        assert f"arch={arch!r}" in str(caught.value)
    for dtype in ("half", "bfloat16", ""):
        with pytest.raises(CubinNotFoundError, match=r"fp16, bf16, fp32, .*int4") as caught:
            registry.find(dtype=dtype)
        assert f"dtype={dtype!r}" in str(caught.value)
    with pytest.raises(CubinNotFoundError):
        registry.find(arch=["sm90"])  # type: ignore[arg-type]


def test_names() -> None:
    assert "rope" in registry and "ropes" not in registry
    assert list(registry) == sorted(registry) and len(list(registry)) == len(registry)
    assert registry.rope is registry["rope"]
    with pytest.raises(CubinNotFoundError, match="rope"):
        registry["ropes"]
    with pytest.raises(AttributeError, match="rope"):
        _ = registry.ropes

"""The registry: what is shipped by name, architecture and dtype, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

import kernel_hub
from kernel_hub import registry
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import CubinNotFoundError, ParamsError


def test_find_filters_by_arch_and_dtype() -> None:
    archs = {arch for entries in open_collection().manifest.cubins.values() for arch in entries}
    everything = registry.find()
    assert {found.arch for found in everything} == archs
    for arch in archs:
        assert registry.find(arch=arch) == [found for found in everything if found.arch == arch]
    for spelled in ("sm_90", "SM90", "90", 90, "9.0", (9, 0)):
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


def test_has_answers_for_an_architecture_and_a_dtype() -> None:
    assert registry.has("rms_norm") and not registry.has("rms_nrm")
    assert registry.has("rms_norm", arch="SM90", dtype="bf16")
    assert not registry.has("rms_norm", arch="75") and not registry.has("rms_norm", dtype="e4m3")
    assert registry.has("linear_sm90", arch="90a") and not registry.has("linear_sm90", arch=(8, 0))
    with pytest.raises(ParamsError, match="no architecture"):
        registry.has("rms_norm", arch="hopper")
    with pytest.raises(ParamsError, match="dtype='half': one of fp16, bf16"):
        registry.has("rms_norm", dtype="half")


def test_a_kernel_is_pinned_by_its_digest() -> None:
    entries = open_collection().manifest.cubins["rms_norm"]
    digest = entries["sm90"].sha256
    assert registry.require("rms_norm") is registry.rms_norm
    for pinned in (digest, digest[:16].upper(), {"sm_90": digest, "80": entries["sm80"].sha256}):
        assert registry.require("rms_norm", sha256=pinned) is registry.rms_norm
    for wrong in (digest[::-1], {"sm80": digest}, {"sm75": digest}):
        with pytest.raises(CubinNotFoundError, match=f"it ships: sm80 .*sm90 {digest}"):
            registry.require("rms_norm", sha256=wrong)
    for odd in (digest[:8], "", "z" * 64, 5):
        with pytest.raises(ParamsError, match="16 to 64 hexadecimal digits"):
            registry.require("rms_norm", sha256=odd)  # type: ignore[arg-type]
    with pytest.raises(CubinNotFoundError, match="ships no cubin 'rms_nrm'"):
        registry.require("rms_nrm", sha256=digest)


@pytest.mark.parametrize("pinned", ["0", "0.1", "0.1.0"])
def test_a_version_that_is_there(pinned: str) -> None:
    assert kernel_hub.__version__ == "0.1.0"
    assert registry.require("rms_norm", version=pinned) is registry.rms_norm


@pytest.mark.parametrize("pinned", ["1", "0.10", "0.1.1", "0.1.0.0", "0.1.0rc1"])
def test_a_version_that_is_not(pinned: str) -> None:
    with pytest.raises(CubinNotFoundError, match=rf"version {pinned} .* 0\.1\.0 is installed"):
        registry.require("rms_norm", version=pinned)


@pytest.mark.parametrize("odd", ["", ">=0.1", "v0.1", "0.1.", 0.1, b"0.1"])
def test_no_version_at_all(odd: Any) -> None:
    with pytest.raises(ParamsError, match="a version or its beginning"):
        registry.require("rms_norm", version=odd)


def test_a_version_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = registry.collection("kernel_hub_of_nobody")
    with pytest.raises(CubinNotFoundError, match="not installed as a package"):
        theirs.require("rms_norm", version="0.1")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.5.1+cu13")
    with pytest.raises(CubinNotFoundError, match=r"2\.5\.1\+cu13 is installed"):
        theirs.require("rms_norm", version="2.4")

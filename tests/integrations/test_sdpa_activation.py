"""The door behind torch's attention is put in place and taken away, whatever else is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import attention  # noqa: E402

from kernel_hub.errors import KernelHubError  # noqa: E402
from kernel_hub.integrations import sdpa  # noqa: E402


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    """Nothing of ours is active behind a test."""
    yield
    assert attention.current_flash_attention_impl() != sdpa.NAME


def order() -> list[int]:
    return list(torch._C._get_sdp_priority_order())


def test_flash_comes_first_and_goes_back() -> None:
    before = order()
    cudnn_first = [3, 1, 2, 0, 4]
    torch._C._set_sdp_priority_order(cudnn_first)
    try:
        sdpa.activate()
        sdpa.activate()
        assert attention.current_flash_attention_impl() == "kernel_hub"
        assert order() == [1, 3, 2, 0, 4]
        assert "kernel_hub for SDPA: active" in str(sdpa.report())
        sdpa.restore()
        assert order() == cudnn_first
        assert attention.current_flash_attention_impl() is None
        sdpa.restore()
        attention.activate_flash_attention_impl("kernel_hub")  # by torch's own name
        torch._C._set_sdp_priority_order(before)
        sdpa.restore()
        assert order() == before, "an order that somebody has set meanwhile stays"
    finally:
        torch._C._set_sdp_priority_order(before)


def test_kernels_go_with_the_handle_that_is_removed() -> None:
    """At once, whoever still holds it."""
    op = "aten::_flash_attention_backward"
    had = torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")
    handle = sdpa._register("CPU")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")
    handle.remove()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU") == had
    handle.remove()


class Other:
    """Another's implementation in torch's registry."""

    active = 0

    def __init__(self) -> None:
        Other.active += 1

    def remove(self) -> None:
        Other.active -= 1


def test_another_implementation_comes_back() -> None:
    attention.register_flash_attention_impl("other", register_fn=Other)
    attention.activate_flash_attention_impl("other")
    try:
        sdpa.activate()
        assert Other.active == 0
        sdpa.restore()
        assert (attention.current_flash_attention_impl(), Other.active) == ("other", 1)
        sdpa.activate()
        attention.activate_flash_attention_impl("other")  # takes ours out
        sdpa.restore()
        assert (attention.current_flash_attention_impl(), Other.active) == ("other", 1)
    finally:
        attention.restore_flash_attention_impl()


def test_an_error_on_the_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attention.register_flash_attention_impl("other", register_fn=Other)
    attention.activate_flash_attention_impl("other")
    before = order()

    def fail(name: str, take: Any, key: str) -> Any:
        if name == "_flash_attention_backward":
            raise ZeroDivisionError
        return take

    monkeypatch.setattr(sdpa, "_door", fail)
    try:
        with pytest.raises(ZeroDivisionError):
            sdpa.activate()
        assert (attention.current_flash_attention_impl(), order()) == ("other", before)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(
            "aten::_flash_attention_forward", "CUDA"
        )
    finally:
        attention.restore_flash_attention_impl()


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(KernelHubError, match=r"expected torch 2\.10 .*register_flash_attention"):
        sdpa.activate()
    assert not sdpa.report().is_active

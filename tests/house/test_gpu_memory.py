"""GPU tests of many processes share a card: what one keeps, and what references take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gpu_memory
import pytest


@pytest.mark.parametrize("reserved, is_emptied", [(0, False), (1 << 30, False), (3 << 30, True)])
def test_much_that_is_kept_is_given_back(reserved: int, is_emptied: bool) -> None:
    emptied: list[bool] = []
    cuda = SimpleNamespace(
        memory_reserved=lambda: reserved, empty_cache=lambda: emptied.append(True)
    )
    gpu_memory.give_back(cuda)
    assert bool(emptied) == is_emptied


def test_the_reference_of_attention_copies_no_key_for_each_head() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils._python_dispatch import TorchDispatchMode

    from kernel_hub.testing.reference_attention import reference_attention

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = op(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                self.numel = max(self.numel, found.untyped_storage().nbytes() // found.itemsize)
            return found

    q, k = torch.randn(1, 2, 71, 128), torch.randn(1, 2000, 1, 128)
    with Largest() as largest:
        out, lse = reference_attention(q, k, k, causal=True)
    assert largest.numel <= max(k.numel(), 71 * 2 * 2000)
    assert out.shape == q.shape and lse.shape == (1, 71, 2)
    for head in (0, 70):
        alone, _ = reference_attention(q[:, :, [head]], k, k, causal=True)
        torch.testing.assert_close(alone[0, :, 0], out[0, :, head], rtol=1e-12, atol=1e-12)

"""`kernel-hub bench OP` on the CPU: each op there is, held against torch; the clock is replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernel_hub import KernelHubError, ops  # noqa: E402
from kernel_hub.measure import beside  # noqa: E402
from kernel_hub.measure.beside_ops import OPS  # noqa: E402

SMALL = {
    "tokens": 12, "hidden": 64, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 64,
    "batch": 2, "seqlen": 9, "page": 4, "m": 7, "n": 32, "k": 64, "groups": 3,
    "experts": 8, "top_k": 2, "vocabulary": 40, "pairs": 3, "drafts": 2,
}  # fmt: skip


class Clock:
    """Runs each launch once and gives a made-up time."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(
        self, contenders: Mapping[str, Sequence[Callable[[], object]]], num_bytes: int
    ) -> dict[str, list[float]]:
        self.num_bytes = num_bytes
        for launches in contenders.values():
            assert len(launches) == 2
            for launch in launches:
                launch()
        return {name: [10.0, 20.0, 30.0] for name in contenders}


def measured(op: str, dtype: str = "bf16", against: str = "torch") -> tuple[Any, list[str]]:
    sizes = {name: SMALL[name] for name in OPS[op].sizes}
    told: list[str] = []
    peers = beside.peers_of(op, against)
    return beside.measure(op, sizes, dtype, peers, Clock(), told.append, "cpu"), told


def test_every_op_has_peers() -> None:
    assert set(OPS) == set(ops.__all__)


@pytest.mark.parametrize("op", sorted(OPS))
def test_an_op_beside_torch(op: str) -> None:
    torch.manual_seed(0)
    rows, told = measured(op)
    assert told == ["kernel_hub", "torch"]
    assert [(row.contender, row.median, row.ratio) for row in rows] == [
        ("kernel_hub", 20.0, 1.0), ("torch", 20.0, 1.0),
    ]  # fmt: skip
    assert not [row.note for row in rows if not row.note.endswith(("TB/s", "TFLOP/s"))]
    assert all(
        f"{name}={size}" in rows[0].case for name, size in SMALL.items() if name in OPS[op].sizes
    )


def test_what_is_wrong_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "rms_norm", lambda x, weight: 1.5 * x)
    rows, _ = measured("rms_norm")
    assert rows[0].note.startswith("WRONG: kernel_hub: largest error")
    assert "WRONG" not in rows[1].note


def test_a_peer_that_is_not_there_is_named() -> None:
    rows, told = measured("rms_norm", "fp32", "flashinfer,torch")
    if any(row.contender == "flashinfer" for row in rows):
        pytest.skip("flashinfer is installed")
    assert told[1].startswith("without flashinfer: ModuleNotFoundError")


def test_an_op_that_refuses_ends_it() -> None:
    with pytest.raises(KernelHubError, match="dtype"):
        measured("swiglu_linear", "fp32")


@pytest.mark.parametrize("text", ["rows=3", "tokens", "tokens=0", "tokens=-1", "tokens=1e3"])
def test_sizes_that_there_are_not(text: str) -> None:
    with pytest.raises(KernelHubError, match="rms_norm has tokens=8192,hidden=4096"):
        beside.sizes_of("rms_norm", text)


def test_sizes_and_peers() -> None:
    assert beside.sizes_of("rms_norm", "tokens=3, ") == {"tokens": 3, "hidden": 4096}
    assert beside.peers_of("rms_norm", None) == ["torch", "compile", "liger", "flashinfer"]
    with pytest.raises(KernelHubError, match=f"no op 'rms'; there are {min(OPS)}, "):
        beside.sizes_of("rms", "")
    with pytest.raises(KernelHubError, match="cudnn: rms_norm can be held against torch, compile"):
        beside.peers_of("rms_norm", "torch,cudnn")

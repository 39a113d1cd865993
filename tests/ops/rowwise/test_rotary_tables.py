"""Makers of rotation tables: formulas in fp64, several axes, refusals by name.

That they are transformers' own to the last bit is held by tests/integrations.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bits import same_bits

from kernel_hub.errors import TensorError
from kernel_hub.ops import rope, rotary

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
    "original_max_position_embeddings": 32768,
}  # fmt: skip
PLAIN = {"rope_theta": 10000.0}


def exact(theta: float, rotary_dim: int) -> torch.Tensor:
    return theta ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)


def test_plain_and_part_of_the_head() -> None:
    close(rotary.frequencies(PLAIN, 128).inv_freq, exact(1e4, 128))
    close(
        rotary.frequencies({**PLAIN, "partial_rotary_factor": 0.25}, 128).inv_freq, exact(1e4, 32)
    )
    linear = {**PLAIN, "type": "linear", "factor": 4.0}
    close(rotary.frequencies(linear, 64).inv_freq, exact(1e4, 64) / 4)
    kept = {**PLAIN, "rope_type": "proportional", "partial_rotary_factor": 0.5}
    close(rotary.frequencies(kept, 64).inv_freq[:16], exact(1e4, 64)[:16])
    assert not rotary.frequencies(kept, 64).inv_freq[16:].any()


def test_long_wavelengths_are_stretched_and_short_ones_kept() -> None:
    for parameters in (LLAMA3, YARN):
        found = rotary.frequencies(parameters, 128).inv_freq.double()
        plain = exact(parameters["rope_theta"], 128)
        ratio = plain / found
        close(ratio[:10], torch.ones(10))
        close(ratio[-5:], torch.full((5,), parameters["factor"]))
        assert bool((ratio.diff() >= -1e-5).all())
    assert rotary.frequencies(YARN, 128).attention_factor == pytest.approx(1.138629436)


def test_longer_sequences_turn_slower() -> None:
    dynamic = {**PLAIN, "rope_type": "dynamic", "factor": 2.0}
    made = [
        rotary.frequencies(dynamic, 64, max_position_embeddings=2048, seqlen=seqlen).inv_freq
        for seqlen in (None, 2048, 4096, 8192)
    ]
    same_bits(made[0], made[1])
    close(made[0], exact(1e4, 64))
    close(made[2], exact(1e4 * 3 ** (64 / 62), 64))
    assert bool((made[3][1:] < made[2][1:]).all())
    lists = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    longrope = {**PLAIN, "rope_type": "su", **lists, "original_max_position_embeddings": 4096}
    for seqlen, divisor in ((None, 1), (4096, 1), (4097, 4)):
        found = rotary.frequencies(longrope, 64, max_position_embeddings=131072, seqlen=seqlen)
        close(found.inv_freq, exact(1e4, 64) / divisor)
        assert found.attention_factor == pytest.approx(1.190238)


def test_a_row_a_token_is_the_row_of_its_position() -> None:
    found = rotary.frequencies(YARN, 64)
    positions = torch.tensor([[0, 3, 7], [2, 2, 9]])
    cos, sin = rotary.tables(found, 10, dtype=torch.bfloat16)
    own_cos, own_sin = rotary.embeddings(found, positions, dtype=torch.bfloat16)
    same_bits(own_cos, cos[positions].repeat(1, 1, 2))
    same_bits(own_sin, sin[positions].repeat(1, 1, 2))
    q, k = torch.randn(2, 3, 4, 64).bfloat16(), torch.randn(2, 3, 1, 64).bfloat16()
    for by_row, by_position in zip(
        rope(q, k, own_cos, own_sin), rope(q, k, cos, sin, positions), strict=True
    ):
        same_bits(by_row, by_position)


@pytest.mark.parametrize("interleaved", [False, True])
def test_several_axes(interleaved: bool) -> None:
    found, sections = rotary.frequencies(PLAIN, 32), (6, 5, 5)
    positions = torch.randint(0, 99, (3, 2, 7))
    options: dict[str, Any] = {"mrope_section": sections, "mrope_interleaved": interleaved}
    # The same position on all axes is one axis.
    for axes, one in zip(
        rotary.embeddings(found, positions[:1].expand(3, -1, -1), **options),
        rotary.embeddings(found, positions[0]),
        strict=True,
    ):
        same_bits(axes, one)
    cos, _ = rotary.embeddings(found, positions, **options)
    alone = [rotary.embeddings(found, one)[0] for one in positions]
    first = [0, 1, 2] * 5 + [0] if interleaved else [0] * 6 + [1] * 5 + [2] * 5
    for pair, axis in enumerate(first):
        same_bits(cos[..., pair], alone[axis][..., pair])
        same_bits(cos[..., 16 + pair], alone[axis][..., pair])


def config_of(**more: Any) -> Any:
    return SimpleNamespace(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, **more
    )


def test_configurations_of_both_kinds() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = config_of(rope_theta=500000.0, rope_scaling=scaling)
    close(rotary.frequencies_of(old).inv_freq, rotary.frequencies(LLAMA3, 64).inv_freq)
    close(
        rotary.frequencies_of(config_of(rope_theta=1e4, rope_scaling=None)).inv_freq, exact(1e4, 64)
    )
    layers = {"sliding_attention": PLAIN, "full_attention": LLAMA3}
    new = config_of(rope_parameters=layers)
    found = rotary.frequencies_of(new, layer_type="sliding_attention")
    close(found.inv_freq, exact(1e4, 64))
    with pytest.raises(TensorError, match=r"layer_type: .*'full_attention', found 'none'"):
        rotary.frequencies_of(new, layer_type="none")


FREQUENCIES = rotary.frequencies(PLAIN, 32)
POSITIONS = torch.zeros(2, 5, dtype=torch.int64)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: rotary.frequencies([], 64), r"parameters: expected a mapping, found \[\]"),
    (lambda: rotary.frequencies({**PLAIN, "rope_type": "own"}, 64), r"rope_type: .*found 'own'"),
    (lambda: rotary.frequencies({}, 64), r"rope_theta: expected a number, found NoneType"),
    (lambda: rotary.frequencies({**PLAIN, "type": "linear"}, 64), r"factor: expected a number"),
    (lambda: rotary.frequencies(PLAIN, 1), r"head_dim: expected at least 2"),
    (lambda: rotary.frequencies({**PLAIN, "type": "dynamic", "factor": 2}, 64),
     r"max_position_embeddings: expected a whole number, found None"),
    (lambda: rotary.frequencies({**PLAIN, "type": "longrope", "factor": 2.0,
                                 "original_max_position_embeddings": 8}, 64),
     r"short_factor: expected 32 numbers, one a pair, found None"),
    (lambda: rotary.tables(FREQUENCIES, -1), r"max_position: expected at least 0"),
    (lambda: rotary.embeddings(FREQUENCIES, POSITIONS[0]), r"positions: .* \(batch, seqlen\), or"),
    (lambda: rotary.embeddings(FREQUENCIES, POSITIONS, mrope_section=(4, 6, 6)), r"num_axes"),
    (lambda: rotary.embeddings(FREQUENCIES, POSITIONS.expand(3, 2, 5), mrope_section=(4, 6, 7)),
     r"mrope_section: expected 3 numbers, .* together 16 .*found \(4, 6, 7\)"),
]  # fmt: skip


@pytest.mark.parametrize("call, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(TensorError, match=text):
        call()

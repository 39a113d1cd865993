"""Numbers of e4m3 and int8 against what they were rounded from."""

from __future__ import annotations

import torch


def check_quantised(
    out: torch.Tensor, scale: torch.Tensor, truth: torch.Tensor, largest: torch.Tensor,
    slack: float = 0.0,
) -> None:  # fmt: skip
    """Each number is the nearest of its grid, but for fp32's error before it is rounded.

    scale and largest, the largest magnitude of what has one scale, are broadcast to truth. slack:
    how far what is rounded may be from truth besides.
    """
    most, least = (448.0, 2.0**-6) if out.dtype == torch.float8_e4m3fn else (127.0, 0.0)
    largest, scale = largest.double().clamp_min(1e-12), scale.double()
    assert bool(((scale * most - largest).abs() <= 2e-5 * largest + slack).all())
    error = (out.double() * scale - truth).abs()
    # Half a step: e4m3 has 3 bits behind the first, and steps of 2^-9 below 2^-6.
    step = torch.ones_like(truth)
    if out.dtype == torch.float8_e4m3fn:
        step = torch.exp2(torch.floor(torch.log2((truth.abs() / scale).clamp_min(least)))) / 8
    assert bool((error <= scale * step * 0.5 + 3e-5 * largest + slack).all())


def check_quantised_rows(
    out: torch.Tensor, scale: torch.Tensor, truth: torch.Tensor, slack: float = 0.0
) -> None:
    """The same with a scale a row."""
    largest = truth.abs().amax(-1, keepdim=True)
    check_quantised(out, scale[..., None], truth, largest, slack)

"""sample by clusters of rows that are held and drawn from all they keep."""

from __future__ import annotations

import math

import pytest
import torch
from sample_cases import check, more, op
from ways import Way

from kernel_hub.ops import sample


@pytest.mark.parametrize("team", [1, 2, 4, 8, 16])
def test_rows_drawn_whole(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, team: int) -> None:
    """Of top_p and min_p alone: peaked, flat, tied, few and many of them; what changes them."""
    monkeypatch.setattr(op, "choose_team", lambda *_: team)
    size = 700 * team + 12
    row = hopper_way.randn(size).cpu()
    ties = (row * 4).round() / 4
    two = torch.where(row > 0.5, 1.0, 0.0)
    peak = row / 10
    peak[size // 2] = 9.0
    last = row.clone()
    last[: size - 3] = -torch.inf
    deep = row * 30
    rows = torch.stack(
        [row * 3, row, row / 50, ties, two, peak, last, deep, row * 1e36, row + 50, row * 0]
    )
    num = len(rows)
    for p, m in ((0.9, 0.0), (0.5, 0.0), (0.999, 0.0), (1.0, 0.0), (1.0, 0.1), (0.8, 0.02)):
        given = {
            "top_p": torch.full((num,), p), "min_p": torch.full((num,), m),
            "seed": torch.arange(num), "temperature": torch.full((num,), 0.8),
        }  # fmt: skip
        check(hopper_way, rows, **given)
        if p == 0.9:
            check(hopper_way, rows, **given, **more(num, size))


@pytest.mark.parametrize("size", [2060, 40000])
def test_of_cold_rows_all_that_weighs_is_held(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Though it be a few floats below the largest, and hardly above what weighs nothing."""
    monkeypatch.setattr(op, "choose_team", lambda *_: 4)
    row = torch.full((size,), 1.5).nextafter(torch.tensor(-torch.inf))
    row[size // 2] = 1.5
    below = 2.0**-23 * torch.tensor([1.1, 1.3, 1.49, 1.6, 3.4])  # what weighs 2^-40.25
    rows = row.expand(len(below), -1).contiguous()
    given = {"temperature": below * (math.log2(math.e) / 40.25), "seed": torch.arange(len(below))}
    check(hopper_way, rows, **given)
    check(hopper_way, rows, **given, top_p=torch.full((len(below),), 1 - 2.0**-20))
    # What weighs nothing is below all floats.
    check(
        hopper_way, -3.4e38 + 1e37 * (rows == 1.5), temperature=0 * below + 1e37, seed=given["seed"]
    )


def test_a_row_that_wants_no_top_has_none(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that do, though it is drawn whole."""
    monkeypatch.setattr(op, "choose_team", lambda *_: 2)
    ids = torch.full((3, 4), 7, device=hopper_way.device)
    logprobs = torch.zeros((3, 4), device=hopper_way.device)
    sample(
        hopper_way.randn(3, 1400), top_n=torch.tensor([0, 2, -1], dtype=torch.int32).to(ids.device),
        out_top_ids=ids, out_top_logprobs=logprobs,
    )  # fmt: skip
    assert (ids < 0).sum(1).tolist() == (logprobs == -torch.inf).sum(1).tolist() == [4, 2, 4]


def test_teams_of_an_h200() -> None:
    for batch, size, team in (
        (1, 128256, 16), (4, 128256, 16), (5, 128256, 8), (1, 65535, 8), (1, 300000, 16),
        (13, 128256, 8), (14, 128256, 4), (66, 128256, 2), (67, 128256, 1),
    ):  # fmt: skip
        assert op.choose_team(batch, size, 132) == team
    assert op.choose_team(1, 128256, 114) == 8

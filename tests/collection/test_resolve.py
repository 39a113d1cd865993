"""The resolver: which target runs where, and why the others fall."""

from __future__ import annotations

import pytest

from kernel_hub.collection.resolve import (
    Candidate,
    names_target,
    not_found,
    parse_target,
    refusal,
    resolve,
)
from kernel_hub.errors import CubinNotFoundError

SHIPPED = [Candidate("sm80", "sm_80"), Candidate("sm89", "sm_89"), Candidate("sm90", "sm_90")]


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 7), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
    ],
)
def test_each_gpu_gets_its_nearest_target(capability: tuple[int, int], target: str) -> None:
    found = resolve(capability, SHIPPED)
    assert found.chosen is not None
    assert found.chosen.target == target
    assert set(found.rejected) == {c.target for c in SHIPPED} - {target}


def test_ada_falls_back_to_sm80_and_hopper_takes_the_arch_specific_one() -> None:
    ada = resolve((8, 9), [SHIPPED[0], SHIPPED[2]])
    assert ada.chosen == SHIPPED[0]
    specific = Candidate("sm90", "sm_90a")
    assert resolve((9, 0), [SHIPPED[2], specific]).chosen == specific
    assert resolve((9, 0), [specific]).chosen == specific


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (10, 0), (10, 3), (12, 0)])
def test_other_gpus_are_refused_with_every_reason(capability: tuple[int, int]) -> None:
    found = resolve(capability, [*SHIPPED, Candidate("sm90", "sm_90a")])
    assert found.chosen is None
    assert set(found.rejected) == {"sm_80", "sm_89", "sm_90", "sm_90a"}
    error = not_found("cubin 'x'", capability, found.rejected, build="./build_cubins.sh --arch …")
    assert isinstance(error, CubinNotFoundError)
    for target in found.rejected:
        assert target in str(error)
    assert "./build_cubins.sh" in str(error)
    assert f"{capability[0]}.{capability[1]}" in str(error)


def test_reasons_name_what_the_target_needs() -> None:
    assert "8.9 or later" in str(refusal((8, 6), "sm_89"))
    assert "9.x only" in str(refusal((8, 9), "sm_90"))
    assert "exactly 9.0" in str(refusal((9, 1), "sm_90a"))
    assert refusal((9, 0), "sm_90a") is None
    assert parse_target("sm_120a") == (12, 0, "a")
    with pytest.raises(ValueError, match="no target"):
        parse_target("compute_90")


def test_names_of_a_target() -> None:
    for asked in ("sm90", "sm90a"):
        assert names_target(asked, "sm_90a")
    assert not names_target("sm90a", "sm_90")
    assert not any(names_target(asked, "sm_90") for asked in ("", "sm9", "sm900", "sm"))

"""The numeric rule: at most twice the error of torch's own arithmetic in the tensor's dtype.

max|out - truth| <= 2 * max|own - truth| + atol, once nan and inf stand at the same places
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Comparison:
    """The verdict, and the numbers behind it."""

    ok: bool
    error: float
    limit: float
    message: str


def compare(
    out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor, *, atol: float | None = None,
    name: str = "out",
) -> Comparison:  # fmt: skip
    """Hold `out` against `truth` (fp64), with `own`, the reference in the dtype of out, as budget.

    atol: None is one unit in the last place of the largest truth. Where `own` overflows and the
    truth does not, it gives no budget.
    """
    if out.shape != truth.shape:
        return _failed(name, f"shape {tuple(out.shape)}, expected {tuple(truth.shape)}")
    if out.numel() == 0:
        return Comparison(True, 0.0, 0.0, f"{name}: empty")
    found, expected = out.double(), truth.double()
    rounded = expected.to(out.dtype).double()  # a truth beyond the dtype's range is inf in it
    for kind, test in (("nan", torch.isnan), ("inf", torch.isinf)):
        differs = test(found) != test(rounded)
        if kind == "inf":
            differs |= test(found) & (found != rounded)
        if bool(differs.any()):
            where = _index(differs.flatten().nonzero()[0].item(), out.shape)
            count = int(differs.sum())
            return _failed(
                name,
                f"{kind} differs at {count} of {out.numel()} places, first {where}: found "
                f"{found[where].item()}, expected {rounded[where].item()}",
            )
    finite = torch.isfinite(rounded)
    distance = torch.where(finite, (found - expected).abs(), 0.0)
    own_distance = torch.where(finite, (own.to(out.dtype).double() - expected).abs(), 0.0)
    budget = float(torch.where(torch.isfinite(own_distance), own_distance, 0.0).max())
    if atol is None:
        largest = float(torch.where(finite, expected.abs(), 0.0).max())
        atol = torch.finfo(out.dtype).eps * largest + torch.finfo(out.dtype).tiny
    limit = 2 * budget + atol
    worst = _index(int(distance.argmax()), out.shape)
    error = float(distance.max())
    message = (
        f"{name}: largest error {error:.3g} at {worst} (found {found[worst].item():.9g}, expected "
        f"{expected[worst].item():.9g}), limit {limit:.3g} = 2 x {budget:.3g} + {atol:.3g}"
    )
    return Comparison(error <= limit, error, limit, message)


def product_atol(truth: torch.Tensor, dtype: torch.dtype, k: int) -> float | None:
    """`atol` of a product by tensor cores: they cut fp32 sums off where torch's fp32 rounds them.

    k: products in a sum. A step of 16 of them loses half a unit in the last place on average,
    always towards 0, of sums that grow. None, `compare`'s own, where the result is rounded to fewer
    bits.
    """
    if dtype != torch.float32 or truth.numel() == 0:
        return None
    return (2.0**-18 + k / 16 * 2.0**-25) * float(truth.abs().max())


def parts_atol(a: torch.Tensor, b: torch.Tensor) -> float:
    """`atol` of a b^T in fp32 by tensor cores, in parts of 11 bits (csrc/include/kernel_hub/
    three_products.cuh): a product lacks up to 2^-21 of itself, products in a sum either way.
    """
    squares = a.double().square() @ b.double().square().mT
    return 2.0**-21 * float(squares.max().sqrt()) if squares.numel() else 0.0


def attention_parts_atol(
    truth: torch.Tensor, dtype: torch.dtype, softcap: float = 0.0
) -> float | None:
    """`atol` of attention in fp32 by tensor cores, in parts as above: scores and weights lack up to
    2^-21 of what they sum, and a capped score is right to 1e-7 of the cap.

    None, `compare`'s own, in other dtypes.
    """
    if dtype != torch.float32:
        return None
    largest = float(truth.nan_to_num().abs().max()) if truth.numel() else 0.0
    return largest * (torch.finfo(dtype).eps + 2.0**-20 + 1e-7 * softcap)


def check(
    out: torch.Tensor, truth: torch.Tensor, own: torch.Tensor, *, atol: float | None = None,
    name: str = "out",
) -> Comparison:  # fmt: skip
    """`compare`, raising AssertionError with its message where the rule is broken."""
    result = compare(out, truth, own, atol=atol, name=name)
    if not result.ok:
        raise AssertionError(result.message)
    return result


def _failed(name: str, text: str) -> Comparison:
    return Comparison(False, float("inf"), 0.0, f"{name}: {text}")


def _index(flat: float, shape: torch.Size) -> tuple[int, ...]:
    place = []
    rest = int(flat)
    for size in reversed(shape):
        place.append(rest % size)
        rest //= size
    return tuple(reversed(place))

"""What a demo's row says: how far an op is off, how long it takes, and how near to the card's roof.

Knows neither torch nor NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Result:
    """The largest error beside what is allowed, and on a GPU the median time.

    `bound` names the roof that the op is nearer to, "copy" or "matrix": the share of the other one
    says little.
    """

    op: str
    shape: str
    dtype: str
    ok: bool
    error: float
    limit: float
    message: str
    time_us: float | None = None
    terabytes_per_s: float | None = None
    share_of_copy: float | None = None
    teraflops: float | None = None
    share_of_matrix: float | None = None
    bound: str | None = None


@dataclass(frozen=True)
class Roofs:
    """What the card was measured to do: copies in TB/s (read plus written), matrix TFLOP/s a dtype.

    A dtype without a figure has none that could be measured here.
    """

    copy: float
    matrix: dict[str, float]

    def rated(self, result: Result, num_bytes: int, num_flops: int, time_us: float) -> Result:
        """`result` with its time and rates.

        num_bytes: what the op reads and writes at least. num_flops: of its matrix products, 0 for
        ops that have none. Without a matrix roof for the dtype, an op with 100 operations a byte
        or more counts as bound by the matrix units: every card with tensor cores needs more.
        """
        terabytes_per_s = num_bytes / time_us / 1e6
        share_of_copy = terabytes_per_s / self.copy
        result = replace(
            result,
            time_us=time_us,
            terabytes_per_s=terabytes_per_s,
            share_of_copy=share_of_copy,
            bound="copy",
        )
        if not num_flops:
            return result
        teraflops = num_flops / time_us / 1e6
        roof = self.matrix.get(result.dtype)
        share = teraflops / roof if roof else None
        is_matrix = num_flops >= 100 * num_bytes if share is None else share > share_of_copy
        return replace(
            result,
            teraflops=teraflops,
            share_of_matrix=share,
            bound="matrix" if is_matrix else "copy",
        )

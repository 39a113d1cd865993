"""Launch shapes of rows that registers hold: which kernel, threads a row, rows a block."""

from __future__ import annotations

from typing import NamedTuple

# Threads of a multiprocessor that few rows have at most; vectors of rows that a warp takes alone;
# of those that registers hold.
_AT_ONCE, _NARROW, _HELD = 1024, 64, 4 * 1024
# As _AT_ONCE: of quantised rows, of threads that have two vectors each.
_QUANTISED_AT_ONCE, _HALVES_AT_ONCE = 768, 1280
# Elements of a thread that are asked for at once, of rows without vectors.
_RUN = 8
# Vectors of wide rows, of many rows together.
_WIDE, _MANY_VECS = 128, 600_000


def scalar_choice(size: int) -> tuple[str, int, int]:
    """(variant, threads a row, rows a block) for rows that 16-byte vectors do not fit: a run of
    elements a thread, more where a block would be too large.
    """
    threads = min(1024, 32 * -(-size // (32 * _RUN)))
    return "scalar", threads, max(1, 128 // threads)


def choose(
    vecs: int, rows: int, has_residual: bool, batch_invariant: bool = False, num_sms: int = 0
) -> tuple[str, int, int]:
    """(variant, threads a row, rows a block) for rows of `vecs` 16-byte vectors.

    batch_invariant: the threads of a row are those of few rows.

    Measured on an H200 (docs/notes/rms_norm.md): few rows want every load of a row in flight at
    once, many rows want four vectors a thread and two rows a block. Rows of one vector a thread
    that all run at once are few.
    """
    if vecs <= 32:
        threads = 1 << (vecs - 1).bit_length()
        return "vec1", threads, 128 // threads
    if vecs > _HELD:
        return "loop", 512, 1
    few = is_few(vecs, rows, num_sms)
    if batch_invariant or few:
        widest = (256, 1024)
    elif has_residual:
        widest = (128, 640 if rows > 4096 and vecs % 512 else 128)
    else:
        widest = (32, 1024 if vecs % 512 else 512 if rows <= 4096 else 256)
    per_thread = 1 if vecs <= widest[0] else 2 if vecs <= widest[1] else 4
    threads = 32 * -(-vecs // (32 * per_thread))
    several = not few and (
        threads <= 64
        or (threads == 128 and per_thread != 2)
        or (threads == 256 and per_thread == 4 and rows > (4096 if has_residual else 16384))
    )
    return f"vec{per_thread}", threads, max(2, 128 // threads) if several else 1


class Joined(NamedTuple):
    """What of a norm decides its launch, beside sizes.

    waits: a row has two sums, or its results wait for their largest.
    """

    waits: bool
    is_quantised: bool
    has_residual: bool
    adds_after: bool


def choose_joined(
    vecs: int, rows: int, joined: Joined, batch_invariant: bool, num_sms: int
) -> tuple[str, int, int]:
    """As `choose`, for kernels with something joined to a norm.

    Measured on an H100 (docs/notes/layer_norm.md): a vector a thread, whose factors are asked for
    with the row, where all rows run at once or a residual is read; four of a wide row alone where
    not even half as many threads do, or from some 10 MB on.
    """
    threads, half = 32 * -(-vecs // 32), 32 * -(-vecs // 64)
    if not batch_invariant and _NARROW < vecs <= _HELD:
        at_once = _QUANTISED_AT_ONCE if joined.is_quantised else _AT_ONCE
        if threads <= 1024 and (
            rows * threads <= at_once * num_sms
            or (joined.has_residual and not joined.is_quantised and _is_some(vecs, rows, joined))
        ):
            return "vec1", threads, 1
        is_wide = vecs > _WIDE and (
            rows * vecs >= 2 * _MANY_VECS
            or (joined.waits and rows * half > _HALVES_AT_ONCE * num_sms)
        )
        is_narrow = vecs <= _WIDE and (rows * vecs >= _MANY_VECS or not joined.is_quantised)
        if not joined.has_residual and (is_wide or is_narrow):
            threads = 32 * -(-vecs // 128)
            return "vec4", threads, 4 if threads == 32 else 1
    variant, threads, rows_a_block = choose(
        vecs, rows, joined.has_residual, batch_invariant, num_sms
    )
    return variant, threads, 1 if threads > 64 else rows_a_block


def _is_some(vecs: int, rows: int, joined: Joined) -> bool:
    """Rows that are neither many nor, where a residual is added before, long."""
    return rows <= 4096 and (vecs <= 640 or joined.adds_after)


def is_few(vecs: int, rows: int, num_sms: int) -> bool:
    """Whether rows of `vecs` vectors do not fill the GPU, a vector a thread."""
    return rows <= 256 or (
        _NARROW < vecs <= 256 and rows * 32 * -(-vecs // 32) <= _AT_ONCE * num_sms
    )

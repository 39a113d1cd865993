"""Draws cases of matrix products: a seed, a family and a number make one, whatever else is drawn.

Knows no torch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from .models import MIXTURES, MODELS, WAYS, expert_weights_of, heads_of, weights_of

MOST_TOKENS = 8192
SHARE_WITH_OPTIONS = 1 / 3
BIAS, RESIDUAL, FP32, WIDE, TALL, OFF_64 = (
    "bias", "residual", "fp32", "wide rows", "tall rows", "k off 64",
)  # fmt: skip
_ROWS = (WIDE, TALL)  # columns of a wider buffer, the first rows of a taller one
_ALL = (BIAS, RESIDUAL, FP32, *_ROWS, OFF_64)
# family -> the options that a third of its cases has one or two of
OPTIONS = {
    "linear": _ALL,
    "linear_fp8_fast": _ALL,
    "linear_fp8": _ALL,
    "linear_fp8_blocks": _ALL,
    "qkv_linear": (BIAS, *_ROWS, OFF_64),
    "swiglu_linear": (*_ROWS, OFF_64),
    "epilogues": (*_ROWS, OFF_64),
    "grouped_linear": (BIAS, FP32, *_ROWS, OFF_64),
    "batched_matmul": (FP32, WIDE, OFF_64),
}
FP8 = ("linear_fp8_fast", "linear_fp8", "linear_fp8_blocks")
EPILOGUES = (
    "bias", "bias gelu", "bias silu", "bias relu", "gelu", "silu", "residual", "bias residual",
    "residual in place",
)  # fmt: skip
# Products of a head in attention: (kind, n or 0, k or 0), 0 for the length of a sequence.
_BATCHES = (("q latent", 512, 128), ("latent v", 128, 512), ("q k", 0, 128), ("q k", 0, 64),
            ("p v", 128, 0), ("p v", 64, 0))  # fmt: skip
_MOST_SCORES = 1 << 28


@dataclass(frozen=True)
class Lot:
    """One case: out (m, n) = a (m, k) b (n, k)^T, of `num_products` where there are many.

    m: tokens; of grouped products each takes num_chosen experts. n: rows of b, of gate and up
    together. kind: scales of fp8 ('row', 'tensor', 'block'), the epilogue, where keys and values
    go ('paged', 'apart'), which product of attention. heads: of queries, of keys, and head_dim.
    """

    family: str
    number: int
    layer: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    options: tuple[str, ...] = ()
    kind: str = ""
    num_products: int = 1
    num_chosen: int = 1
    heads: tuple[int, int, int] = (0, 0, 0)
    has_rope: bool = False

    @property
    def name(self) -> str:
        """Of the row; the number is the one that draws it again. A case of no layer has none."""
        lead = f"{self.number}: {self.layer} " if self.layer else ""
        many = f"{self.num_products} x " if self.num_products > 1 else ""
        words = ", ".join(word for word in (self.kind, *self.options) if word)
        sizes = f"{many}{self.n}x{self.k} m{self.m} {self.dtype}"
        return f"{lead}{sizes}" + (f", {words}" if words else "")

    @property
    def is_grouped(self) -> bool:
        """Whether m is of all products together."""
        return self.family == "grouped_linear"

    @property
    def rows(self) -> int:
        """Rows of all products together."""
        return self.m * (self.num_chosen if self.is_grouped else self.num_products)

    @property
    def num_flops(self) -> int:
        """Twice the multiplications."""
        return 2 * self.rows * self.n * self.k

    @property
    def num_bytes(self) -> int:
        """Read and written at least; of experts, those that have rows at most."""
        weights = min(self.num_products, self.rows) * self.n * self.k
        element_bytes = 1 if self.family in FP8 else 2
        out_bytes = 4 if FP32 in self.options else 2
        out_columns = self.n // 2 if self.family == "swiglu_linear" else self.n
        return element_bytes * (self.rows * self.k + weights) + out_bytes * self.rows * out_columns

    @property
    def is_matrix_bound(self) -> bool:
        """Whether clocks fall under longer load."""
        return self.num_flops > 150 * self.num_bytes

    @property
    def expected_us(self) -> float:
        """About, on an H200."""
        rate = 1200e6 if self.family in FP8 else 700e6
        return 2 + max(self.num_flops / rate, self.num_bytes / 4.2e6)


def step_of(family: str) -> int:
    """What k is a multiple of."""
    return 16 if family in FP8 else 8


def tokens(lots: random.Random, most: int = MOST_TOKENS) -> int:
    """Log-uniform in 1 .. most; odd ones more than half of the time, whole eights seldom."""
    found = round(math.exp(lots.uniform(0, math.log(most))))
    chance = lots.random()
    if chance < 0.3:
        return min(most, found | 1)
    return min(most, -(-found // 8) * 8) if chance > 0.9 else found


def draw(family: str, seed: int, number: int) -> Lot:
    """The case `number` of a family under a seed."""
    lots = random.Random(f"{seed} {family} {number}")
    if family == "grouped_linear":
        found = _grouped(lots, number)
    elif family == "batched_matmul":
        found = _batched(lots, number)
    else:
        found = _dense(lots, family, number)
    if lots.random() >= SHARE_WITH_OPTIONS:
        return found
    chosen = lots.sample(OPTIONS[family], lots.choice((1, 1, 2)))
    if WIDE in chosen and TALL in chosen:
        chosen.remove(TALL)
    if OFF_64 in chosen:
        found = replace(found, k=_off_64(lots, found.k, step_of(family)))
    return replace(found, options=tuple(x for x in OPTIONS[family] if x in chosen))


def _off_64(lots: random.Random, k: int, step: int) -> int:
    return k if k % 64 else k - step * lots.randrange(1, 64 // step)


def _dtype(lots: random.Random) -> str:
    return "fp16" if lots.random() < 0.2 else "bf16"


def _dense(lots: random.Random, family: str, number: int) -> Lot:
    """One weight of one slice of one model; models that have no such weight are drawn again."""
    wanted = {"qkv_linear": " qkv", "swiglu_linear": " gate_up"}.get(family, "")
    while True:
        model, ways = lots.choice(MODELS), lots.choice(WAYS)
        fitting = [
            weight
            for weight in weights_of(model, ways)
            if weight.name.endswith(wanted) and not weight.k % step_of(family)
        ]
        if fitting and not (family == "qkv_linear" and model.head_dim % 32):
            break
    weight = lots.choice(fitting)
    is_vocab = weight.name.endswith(" vocab")  # of the last token of each sequence
    m = tokens(lots, 512 if is_vocab else MOST_TOKENS)
    found = Lot(family, number, weight.name, m, weight.n, weight.k)
    if family in FP8:
        blocks = family == "linear_fp8_blocks"
        return replace(found, dtype="e4m3", kind="block" if blocks else _scales(lots))
    found = replace(found, dtype=_dtype(lots))
    if family == "epilogues":
        return replace(found, kind=lots.choice(EPILOGUES))
    if family == "qkv_linear":
        heads = heads_of(model, ways)
        assert heads is not None
        kind = "paged" if lots.random() < 0.8 else "apart"
        return replace(found, heads=(*heads, model.head_dim), has_rope=model.has_rope, kind=kind)
    return found


def _scales(lots: random.Random) -> str:
    return lots.choice(("row", "tensor"))


def _grouped(lots: random.Random, number: int) -> Lot:
    while True:
        mixture, ways = lots.choice(MIXTURES), lots.choice(WAYS)
        fitting = [x for x in expert_weights_of(mixture, ways) if not x.k % 8]
        if fitting:
            break
    weight = lots.choice(fitting)
    return Lot(
        "grouped_linear", number, weight.name, tokens(lots), weight.n, weight.k, _dtype(lots),
        num_products=mixture.num_experts, num_chosen=mixture.num_chosen,
    )  # fmt: skip


def _batched(lots: random.Random, number: int) -> Lot:
    """A product a head: latent attention's, or scores and values of plain attention."""
    kind, n, k = lots.choice(_BATCHES)
    if n and k:
        heads = lots.choice((16, 32, 64, 128))
        m = tokens(lots, 4096)
        return Lot("batched_matmul", number, f"{heads} heads", m, n, k, _dtype(lots),
                   kind=kind, num_products=heads)  # fmt: skip
    heads, sequences = lots.choice((8, 12, 16, 32)), lots.choice((1, 2, 4, 8))
    length = tokens(lots, 4096)
    batch = heads * sequences
    length = max(16, min(length, math.isqrt(_MOST_SCORES // batch)))
    if not k:  # the keys are summed over
        length = -(-length // 8) * 8
    layer = f"{sequences} x {heads} heads"
    return Lot("batched_matmul", number, layer, length, n or length, k or length, _dtype(lots),
               kind=kind, num_products=batch)  # fmt: skip

"""From cases of product_cases.py to tensors on a device, a launch, and what it must write."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bits import same_bits
from product_cases import Case

from kernel_hub import ops
from kernel_hub.testing import reference
from kernel_hub.testing.compare import compare, parts_atol, product_atol
from kernel_hub.testing.guard import Guarded

DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
    "relu": torch.relu,
}  # fmt: skip
# Error of sums of e4m3, of the largest: with blocks, promoted, fast (docs/notes/linear_fp8.md).
_FP8_ERRORS = {"block": 1e-3, "": 2e-3, "fast": 2e-2}


@dataclass
class Output:
    """What a launch writes.

    truth, own: of the rows `rows` (None: all), in fp64 and in the dtype; the others are left alone.
    before: what `out` begins with; None is poison. atol: None is compare's own.
    """

    name: str
    out: Guarded
    truth: torch.Tensor
    own: torch.Tensor
    rows: torch.Tensor | None = None
    before: torch.Tensor | None = None
    atol: float | None = None

    def reset(self) -> None:
        if self.before is None:
            self.out.poison()
        else:
            self.out.fill(self.before)

    def ratio(self) -> float:
        """Largest error, in what is allowed; raises AssertionError beyond that."""
        self.out.check(self.name)
        found = self.out.tensor.reshape(-1, *self.truth.shape[1:])
        if self.rows is not None:
            left = torch.ones(len(found), dtype=torch.bool, device=found.device)
            left[self.rows] = False
            rest, found = found[left], found[self.rows]
            same_bits(rest, poisoned_like(rest), name=f"{self.name}: rows that are not written")
        result = compare(found, self.truth, self.own, atol=self.atol, name=self.name)
        if not result.ok:
            raise AssertionError(result.message)
        return result.error / result.limit if result.limit else 0.0


def poisoned_like(x: torch.Tensor) -> torch.Tensor:
    """Every byte 0xff."""
    return torch.full((*x.shape, x.element_size()), 255, dtype=torch.uint8, device=x.device).view(
        x.dtype
    )[..., 0]


@dataclass
class Problem:
    """A case on a device: one launch, and what it writes."""

    launch: Callable[[], Any]
    outputs: list[Output]


class Maker:
    """Random tensors of a case, each a slice of something larger that is full of nan."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(case.seed)
        self.dtype = DTYPES[case.dtype]

    def __getitem__(self, option: str) -> Any:
        return self.case.options[option]

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator, device=self.device)
        return made.to(dtype or self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        made = torch.rand(shape, generator=self.generator, device=self.device)
        return 0.05 + 0.1 * made

    def rows(self, *shape: int, room: int = 0) -> torch.Tensor:
        """Rows `room` elements apart, `room` elements from the start."""
        values = self.randn(*shape)
        if not room:
            return values
        wide = poisoned_like(values.new_empty((*shape[:-1], shape[-1] + room)))
        wide[..., room:] = values
        return wide[..., room:]

    def out(self, *shape: int, dtype: torch.dtype, room: int = 0, shift: int = 0) -> Guarded:
        return Guarded(shape, dtype, self.device, row_stride=shape[-1] + room, shift=shift)

    def chosen(self, count: int, most: int) -> torch.Tensor:
        """`count` different numbers below `most`."""
        order = torch.randperm(most, generator=self.generator, device=self.device)
        return order[:count]


def _epilogue(
    values: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if bias is not None:
        values = values + bias.to(values.dtype)
    values = ACTIVATIONS[activation](values)
    return values if residual is None else values + residual.to(values.dtype)


def _linear_like(
    make: Maker, kind: torch.dtype, values: tuple[torch.Tensor, torch.Tensor], atol: float | None,
    launch: Callable[..., Any],
) -> Problem:  # fmt: skip
    """With the epilogue of linear. values: the product in fp64, and in `kind`."""
    (m, n), activation = values[0].shape, make["activation"]
    bias = None
    if make["bias"]:
        bias = make.randn(n, dtype=kind if make.case.op == "linear_fp8" else make.dtype)
    out = make.out(m, n, dtype=kind, room=make["out_room"], shift=int(make["out_shift"]))
    residual = before = None
    if make["residual"] == "apart":
        residual = make.out(m, n, dtype=kind, room=make["residual_room"]).tensor
        residual.copy_(make.randn(m, n, dtype=kind))
    elif make["residual"] == "in place":
        residual, before = out.tensor, make.randn(m, n, dtype=kind)
    added = before if residual is out.tensor else residual
    truth, own = (_epilogue(x, bias, activation, added) for x in values)
    if atol is None:
        atol = product_atol(truth, kind, make["k"])
    return Problem(
        lambda: launch(bias, activation=activation, residual=residual, out=out.tensor),
        [Output("out", out, truth, own, before=before, atol=atol)],
    )


def _linear(make: Maker) -> Problem:
    m, n, k, is_fp32 = make["m"], make["n"], make["k"], make.dtype == torch.float32
    a, b = make.rows(m, k, room=make["a_room"]), make.rows(n, k, room=make["b_room"])
    for x in (a, b) if is_fp32 else ():  # in place: what lies between rows stays nan
        x *= 2.0 ** (make["binades"] * (10 * make.uniform(*x.shape) - 1)).round()
    if make["one_row"]:
        a = a[:1].expand(m, k)
    kind = torch.float32 if is_fp32 or make["fp32"] else make.dtype
    values = a.double() @ b.double().T, a.to(kind) @ b.to(kind).T
    made = _linear_like(make, kind, values, None, functools.partial(ops.linear, a, b))
    if is_fp32:
        (out,) = made.outputs
        out.atol = parts_atol(a, b) + torch.finfo(kind).eps * float(out.truth.abs().max())
    return made


def _scales(make: Maker) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    m, n, blocks, kind = make["m"], make["n"], -(-make["k"] // 128), make["scales"]
    if kind == "none":
        return None, None
    if kind == "tensor":
        return make.uniform(), make.uniform(1)
    if kind == "row":
        return make.uniform(m, 1), make.uniform(n)
    if kind == "mixed":
        return make.uniform(m), make.uniform(1)
    of_a = make.uniform(blocks, m).T if make["turned"] else make.uniform(m, blocks)
    return of_a, make.uniform(-(-n // 128), blocks)


def _wide(values: torch.Tensor, scale: torch.Tensor | None, kind: str, rows: int) -> torch.Tensor:
    """values * scale in fp64; rows: of the values, under one scale of blocks."""
    if scale is None:
        return values.double()
    factors = scale.double()
    if kind == "block":
        at = [torch.arange(size, device=values.device) for size in values.shape]
        factors = factors[at[0] // rows][:, at[1] // 128]
    elif factors.numel() > 1:
        factors = factors.reshape(-1, 1)
    return values.double() * factors


def _linear_fp8(make: Maker) -> Problem:
    m, n, k, scales, fast = make["m"], make["n"], make["k"], make["scales"], make["fast"]
    a, b = make.rows(m, k, room=make["a_room"]), make.rows(n, k, room=make["b_room"])
    a_scale, b_scale = _scales(make)
    kind = DTYPES[make["out"]]
    product = _wide(a, a_scale, scales, 1) @ _wide(b, b_scale, scales, 128).T
    error = _FP8_ERRORS["fast" if fast else "block" if scales == "block" else ""]
    given = {"a_scale": a_scale, "b_scale": b_scale, "use_fast_accum": fast}
    launch = functools.partial(ops.linear, a, b, **given)
    made = _linear_like(make, kind, (product, product), 0.0, launch)
    for output in made.outputs:
        rounding = torch.finfo(kind).eps * float(output.truth.abs().max())
        output.atol = error * float(product.abs().max()) + rounding
    return made


def _swiglu_linear(make: Maker) -> Problem:
    m, n, k = make["m"], make["n"], make["k"]
    a, b = make.rows(m, k, room=make["a_room"]), make.rows(2 * n, k, room=make["b_room"])
    b *= (2 / max(k, 4)) ** 0.5
    out = make.out(m, n, dtype=make.dtype, room=make["out_room"])

    how: Any = {name: make[name] for name in ("activation", "interleaved")}
    truth, own = (
        reference.gated_linear(a, b, **how, dtype=to) for to in (torch.float64, make.dtype)
    )
    if how == {"activation": "silu", "interleaved": False}:
        return Problem(
            lambda: ops.swiglu_linear(a, b, out=out.tensor), [Output("out", out, truth, own)]
        )
    return Problem(
        lambda: ops.gated_linear(a, b, **how, out=out.tensor), [Output("out", out, truth, own)]
    )


def rotated(
    x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, interleaved: bool, rotary_dim: int
) -> torch.Tensor:
    half = rotary_dim // 2
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    one, other, out = x[..., first], x[..., second], x.clone()
    out[..., first], out[..., second] = one * c - other * s, other * c + one * s
    return out


def _qkv_linear(make: Maker) -> Problem:
    m, k, heads, kv_heads, head_dim = (make[x] for x in ("m", "k", "heads", "kv_heads", "head_dim"))
    to, rotary_dim, page_size = make["to"], make["rotary_dim"], make["page_size"]
    sequences = make["sequences"] if to == "pages" else 1
    seqlen, total_heads = -(-m // sequences), heads + 2 * kv_heads
    m = seqlen * sequences
    x = make.rows(m, k, room=make["a_room"])
    w = make.rows(total_heads * head_dim, k, room=make["b_room"])
    w *= k**-0.5
    bias = make.randn(len(w)) if make["bias"] else None
    places: dict[str, Any] = {}
    numbers = torch.arange(m, device=make.device) % seqlen  # of tokens in their sequence
    rows = None
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    if to == "packed":  # three slices of one tensor
        made = make.out(m, total_heads * head_dim, dtype=make.dtype, room=head_dim)
        outs = dict.fromkeys("qkv", made)
        slices = made.tensor.unflatten(1, (total_heads, head_dim)).split(list(counts.values()), 1)
        places = {f"out_{name}": x for name, x in zip("qkv", slices, strict=True)}
    else:
        num_pages = -(-m // page_size) + sequences * 2 + 1
        outs = {"q": make.out(m, heads, head_dim, dtype=make.dtype)}
        shape = (m,) if to == "apart" else (num_pages, page_size)
        for name in "kv":
            outs[name] = make.out(*shape, kv_heads, head_dim, dtype=make.dtype)
        names = {"q": "out_q", "k": "out_k", "v": "out_v"}
        if to != "apart":
            names |= {"k": "k_cache", "v": "v_cache"}
        places = {names[name]: out.tensor for name, out in outs.items()}
    kept = torch.ones(m, dtype=torch.bool, device=make.device)
    if to == "slots":
        rows = make.chosen(m, num_pages * page_size)
        kept = torch.rand(m, generator=make.generator, device=make.device) < 0.9
        places["slot_mapping"] = torch.where(kept, rows, -1).to(torch.int32)
        rows = rows[kept]
    elif to == "pages":
        before = make.chosen(sequences, max(sequences, 2 * page_size)).to(torch.int32) % page_size
        table = torch.full((sequences, num_pages), -1, dtype=torch.int32, device=make.device)
        order = make.chosen(num_pages, num_pages).tolist()
        found = []
        for i, length in enumerate(before.tolist()):
            pages = [order.pop() for _ in range(-(-(length + seqlen) // page_size))]
            table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            found += [pages[n // page_size] * page_size + n % page_size
                      for n in range(length, length + seqlen)]  # fmt: skip
        rows = torch.tensor(found, device=make.device)
        numbers = numbers + before.long().repeat_interleave(seqlen)
        places |= {"cache_seqlens": before, "block_table": table}
    positions = None
    cos = sin = None
    if rotary_dim:
        if make["positions"] != "none":
            numbers = numbers * 5 % 97
            positions = numbers.to(getattr(torch, make["positions"]))
        angles = 3 * make.randn(int(numbers.max()) + 1, rotary_dim // 2, dtype=torch.float32)
        kind = torch.float32 if make["wide_table"] else make.dtype
        cos, sin = angles.cos().to(kind), angles.sin().to(kind)

    def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        values = x.to(dtype) @ w.to(dtype).T
        if bias is not None:
            values = values + bias.to(dtype)
        parts = dict(zip("qkv", values.view(m, -1, head_dim).split(list(counts.values()), 1),
                         strict=True))  # fmt: skip
        if cos is not None and sin is not None:
            c, s = (t.to(dtype)[numbers][:, None] for t in (cos, sin))
            for name in "qk":
                parts[name] = rotated(parts[name], c, s, make["interleaved"], rotary_dim)
        return parts

    truth, own = expected(torch.float64), expected(make.dtype)
    if to == "packed":
        whole = [torch.cat(list(parts.values()), 1).flatten(1) for parts in (truth, own)]
        outputs = [Output("q, k, v", outs["q"], *whole)]
    else:
        outputs = [Output("q", outs["q"], truth["q"], own["q"])]
        outputs += [
            Output(name, outs[name], truth[name][kept], own[name][kept], rows) for name in "kv"
        ]
    shaped = x.view(sequences, seqlen, k) if to == "pages" else x
    if to == "pages":
        places["out_q"] = places["out_q"].view(sequences, seqlen, heads, head_dim)
        if positions is not None:
            positions = positions.view(sequences, seqlen)
    given = {"num_heads": heads, "num_kv_heads": kv_heads, "interleaved": make["interleaved"]}
    return Problem(
        lambda: ops.qkv_linear(shaped, w, bias, cos, sin, positions, **given, **places), outputs
    )


def _grouped_linear(make: Maker) -> Problem:
    m, n, k, experts = make["m"], make["n"], make["k"], make["experts"]
    first, total = make["before"], make["before"] + m + make["behind"]
    a = make.rows(total, k, room=make["a_room"])
    b = make.rows(experts, n, k, room=make["b_room"])
    bias = make.randn(experts, n) if make["bias"] else None
    kind = torch.float32 if make["fp32"] else make.dtype
    shares = torch.rand(experts - 1, generator=make.generator, device=make.device)
    ends = ((shares**3 if make["uneven"] else shares) * (m + 1)).int().sort().values.tolist()
    bounds = [first, *(first + end for end in ends), first + m]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=make.device)
    out = make.out(total, n, dtype=kind, room=make["out_room"])

    def expected(dtype: torch.dtype) -> torch.Tensor:
        parts = [
            _epilogue(
                a[start:end].to(dtype) @ b[expert].to(dtype).T,
                None if bias is None else bias[expert], make["activation"], None,
            )
            for expert, (start, end) in enumerate(itertools.pairwise(bounds))
        ]  # fmt: skip
        return torch.cat(parts)

    truth, rows = expected(torch.float64), torch.arange(first, first + m, device=make.device)
    atol = product_atol(truth, kind, make["k"])
    return Problem(
        lambda: ops.grouped_linear(
            a, b, offsets, bias=bias, activation=make["activation"], out=out.tensor
        ),
        [Output("out", out, truth, expected(kind), rows, atol=atol)],
    )


def _batched_matmul(make: Maker) -> Problem:
    m, n, k, batch = make["m"], make["n"], make["k"], (make["inner"], make["products"])
    kind = torch.float32 if make["fp32"] else make.dtype

    def operand(name: str, rows: int) -> torch.Tensor:
        of = (batch[0], 1) if make["shared"] == name else batch
        made = make.rows(*of, rows, k, room=make[f"{name}_room"])
        if make["turned"]:  # the batch between the rows
            made = made.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        return made

    a, b = operand("a", m), operand("b", n)
    shape = (*torch.broadcast_shapes(a.shape[:2], b.shape[:2]), m, n)
    out = make.out(*shape, dtype=kind, room=make["out_room"])
    truth, own = (a.to(t) @ b.to(t).mT for t in (torch.float64, kind))
    return Problem(
        lambda: ops.batched_matmul(a, b, out=out.tensor),
        [Output("out", out, *(x.flatten(0, 2) for x in (truth, own)),
                atol=product_atol(truth, kind, make["k"]))],
    )  # fmt: skip


MAKES: dict[str, Callable[[Maker], Problem]] = {
    "linear": _linear, "linear_fp32": _linear, "linear_fp8": _linear_fp8,
    "swiglu_linear": _swiglu_linear, "qkv_linear": _qkv_linear,
    "grouped_linear": _grouped_linear, "batched_matmul": _batched_matmul,
}  # fmt: skip


def problem_of(case: Case, device: str) -> Problem:
    """The tensors of a case, its launch, and what that must write."""
    return MAKES[case.op](Maker(case, device))

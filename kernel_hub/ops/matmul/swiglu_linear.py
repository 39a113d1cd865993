"""The gate and up products of a gated layer and what joins them (csrc/matmul/swiglu_linear*.cu)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.device import device_of
from ..core.launch import Launch, Plans
from ..core.tensor_maps import Boxes
from .checks import check_operand, check_weight, rows_and_strides
from .linear_launch import launch_of, maps_of, row_boxes
from .paired_plan import GROUP_ROWS, TABLES, choose
from .tiles import BLOCK_K

_KERNELS = "swiglu_linear"  # of every gate
_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swigluoai": 3}  # csrc/matmul/paired/gates.cuh
_functional, _empty_like = torch.nn.functional, torch.empty_like


class Gating(NamedTuple):
    """What joins the two products, and which rows of the weight are whose."""

    kind: int = _KINDS["silu"]
    alpha: float = 0.0
    limit: float = 0.0
    interleaved: bool = False
    batch_invariant: bool = False
    weights_ready: bool = False


_SILU = Gating()


def swiglu_linear(
    a: torch.Tensor, b_gate_up: torch.Tensor, *, out: torch.Tensor | None = None,
    deterministic: bool | Literal["batch"] = False, weights_ready: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows by the gate and up weights of a SwiGLU layer, and join the two.

        out = silu(a @ gate.T) * (a @ up.T)        gate, up = b_gate_up.chunk(2)

    with fp32 until the end, rounded once. The same inputs give the same bits on every run.

    a: (..., k) or (k,), fp16 or bf16, on the GPU or the CPU; k a multiple of 8; the last dimension
        contiguous, the leading ones evenly spaced. Its rows begin at multiples of 16 bytes.
    b_gate_up: (2 * i, k), the rows of the gate, then those of up, as checkpoints have them; dtype
        and device of a; rows as those of a.
    out: (..., i), dtype and device of a; must not overlap a or b_gate_up.
    deterministic: "batch": a row's bits depend on it alone, not on how many there are.
    weights_ready: a promise that no launch just ahead writes the weights, as of `linear`.

    Returns out. A CUDA tensor runs a shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit. Other
    activations: `gated_linear`.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    how = _SILU
    if deterministic is not False or weights_ready is not False:
        common.check_flag(_swiglu.op, "weights_ready", weights_ready)
        batch_invariant = common.is_batch(_swiglu.op, deterministic)
        how = how._replace(batch_invariant=batch_invariant, weights_ready=bool(weights_ready))
    result: torch.Tensor = _swiglu(a, b_gate_up, how, out)
    return result


def gated_linear(
    a: torch.Tensor, weight: torch.Tensor, activation: str = "silu", *, alpha: float = 1.702,
    limit: float = 7.0, interleaved: bool = False, out: torch.Tensor | None = None,
    deterministic: bool | Literal["batch"] = False, weights_ready: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows by the gate and up weights of a gated layer, and join the two.

        out = activation(g) * u        g = a @ gate.T, u = a @ up.T; gate, up = weight.chunk(2)
        "silu":      silu(g) * u, as swiglu_linear
        "gelu":      g / 2 * (1 + erf(g / sqrt(2))) * u
        "gelu_tanh": g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) * u
        "swigluoai": (u + 1) * g / (1 + exp(-alpha * g)), g at most limit, u from -limit to limit

    with fp32 until the end, rounded once. The same inputs give the same bits on every run.

    a: (..., k) or (k,), fp16 or bf16, on the GPU or the CPU; k a multiple of 8; the last dimension
        contiguous, the leading ones evenly spaced. Its rows begin at multiples of 16 bytes.
    weight: (2 * i, k), dtype and device of a; rows as those of a.
    activation: one of those above; gelu is right to 1.4e-5 (times u) before rounding.
    alpha, limit: of "swigluoai"; limit at least 0.
    interleaved: rows of the gate and of up take turns (gate, up = weight[::2], weight[1::2]), as in
        gpt-oss' checkpoints; otherwise those of the gate are before those of up.
    out: (..., i), dtype and device of a; must not overlap a or weight.
    deterministic: "batch": a row's bits depend on it alone, not on how many there are.
    weights_ready: a promise that no launch just ahead writes the weights, as of `linear`.

    Returns out. A CUDA tensor runs a shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020; OpenAI, "gpt-oss-120b & gpt-oss-20b
    Model Card", 2025.
    """
    op = _gated.op
    kind = common.check_choice(op, "activation", activation, _KINDS)
    alpha = common.check_number(op, "alpha", alpha)
    limit = common.check_number(op, "limit", limit, least=0.0)
    common.check_flags(op, interleaved=interleaved, weights_ready=weights_ready)
    batch_invariant = deterministic is not False and common.is_batch(op, deterministic)
    how = Gating(kind, alpha, limit, bool(interleaved), batch_invariant, bool(weights_ready))
    return _gated(a, weight, how, out)


class GatedProduct:
    """One op on these kernels.

    op: its name to callers, weight: that of its weight; gate: the one gate it has, for which its
    registered ops ask nothing; None: they ask which.
    """

    def __init__(self, op: str, weight: str, gate: Gating | None = None) -> None:
        self.op, self.weight, self.gate = op, weight, gate
        self.operands = common.Operands(op, f"a {weight}", "out")
        self.writes = common.Writes(op, f"out a {weight}", "out")
        self.plans: Plans[tuple[Launch, common.Spans, Any]] = Plans()
        TABLES[_KERNELS].on_change(self.plans.clear)
        asked = "" if gate else ", int activation, float alpha, float limit, bool interleaved"
        asked += ", bool batch_invariant, bool weights_ready"
        count = 2 if gate else 6

        def gating(given: tuple[Any, ...]) -> Gating:
            return Gating(*gate[:4], *given[:2]) if gate else Gating(*given[:6])

        # By their names at each call: a test gives one another's.
        def cuda(a: Any, b: Any, *given: Any) -> None:
            cuda_into(self, a, b, gating(given), *given[count:])

        def cpu(a: Any, b: Any, *given: Any) -> None:
            cpu_into(self, a, b, gating(given), *given[count:])

        self.registered = common.define_pair(
            op, f"Tensor a, Tensor {weight}{asked}", new=lambda a, b, *_: self.new_out(a, b),
            cuda=cuda, cpu=cpu, check=lambda a, b, *given: self.check(a, b, given[-1]),
        )  # fmt: skip

    def __call__(self, a: Any, b: Any, how: Gating, out: Any) -> Any:
        if not self.operands.are_plain((a, b), (out,)):
            self.check(a, b, out)
            return self.registered.run((a, b, *(how[-2:] if self.gate else how)), out)
        try:
            made = (cuda_into if a.is_cuda else cpu_into)(self, a, b, how, out, out is not None)
        except common.FOREIGN:
            self.operands.check_tensors((a, b), (out,))  # names what has no memory
            self.check(a, b, out)
            raise
        if out is not None:
            common.written((out,))
        return made

    def check(self, a: Any, b: Any, out: Any = None) -> None:
        """Everything about the tensors but their addresses."""
        op, weight = self.op, self.weight
        k = check_operand(op, a)
        check_weight(op, weight, b, k, a, "2 * i")
        if b.shape[0] % 2:
            expected = f"shape (2 * i, {k}): as many rows of the gate as of up"
            raise common.refuse(op, weight, expected, b)
        if max(*b.shape) > common.MAX_SIZE or a.numel() > common.MAX_SIZE * max(k, 1):
            raise common.refuse(op, weight, f"sizes of at most {common.MAX_SIZE}", b)
        common.check_written(op, "out", out, (*a.shape[:-1], b.shape[0] // 2), a)

    @staticmethod
    def new_out(a: Any, b: Any) -> Any:
        """Uninitialised."""
        return a.new_empty((*a.shape[:-1], b.shape[0] // 2))

    def plan(self, a: torch.Tensor, b: torch.Tensor, how: Gating, out: torch.Tensor) -> Launch:
        """Check the tensors; choose the kernel, its tensor maps and its numbers."""
        self.check(a, b, out)
        if out.numel() == 0:
            return Launch()
        k, columns = a.shape[-1], b.shape[0] // 2
        m, (a_stride, out_stride), b_stride = rows_and_strides(self.op, a, self.weight, b, out=out)
        n = -(-columns // 8) * GROUP_ROWS
        # From a row of b to the next of the gate, and to that of up.
        step, half = (2, 1) if how.interleaved else (1, columns)
        ending = how[:3]
        gpu = device_of(a.device)
        leads = int(how.weights_ready and gpu.overlaps_launches)
        # Rows that overlap, or an expanded one: pointers, no tensor maps.
        has_maps = columns % 8 == 0 and (m == 1 or a_stride >= k) and b_stride >= k
        choice = choose(_KERNELS, gpu.gpu, m, n, k, has_maps, False, how.batch_invariant)
        if choice.tile is None:
            strides = (out_stride, a_stride, b_stride)
            return launch_of(_KERNELS, choice, a, (*strides, m, columns, k, half, *ending, leads))
        share = choice.tile.b_share
        # 8 rows of the gate, the 8 of up beside them, the next 8 of the gate, ...
        group = 8 * step * b_stride
        b_boxes = Boxes(
            (1, columns // 8, 2, 8, k),
            (group, group, half * b_stride, step * b_stride, 1),
            (1, share // GROUP_ROWS, 2, 8, BLOCK_K),
        )
        numbers = (out_stride, m, columns, k, share, choice.group, *ending, leads)
        boxes = *row_boxes(choice, m, k, a_stride), b_boxes
        return launch_of(_KERNELS, choice, a, numbers, *boxes)


def cuda_into(
    product: GatedProduct, a: torch.Tensor, b: torch.Tensor, how: Gating, out: torch.Tensor | None,
    is_given: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Into out, or a new one. is_given: the caller gave it, and it may overlap the rest."""
    at_a, at_b = a.data_ptr(), b.data_ptr()
    key = (
        a.dtype, a.shape, a.stride(), a.get_device(), b.dtype, b.shape, b.stride(), b.get_device(),
        (at_a | at_b) & 15, None if out is None else (out.dtype, out.shape, out.stride()), how,
    )  # fmt: skip
    found = product.plans.get(key)
    if found is None:
        like = product.new_out(a, b) if out is None else out
        plan, spans = product.plan(a, b, how, like), product.writes.spans(like, a, b)
        found = product.plans.keep(
            key, (plan, spans, None if out is like else common.emptied(like))
        )
    (function, grid, block, shared_bytes, numbers, boxes, options), spans, like = found
    if out is None:
        out = _empty_like(like)
    addresses = (out.data_ptr(), at_a, at_b)
    maps = spans.apart.get(addresses)
    if maps is None:
        maps = spans.made(addresses, is_given, maps_of, boxes, a, b)
    try:
        params = (out, *(maps or (a, b)), *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        product.check(a, b, out)  # names the devices that differ
        raise
    return out


@common.in_own_dtypes
def cpu_into(
    product: GatedProduct, a: torch.Tensor, b: torch.Tensor, how: Gating, out: torch.Tensor | None,
    is_given: bool = True,
) -> torch.Tensor:  # fmt: skip
    """The same on the CPU, by torch."""
    product.check(a, b, out)
    out = product.new_out(a, b) if out is None else out
    if is_given:
        product.writes.check(out, a, b)
    halves = (b[::2], b[1::2]) if how.interleaved else b.chunk(2)
    gate, up = (a.float() @ half.float().T for half in halves)
    return out.copy_(_joined(gate, up, how))


def _joined(gate: torch.Tensor, up: torch.Tensor, how: Gating) -> torch.Tensor:
    if how.kind == _KINDS["silu"]:
        return _functional.silu(gate) * up
    if how.kind == _KINDS["swigluoai"]:
        gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
        return (up + 1) * (gate * torch.sigmoid(how.alpha * gate))
    form = "tanh" if how.kind == _KINDS["gelu_tanh"] else "none"
    return _functional.gelu(gate, approximate=form) * up


_swiglu = GatedProduct("swiglu_linear", "b_gate_up", _SILU)
_gated = GatedProduct("gated_linear", "weight")

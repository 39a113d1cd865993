"""flash-attn's own tests through kernel_hub's names: cases drawn by lot from their parameters.

Needs einops and a folder with their file: tests/test_flash_attn.py of github.com/Dao-AILab/
flash-attention (of 2.8 or later). Without a GPU:

    python tests/flash_attn_own.py FOLDER --device cpu --longest 200 --count 20
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import io
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kernel_hub import flash_attn
from kernel_hub.errors import TensorError

FILE = "test_flash_attn.py"
# What is refused by name is refused every time: `tests/integrations` holds that.
FIXED = {"dropout_p": 0.0, "has_leftpad": False}

# Of functions below the public ones, and of an error that theirs waits for the lengths to raise.
INTERNAL = (
    "varlen_paged_kv_num_splits", "kvcache_paged_block_table_bounds", "generator_arg_must_be_none",
)  # fmt: skip


def _rotated(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0
) -> torch.Tensor:
    """In place of `flash_attn.layers.rotary.apply_rotary_emb`, which their references call."""
    positions = torch.arange(x.shape[1], device=x.device)
    if isinstance(seqlen_offsets, torch.Tensor):
        positions = positions + seqlen_offsets[:, None]
    half = cos.shape[-1]
    c, s = (table[positions][..., None, :].float() for table in (cos, sin))
    part, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    pair = a * c - b * s, b * c + a * s
    part = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([part.to(x.dtype), rest], -1)


class _OnTheCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Their file names its GPU; with "cpu" there is one that has none."""
    if device != "cpu":
        yield
        return
    properties = types.SimpleNamespace(total_memory=1 << 40, multi_processor_count=132)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        _OnTheCpu(),
    ):
        yield


@contextlib.contextmanager
def their_tests(folder: Path, device: str = "cuda") -> Iterator[types.ModuleType]:
    """Their file as a module, importing kernel_hub's names."""
    flash_attn.install()
    try:
        interface = sys.modules["flash_attn.flash_attn_interface"]
        interface._get_block_size_n = None  # type: ignore[attr-defined]  # of dropout's mask
        interface.USE_TRITON_ROCM = False  # type: ignore[attr-defined]
        rotary = types.ModuleType("flash_attn.layers.rotary")
        rotary.apply_rotary_emb = _rotated  # type: ignore[attr-defined]
        stand_ins = {"flash_attn.layers": types.ModuleType("flash_attn.layers")}
        with (
            mock.patch.dict(sys.modules, {**stand_ins, rotary.__name__: rotary}),
            on_device(device),
        ):
            spec = importlib.util.spec_from_file_location("flash_attn_tests", folder / FILE)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module
    finally:
        flash_attn.uninstall()


def names(module: types.ModuleType, device: str = "cuda") -> list[str]:
    """Of their tests; those that repeat a call hundreds of times only on a GPU."""
    found = [name for name in vars(module) if name.startswith("test_")]
    found = [name for name in found if not name.endswith(INTERNAL)]
    repeating = ("race_condition", "deterministic")
    return [name for name in found if device == "cuda" or not name.endswith(repeating)]


def case(module: types.ModuleType, name: str, seed: int, longest: int) -> dict[str, Any]:
    """One choice of each parameter, no length beyond `longest`."""
    lot = random.Random(f"{name} {seed}")
    chosen: dict[str, Any] = {}
    for mark in getattr(module, name).pytestmark:
        arguments = [each.strip() for each in mark.args[0].split(",")]
        values = [v if len(arguments) > 1 else (v,) for v in mark.args[1]]
        if any(each.startswith("seqlen") and "new" not in each for each in arguments):
            values = [v for v in values if max(v) <= longest] or [min(values, key=max)]
        chosen |= dict(zip(arguments, lot.choice(values), strict=True))
    return {**chosen, **{k: v for k, v in FIXED.items() if k in chosen}}


def run(module: types.ModuleType, name: str, given: dict[str, Any]) -> str:
    """'passed', 'skipped by them', 'refused: …' or 'failed: …'."""
    # Over pages they ask for no gradients, yet of tensors that require them; ours refuse that.
    is_paged = given.get("paged_kv_block_size") is not None
    try:
        with torch.set_grad_enabled(not is_paged), contextlib.redirect_stdout(io.StringIO()):
            getattr(module, name)(**given)
    except pytest.skip.Exception:
        return "skipped by them"
    except TensorError as error:
        return f"refused: {error}"
    except AssertionError as error:
        return f"failed: {str(error).splitlines()[0] if str(error) else 'their assertion'}"
    return "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"where {FILE} lies")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--count", type=int, default=20, help="cases of each test")
    parser.add_argument("--longest", type=int, default=2048, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    worst = 0
    with their_tests(asked.folder, asked.device) as module:
        for name in names(module, asked.device):
            counts: collections.Counter[str] = collections.Counter()
            for seed in range(asked.seed, asked.seed + asked.count):
                given = case(module, name, seed, asked.longest)
                outcome = run(module, name, given)
                counts[outcome.partition(":")[0]] += 1
                if outcome.startswith(("failed", "refused")):
                    print(f"  {name} --seed {seed}: {outcome}\n    {given}", flush=True)
                    worst = 1
            print(f"{name}: " + ", ".join(f"{n} {what}" for what, n in counts.items()), flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())

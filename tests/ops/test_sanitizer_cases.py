"""tests/gpu/sanitize.py launches every variant of the ops it runs: told by a stand-in's names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_exports import exported, exported_linear, exported_paired
from ways import launch_for_cpu

from kernel_hub import ops
from kernel_hub.ops.core import common
from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import linear_launch, paired_plan

PATH = Path(__file__).parent.parent / "gpu/sanitize.py"


def sanitize() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", PATH)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = found
    spec.loader.exec_module(found)
    return found


# These have scripts of their own: tests/gpu/sanitize_attention.py and sanitize_grouped.py.
ELSEWHERE = {"flash_attention", "flash_attention_qkvpacked", "decode_attention"}
ELSEWHERE |= {"mla_decode"}
ELSEWHERE |= {"grouped_linear", "batched_matmul"}
# Among the cases of softmax, swiglu_linear and pad_input, whose kernels they run; of verify_draft
# and of sample.
ELSEWHERE |= {"log_softmax", "gated_linear", "unpad_input", "verify_tree", "sample_slice"}


def test_every_op_has_cases() -> None:
    assert set(ops.__all__) == sanitize().CASES.keys() | ELSEWHERE


@pytest.mark.parametrize("op", sanitize().CASES)
def test_every_variant_is_launched(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()

    def shipped(cubin: str, name: str) -> Any:
        return lambda *launch, **options: launched.add(name)

    monkeypatch.setattr(common, "shipped", shipped)
    forget_all()
    launch_for_cpu(monkeypatch)
    # The numbers are of no matter here.
    monkeypatch.setattr(torch, "randn", torch.empty)
    monkeypatch.setattr(linear_launch, "tensor_map", lambda *boxes: b"")
    with pretend(PlannedGpu((9, 0), 132)), torch.no_grad():  # as `main` calls them
        sanitize().CASES[op]("cpu")
    if op in paired_plan.TABLES:
        expected = exported_paired(op)
    else:
        expected = exported_linear() if op == "linear" else exported(op)
    assert expected - launched == set(), "add cases to tests/gpu/sanitize.py"
    assert any("flat" in name for name in launched) == any("flat" in name for name in expected)

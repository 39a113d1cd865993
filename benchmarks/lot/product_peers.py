"""Libraries that products are held against."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

CUBLAS, CUBLASLT, SCALED_MM, GROUPED_MM, DEEPGEMM = PEERS = (
    "cuBLAS", "cuBLASLt", "torch._scaled_mm", "torch._grouped_mm", "DeepGEMM",
)  # fmt: skip


def through_lt(launch: Callable[[], Any]) -> Callable[[], Any]:
    """The same launch, with cuBLASLt where torch would take cuBLAS."""

    def run() -> Any:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            return launch()
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return run


def deep_gemm() -> Any:
    """The module; raises ImportError where it is not there."""
    return importlib.import_module("deep_gemm")

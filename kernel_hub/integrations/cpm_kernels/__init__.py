"""`install()`: programs that import cpm_kernels get its `kernels.base` from here, unchanged."""

from __future__ import annotations

from .finder import install, uninstall

__all__ = ["install", "uninstall"]

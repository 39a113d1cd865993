"""Kernels written out as C: images as arrays, and one typed launch function a kernel.

Writes text only; the C files need the driver's header and library, and no Python.
"""

from __future__ import annotations

from .writing import export, render

__all__ = ["export", "render"]

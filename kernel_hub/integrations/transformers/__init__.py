"""transformers' models by ops: `register()` for attention, `accelerate(model)` for more.

`register()` makes attn_implementation="kernel_hub" known; `accelerate` swaps norms, rotation, MLPs
and linear layers of a loaded model, `restore` puts them back; `report()` counts calls.
"""

from __future__ import annotations

from .counts import report
from .registration import register, unregister
from .replacing import accelerate, restore

__all__ = ["accelerate", "register", "report", "restore", "unregister"]

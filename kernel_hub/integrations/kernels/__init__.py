"""Layers for Hugging Face's kernels package: `register_kernel_mapping(mapping())`.

Nothing comes from the Hub: the layers are `layers`, which run kernel_hub's ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Layer", "mapping"]

# The names that kernels and transformers give layers, and the classes of `layers` for them.
_CLASSES = {
    "RMSNorm": "RMSNorm",
    "SiluAndMul": "SiluAndMul",
    "SwiGLUMLP": "SwiGLUMLP",
    "Linear": "Linear",
    "rotary_pos_emb": "RotaryPosEmb",
}


@dataclass(frozen=True)
class Layer:
    """What a mapping has for a layer: `load()` gives the class whose forward takes its place."""

    layer_name: str

    def load(self) -> Any:
        """A torch.nn.Module class, of which kernels uses the forward."""
        from . import layers

        return getattr(layers, self.layer_name)

    def __str__(self) -> str:
        return f"kernel_hub's {self.layer_name}"


def mapping(device: str = "cuda") -> dict[str, dict[str, dict[Any, Layer]]]:
    """Layers for `kernels.register_kernel_mapping`: RMSNorm, SiluAndMul, SwiGLUMLP, Linear and
    rotary_pos_emb, for inference, with and without torch.compile.

    device: "cuda", or "cpu", where ops are plain torch.
    The layers have no backward: `kernelize(model, mode=Mode.TRAINING)` keeps the originals. Raises
    ImportError without the kernels package.
    """
    try:
        from kernels import Mode
    except ImportError as error:
        raise ImportError(
            "kernel_hub.integrations.kernels: expected the kernels package, found "
            f"{error}: pip install kernels"
        ) from error
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE
    return {name: {device: {mode: Layer(cls)}} for name, cls in _CLASSES.items()}

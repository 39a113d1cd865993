"""transformers' tables of attention functions and masks, with ours in them."""

from __future__ import annotations

from typing import Any

from .attention import NAME, attention
from .masks import lengths_mask

OLDEST = "4.53"


def register() -> str:
    """Make attn_implementation="kernel_hub" known to transformers, and return that name.

    `from_pretrained(..., attn_implementation="kernel_hub")` then runs attention by
    `flash_attention` and `decode_attention`: GQA, windows, softcap, sinks, scaling; dynamic and
    static caches; batches padded on the left or the right; training. What they lack runs by torch,
    and `report()` counts it.
    Calling it again changes nothing. Raises ImportError without transformers from 4.53 on.
    """
    attentions, masks = tables()
    attentions.register(NAME, attention)
    masks.register(NAME, lengths_mask)
    return NAME


def unregister() -> None:
    """Take the name back; models that were loaded with it then raise KeyError by that name."""
    for table in tables():
        table._global_mapping.pop(NAME, None)


def is_registered() -> bool:
    """Whether `register` was called."""
    return all(NAME in table._global_mapping for table in tables())


def tables() -> tuple[Any, Any]:
    """transformers' AttentionInterface and AttentionMaskInterface."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"kernel_hub.integrations.transformers: expected transformers from {OLDEST} on, which "
            f"has masking_utils, found: {error}: pip install 'transformers>={OLDEST}'"
        ) from error
    return AttentionInterface, AttentionMaskInterface

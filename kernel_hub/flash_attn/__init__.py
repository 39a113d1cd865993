"""flash-attn 2.8's names on kernel_hub's kernels: `from kernel_hub.flash_attn import …`.

`install()` lets programs that import flash_attn get them unchanged.
"""

from . import bert_padding as bert_padding
from . import flash_attn_interface as flash_attn_interface
from .flash_attn_interface import *  # noqa: F403 (its functions)
from .stand_in import StandIn

__version__ = "2.8.3"  # of the names
__all__ = ["install", "uninstall"]
__all__ += flash_attn_interface.__all__

_stand_in = StandIn(
    {
        "flash_attn": __name__,
        "flash_attn.flash_attn_interface": f"{__name__}.flash_attn_interface",
        "flash_attn.bert_padding": f"{__name__}.bert_padding",
    },
    "flash-attn",
    __version__,
)


def install() -> None:
    """Let `import flash_attn` resolve here, in this process, from now on.

    `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding` are kernel_hub's;
    other modules (`flash_attn.layers`, …) are those of an installed flash-attn, if there is one.
    importlib.metadata finds a distribution `flash-attn` of version 2.8.3, which transformers asks
    for: call this before transformers is imported, as it remembers what it found.
    """
    _stand_in.install()


def uninstall() -> None:
    """Undo `install`; modules that imported flash_attn meanwhile keep what they got."""
    _stand_in.uninstall()

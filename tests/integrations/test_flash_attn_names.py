"""flash-attn's names stand in its packages' places, with its signatures, and go again."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_hub import flash_attn, flash_attn_interface  # noqa: E402
from kernel_hub.flash_attn import bert_padding  # noqa: E402

# Names in their order, `name=default` where there is one: flash-attn 2.8.3 and 3.0.0 as published.
_MASKS = "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None"
_TWO = f"dropout_p=0.0 {_MASKS} deterministic=False return_attn_probs=False"
_RAGGED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_CACHE = "q k_cache v_cache k=None v=None"
_WHERE = "cache_seqlens=None cache_batch_idx=None cache_leftpad=None"
TWO = {
    "flash_attn_func": f"q k v {_TWO}",
    "flash_attn_kvpacked_func": f"q kv {_TWO}",
    "flash_attn_qkvpacked_func": f"qkv {_TWO}",
    "flash_attn_varlen_func": f"q k v {_RAGGED} {_TWO} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {_RAGGED} {_TWO}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {_TWO}",
    "flash_attn_with_kvcache": (
        f"{_CACHE} rotary_cos=None rotary_sin=None {_WHERE} block_table=None softmax_scale=None "
        "causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None "
        "num_splits=0 return_softmax_lse=False"
    ),
}
_SCALES = "q_descale=None k_descale=None v_descale=None"
_CHUNK = "window_size=(-1,-1) attention_chunk=0 softcap=0.0"
_HOW = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
_THREE = f"softmax_scale=None causal=False qv=None {_SCALES} {_CHUNK} {_HOW}"
THREE = {
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "flash_attn_func": f"q k v {_THREE}",
    "flash_attn_qkvpacked_func": (
        f"qkv softmax_scale=None causal=False {_SCALES} {_CHUNK} deterministic=False "
        "num_heads_q=None sm_margin=0 return_attn_probs=False"
    ),
    "flash_attn_varlen_func": f"q k v {_RAGGED} seqused_q=None seqused_k=None {_THREE}",
    "flash_attn_with_kvcache": (
        f"{_CACHE} qv=None rotary_cos=None rotary_sin=None {_WHERE} page_table=None "
        "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
        f"{_SCALES} softmax_scale=None causal=False {_CHUNK} rotary_interleaved=True "
        "scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
        "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None "
        "cache_leftpad=None page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) "
        "attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"
    ),
}
PADDING = {
    "index_first_axis": "input indices",
    "index_first_axis_residual": "input indices",
    "index_put_first_axis": "values indices first_axis_dim",
    "pad_input": "hidden_states indices batch seqlen",
    "unpad_input": "hidden_states attention_mask unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states attention_mask_in_length",
}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (flash_attn, TWO),
        (flash_attn.flash_attn_interface, TWO),
        (flash_attn_interface, THREE),
        (bert_padding, PADDING),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_orders_and_defaults_are_theirs(module: ModuleType, expected: dict[str, str]) -> None:
    assert set(module.__all__) - {"install", "uninstall"} == expected.keys()
    for name, listed in expected.items():
        found = []
        for each in inspect.signature(getattr(module, name)).parameters.values():
            assert each.kind is each.POSITIONAL_OR_KEYWORD
            default = "" if each.default is each.empty else f"={each.default!r}".replace(" ", "")
            found.append(each.name + default)
        assert " ".join(found) == listed, name


@pytest.fixture
def installed() -> Iterator[None]:
    flash_attn.install()
    flash_attn_interface.install()
    yield
    flash_attn_interface.uninstall()
    flash_attn.uninstall()


def state() -> tuple[Any, ...]:
    names = ("flash_attn", "flash_attn_interface")
    modules = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in names}
    return modules, list(sys.meta_path)


def test_it_goes_as_it_came() -> None:
    before = state()
    for _ in range(2):
        flash_attn.install()
        flash_attn.install()
        assert state() != before
        flash_attn.uninstall()
        flash_attn.uninstall()
        assert state() == before
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_programs_import_it_as_ever(installed: None) -> None:
    import flash_attn as package  # type: ignore
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore
    from flash_attn.bert_padding import pad_input, unpad_input  # type: ignore
    from flash_attn.flash_attn_interface import flash_attn_with_kvcache  # type: ignore
    from flash_attn_interface import flash_attn_func as third  # type: ignore

    assert flash_attn_func is flash_attn.flash_attn_func is package.flash_attn_func
    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert flash_attn_with_kvcache is flash_attn.flash_attn_with_kvcache
    assert (pad_input, unpad_input) == (bert_padding.pad_input, bert_padding.unpad_input)
    assert third is flash_attn_interface.flash_attn_func
    assert package.__version__ == "2.8.3"
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers")
    text = r"flash_attn is kernel_hub's .* no flash_attn_gpu; it has flash_attn_func.*uninstall"
    with pytest.raises(AttributeError, match=text):
        package.flash_attn_gpu.fwd()
    assert not hasattr(package, "install")


def test_the_distributions_are_found(installed: None) -> None:
    """As transformers looks for them: by package, then by distribution, then by version."""
    for package, distribution, version in (
        ("flash_attn", "flash-attn", "2.8.3"),
        ("flash_attn_interface", "flash-attn-3", "3.0.0"),
    ):
        assert importlib.util.find_spec(package) is not None
        assert importlib.metadata.packages_distributions()[package] == [distribution]
        assert importlib.metadata.version(distribution) == version
        assert importlib.metadata.version(distribution.replace("-", "_").upper()) == version
    assert importlib.metadata.version("torch") == torch.__version__
    assert len([d for d in importlib.metadata.distributions() if d.name == "flash-attn"]) == 1


def test_an_installed_package_lends_its_other_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flash_attn"
    (folder / "layers").mkdir(parents=True)
    (folder / "__init__.py").write_text("flash_attn_func = 'theirs'\n")
    (folder / "bert_padding.py").write_text("pad_input = 'theirs'\n")
    (folder / "layers/__init__.py").write_text("rotary = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = importlib.import_module("flash_attn")
    assert theirs.flash_attn_func == "theirs"
    flash_attn.install()
    try:
        ours = importlib.import_module("flash_attn")
        assert ours.flash_attn_func is flash_attn.flash_attn_func
        assert importlib.import_module("flash_attn.layers").rotary == "theirs"
        padding = importlib.import_module("flash_attn.bert_padding")
        assert padding.pad_input is bert_padding.pad_input
    finally:
        flash_attn.uninstall()
    assert sys.modules["flash_attn"] is theirs and "flash_attn.layers" not in sys.modules
    del sys.modules["flash_attn"]


def test_an_error_on_the_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()

    def fail(*given: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(flash_attn._stand_in, "_made", fail)
        with pytest.raises(ZeroDivisionError):
            flash_attn.install()
    assert state() == before


def test_importing_puts_nothing_in_place() -> None:
    code = (
        "import sys, kernel_hub.flash_attn, kernel_hub.flash_attn_interface\n"
        "assert not [n for n in sys.modules if n.partition('.')[0].startswith('flash_attn')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

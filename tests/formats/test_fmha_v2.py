"""fmha_v2: the names, the struct, and finding kernels in files. No driver is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_hub.errors import (
    CubinNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
    ParamsError,
)
from kernel_hub.formats import carray, fmha_v2
from kernel_hub.formats.fmha_v2 import KernelName, launch_shape, parse_name

CUBIN = Path(__file__).parent / "data/fmha_stand_in.cubin"
FLASH = "fmha_v2_flash_attention_"


def test_fields_of_a_symbol() -> None:
    text = f"{FLASH}bf16_64_128_S_q_paged_kv_192x128_causal_softcapping_sm80_kernel_nl_tiled"
    assert parse_name(text) == KernelName(
        text=text,
        dtype="bf16",
        accumulation="fp32",
        q_step=64,
        kv_step=128,
        seq_len=None,
        layout="q_paged_kv",
        head_dim=192,
        head_dim_v=128,
        mask="causal",
        attributes=("softcapping",),
        arch="sm80",
        variant="nl_tiled",
    )


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "fp16_64_32_S_qkv_128_sm90_kernel_nl",
            {"accumulation": "fp16", "mask": "padding", "variant": "nl", "head_dim_v": 128},
        ),
        (
            "fp16_fp32_64_256_S_q_kv_64_sliding_or_chunked_causal_softmax_tma_ws_sm90_kernel",
            {
                "accumulation": "fp32",
                "mask": "sliding_or_chunked_causal",
                "attributes": ("softmax", "tma_ws"),
                "variant": "tma_ws",
                "layout": "q_kv",
            },
        ),
        (
            "bf16_64_128_S_qkv_192x128_sliding_window_causal_sm90_kernel_nl_tiled",
            {"mask": "sliding_window_causal", "variant": "nl_tiled", "attributes": ()},
        ),
        (
            "e4m3_64_256_S_q_k_v_128_custom_mask_output_bf16_tma_ws_sm90_kernel",
            {"out_dtype": "bf16", "mask": "custom_mask", "layout": "q_k_v", "dtype": "e4m3"},
        ),
        (
            "e4m3_64_256_S_qkv_80_sage_64_64_256_output_fp16_tma_ws_sm90_kernel",
            {"attributes": ("sage_64_64_256", "output_fp16", "tma_ws"), "out_dtype": "fp16"},
        ),
    ],
)
def test_fields(text: str, fields: dict[str, Any]) -> None:
    name = parse_name(FLASH + text)
    assert {field: getattr(name, field) for field in fields} == fields


def test_whole_sequence_kernels() -> None:
    name = parse_name("fmha_v2_fp16_256_64_causal_ldgsts_sm90_kernel_nl")
    assert (name.seq_len, name.head_dim, name.q_step, name.kv_step) == (256, 64, None, None)
    assert (name.mask, name.variant, name.layout, name.attributes) == (
        *("causal", "nl", "qkv"),
        ("ldgsts",),
    )
    assert parse_name("fmha_v2_fp16_256_64_ldgsts_sm90_kernel").variant == "plain"


@pytest.mark.parametrize(
    "wrapped",
    ["cubin_{}_cu_cubin", "cubin_{}_cu_cubin_len", "{}.cubin.cpp", "{}.cubin", "{}.cu.cubin", "{}"],
)
def test_names_of_arrays_and_files(wrapped: str) -> None:
    text = f"{FLASH}fp16_64_128_S_qkv_128_tma_ws_sm90"
    name = parse_name(wrapped.format(text))
    assert (name.text, name.mask, name.variant) == (text, None, "tma_ws")
    plain = parse_name(wrapped.format(f"{FLASH}fp16_64_128_S_qkv_128_sm80"))
    assert (plain.mask, plain.variant) == (None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rms_norm_bf16", "does not begin with fmha_v2_"),
        ("fmha_v2_il_int8_192_64_sm80_kernel", "at 'il_int8_192_64_sm80_kernel' expected a dtype"),
        (f"{FLASH}fp16_64_S_qkv_128_sm80", "at '_64_S_qkv_128_sm80' expected _<q_step>_<kv_step>"),
        (f"{FLASH}fp16_64_128_S_128_sm80", "at '_S_128_sm80' expected _S_ and a layout: qkv,"),
        (f"{FLASH}fp16_64_0_S_qkv_128_sm80", "at '_64_0_S_qkv_128_sm80' expected _<q_step>"),
        (f"{FLASH}fp16_64_32_S_qkv_{'9' * 5000}_sm80", "expected _<head_dim>"),
        (f"{FLASH}fp16_64_128_S_qkv_sm80", "at '_sm80' expected _<head_dim>"),
        (f"{FLASH}fp16_64_128_S_qkv_128_new_sm80", "at '_new_sm80' expected _sm<NN>, after"),
        (f"{FLASH}fp16_64_128_S_qkv_128_sm80_kernel_fast", "at '_kernel_fast' expected the end"),
        (f"{FLASH}fp16_64_128_S_qkv_128_sm80_kernel_nl\n", "expected the end"),
        ("", "does not begin"),
    ],
)
def test_other_names_are_refused(text: str, said: str) -> None:
    with pytest.raises(FunctionNotFoundError) as caught:
        parse_name(text)
    assert said in str(caught.value)
    for other in (3, [], None, b"fmha_v2_"):
        with pytest.raises(ParamsError, match=f"a str, not {type(other).__name__}"):
            parse_name(other)  # type: ignore[arg-type]


@given(
    dtype=st.sampled_from(["fp16", "bf16", "e4m3", "fp16_fp32"]),
    sizes=st.tuples(*[st.integers(1, 999)] * 4),
    layout=st.sampled_from(["qkv", "q_kv", "q_k_v", "q_paged_kv"]),
    mask=st.sampled_from(["padding", "causal", "sliding_or_chunked_causal", "custom_mask"]),
    attributes=st.lists(
        st.sampled_from(["alibi", "softcapping", "softmax", "sage_1_2_3", "output_bf16", "mtp"]),
        unique=True,
    ),
    variant=st.sampled_from(["nl", "nl_tiled", "tma_ws"]),
)
def test_what_is_written_is_read(
    dtype: str,
    sizes: tuple[int, ...],
    layout: str,
    mask: str,
    attributes: list[str],
    variant: str,
) -> None:
    q_step, kv_step, depth, depth_v = sizes
    through_tma = variant == "tma_ws"
    words = [w for w in ("" if mask == "padding" else mask, *attributes) if w]
    words += ["tma_ws"] * through_tma
    text = f"{FLASH}{dtype}_{q_step}_{kv_step}_S_{layout}_{depth}x{depth_v}_"
    text += "_".join([*words, "sm90", "kernel"]) + ("" if through_tma else f"_{variant}")
    name = parse_name(text)
    assert (name.dtype, name.q_step, name.kv_step) == (dtype[:4], q_step, kv_step)
    assert (name.head_dim, name.head_dim_v, name.layout) == (depth, depth_v, layout)
    assert (name.mask, name.variant, name.arch) == (mask, variant, "sm90")
    assert name.attributes == (*attributes, *["tma_ws"] * through_tma)
    assert name.matches(layout=layout, mask=mask, attributes=set(name.attributes))
    assert parse_name(f"cubin_{text}_cu_cubin") == name


@given(st.text("_abcfhkmnqsvx0189 \n", max_size=60))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    for whole in (text, FLASH + text, f"{FLASH}fp16_64_128_S_qkv_128{text}"):
        try:
            assert parse_name(whole).text in whole
        except FunctionNotFoundError:
            continue


def offsets(text: str) -> dict[str, int]:
    words = text.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


# Of the sizes that the traits of TensorRT-LLM's own sources give when compiled.
SHARED_BYTES = """
    fp16_64_64_S_qkv_16_sm80_kernel_nl 6144
    bf16_64_32_S_qkv_48_sm80_kernel_nl 16384
    fp16_64_32_S_qkv_128_sm80_kernel_nl 32768
    fp16_fp32_64_16_S_qkv_256_sm80_kernel_nl 49152
    fp16_128_128_S_q_kv_16_sm80_kernel_nl_tiled 16384
    bf16_128_128_S_q_kv_64_sm80_kernel_nl_tiled 65536
    fp16_64_128_S_q_paged_kv_72_sm80_kernel_nl_tiled 81920
    fp16_64_128_S_q_paged_kv_256_sm80_kernel_nl_tiled 81920
    bf16_64_128_S_q_k_v_192x128_sm80_kernel_nl_tiled 81920
    bf16_64_64_S_q_paged_kv_576x512_sm80_kernel_nl_tiled 49152
    e4m3_fp32_128_128_S_q_paged_kv_32_sm89_kernel_nl 12288
    e4m3_fp32_64_32_S_q_paged_kv_128_sm89_kernel_nl 32768
    e4m3_fp32_64_32_S_q_paged_kv_256_output_bf16_sm89_kernel_nl 65536
    e4m3_fp32_64_64_S_q_paged_kv_192x128_sm89_kernel_nl_tiled 32768
    e4m3_fp32_64_64_S_q_paged_kv_576x512_sm89_kernel_nl_tiled 65536"""


def test_shared_memory() -> None:
    function = fmha_v2.load(CUBIN).popitem()[1]
    for text, expected in offsets(SHARED_BYTES).items():
        name = parse_name(FLASH + text)
        assert launch_shape.shared_bytes(name, function, 0) == expected, text
        assert launch_shape.block_threads(name, function) == 128
    whole = parse_name("fmha_v2_fp16_256_64_ldgsts_sm90_kernel_nl")
    with pytest.raises(LaunchConfigError, match="shared_bytes= is needed"):
        launch_shape.shared_bytes(whole, function, 0)
    with pytest.raises(LaunchConfigError, match="threads= is needed"):
        launch_shape.block_threads(whole, function)
    assert launch_shape.shared_bytes(whole, function, 0, 0) == 0
    assert launch_shape.block_threads(whole, function, 256) == 256


# -- loading


def test_load_a_source_and_find(tmp_path: Path) -> None:
    source = tmp_path / "fmha.cubin.cpp"
    numbers = ", ".join(map(hex, CUBIN.read_bytes()))
    source.write_text(f"unsigned char cubin_fmha_cu_cubin[] = {{{numbers}}};\n")
    kernels = fmha_v2.load(source)
    assert kernels.keys() == fmha_v2.load(CUBIN).keys()
    assert len(kernels) == 12
    assert fmha_v2.load(carray.load(source)).keys() == kernels.keys()
    found = fmha_v2.find(kernels, variant="tma_ws", attributes=["tma_ws", "softmax"])
    assert found.name == str(parse_name(found.name))
    assert parse_name(found.name).layout == "q_kv"
    with pytest.raises(FunctionNotFoundError, match="no kernels with dtype='fp8'; there are: fmha"):
        fmha_v2.find(kernels, dtype="fp8")
    with pytest.raises(FunctionNotFoundError, match="3 kernels with variant='nl_tiled'; they are"):
        fmha_v2.find(kernels, variant="nl_tiled")
    with pytest.raises(ParamsError, match="no such field"):
        fmha_v2.find(kernels, masks="causal")
    alone = fmha_v2.find(kernels, layout="q_paged_kv", attributes="tma_ws")
    assert parse_name(alone.name).attributes == ("tma_ws",)
    for attributes in (5, None, [1], [["tma_ws"]], {"tma_ws": 1}):
        with pytest.raises(ParamsError, match=r"attributes=.*: a str, or a tuple, list or set"):
            fmha_v2.find(kernels, attributes=attributes)
    for other in (None, "abc", {"a": 1}, [parse_name(alone.name)]):
        with pytest.raises(ParamsError, match=r"kernels=.*: the dict that load\(\) gave"):
            fmha_v2.find(other, mask="causal")  # type: ignore[arg-type]
    with pytest.raises(FunctionNotFoundError, match="there are: none"):
        fmha_v2.find({}, mask="causal")


def test_load_refuses_other_images() -> None:
    with pytest.raises(
        FunctionNotFoundError, match=r"no fmha_v2 kernel in .* it has: launch_probe"
    ):
        fmha_v2.load(Path(__file__).parents[2] / "cubins/sm90/launch_probe.cubin")
    with pytest.raises(ParamsError, match="a path or a dict"):
        fmha_v2.load(3)
    with pytest.raises(CubinNotFoundError):
        fmha_v2.load("missing.cubin.cpp")

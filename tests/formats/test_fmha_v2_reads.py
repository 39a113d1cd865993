"""Which struct an fmha_v2 kernel reads, told by its machine code."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drawn
import make_fmha_data
import pytest
from fakecuda import FakeCuda
from fmha_calls import CUBIN, DATA, FILES, HEADS, TOTAL, array, changed, load, starts

from kernel_hub import Kernel, KernelFunction
from kernel_hub.compilers.nvcc import Nvcc, find_nvcc
from kernel_hub.errors import KernelHubError, LaunchConfigError, ParamsError
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import KernelName, param_struct, struct_layouts
from kernel_hub.formats.fmha_v2.reads import Field, Read, all_fields, fields_read, struct_reads

DIM = 128
CAUSAL = "fmha_v2_flash_attention_fp16_64_32_S_qkv_128_causal_sm90_kernel_nl"
Reads = frozenset[Read]


def told(struct: str, name: KernelName, reads: Reads) -> str:
    """The struct that these reads are taken for, or the error's first words."""
    size = ctypes.sizeof(getattr(param_struct, struct))
    layouts = [one for one in struct_layouts.LAYOUTS if ctypes.sizeof(one.struct) == size]
    try:
        return struct_layouts._tell(layouts, name, reads, size)[0].struct.__name__
    except ParamsError as error:
        return "two" if " or " in str(error) else "none"


# -- genuine kernels: data/fmha_reads.txt, written by make_fmha_reads.py


def genuine() -> Iterator[tuple[str, KernelName, Reads]]:
    """(struct, name, reads): of each kind of kernel one.

    Of TensorRT-LLM 0.16, of September 2025 as published and as nvcc 13.0 builds it, of the latter
    without sinks too, and of TensorRT-Edge-LLM; nvdisasm was seen to agree with the reads.
    """
    for line in (DATA / "fmha_reads.txt").read_text(encoding="utf-8").splitlines():
        struct, name, *reads = line.split()
        pairs = (Read(*map(int, read.split(":"))) for read in reads)
        yield struct, fmha_v2.parse_name(name), frozenset(pairs)


GENUINE = list(genuine())


def test_genuine_kernels() -> None:
    assert len(GENUINE) == 298
    for struct, name, reads in GENUINE:
        assert told(struct, name, reads) == struct, str(name)
        made = getattr(param_struct, struct)
        fields = fields_read(made, reads)
        assert fields is not None and not struct_layouts._oddities(made, name, fields), str(name)


def without(field: Field, struct: str, reads: Reads) -> Reads:
    """The same reads but for those of a field; of wider ones the neighbours remain."""
    left = {read for read in reads if not touches(read, field)}
    for read in reads - left:
        for other in all_fields(getattr(param_struct, struct)):
            if other != field and touches(read, other) and not any(touches(r, other) for r in left):
                left.add(Read(other.offset, other.size))
    return frozenset(left)


def touches(read: Read, field: Field) -> bool:
    return read.offset < field.offset + field.size and field.offset < read.offset + read.size


def test_a_field_more_or_fewer() -> None:
    """Kernels of another build may read one: they are told all the same.

    But for two structs that differ by one pointer: without what tells them apart, neither is taken.
    """
    rng = random.Random(21)
    undecided = 0
    for struct, name, reads in GENUINE:
        made = getattr(param_struct, struct)
        fields = all_fields(made)
        read = fields_read(made, reads)
        assert read is not None
        spare = [one for one in fields if one.name in read - struct_layouts._essential(name)]
        unread = [one for one in fields if one.name not in read and one.size <= 8]
        for one in rng.sample(spare, 6):
            found = told(struct, name, without(one, struct, reads))
            assert found in (struct, "two"), (str(name), one)
            undecided += found != struct
            assert found == struct or struct == "ParamsWithoutSinks", (str(name), one)
        for one in rng.sample(unread, 6):
            more = reads | {Read(one.offset, one.size)}
            assert told(struct, name, more) == struct, (str(name), one)
    assert undecided < 10


def test_neighbours_read_at_once() -> None:
    """As compilers do by their own lights: words that are all read, at once where they lie so."""
    rng = random.Random(22)
    joined = 0
    for struct, name, reads in GENUINE:
        made = {read for read in reads if read.size < 4}
        words = {at for read in reads - made for at in range(read.offset, sum(read), 4)}
        while words:
            first = min(words)
            sizes = [
                n for n in (4, 8, 16) if not first % n and words >= {*range(first, first + n, 4)}
            ]
            size = rng.choice(sizes)
            made.add(Read(first, size))
            words -= {*range(first, first + size, 4)}
            joined += size > 4
        assert told(struct, name, frozenset(made)) == struct, str(name)
    assert joined > 1000


def test_a_struct_with_one_more_field_is_refused() -> None:
    """What lies behind it is elsewhere: no version that is run here is taken for such a one."""
    rng = random.Random(23)
    refused = {one.struct.__name__ for one in struct_layouts.LAYOUTS if one.refused}
    for struct, name, reads in GENUINE:
        fields = all_fields(getattr(param_struct, struct))
        for field in rng.sample(fields, 8):
            moved = frozenset(
                Read(offset + 8, size) if offset >= field.offset else Read(offset, size)
                for offset, size in reads
            )
            behind = {read.offset for read in reads} - {read.offset for read in moved}
            if behind and not any(one.startswith("sage") for one in name.attributes):
                assert told(struct, name, moved) in {"none", *refused}, (str(name), field)


def test_essential_fields() -> None:
    for struct, name, reads in GENUINE:
        made = getattr(param_struct, struct)
        essential = struct_layouts._essential(name)
        for one in all_fields(made):
            if one.name in essential:
                found = told(struct, name, without(one, struct, reads))
                assert found != struct, (str(name), one)


# -- the stand-ins


BUILDS = [*((file, "sm_90a") for file in FILES), *((file, "sm_80") for file in ("640", "512"))]


@pytest.mark.slow
def test_the_gpu_tests_kernels(make_fakecuda: Callable[..., FakeCuda], tmp_path: Path) -> None:
    """As the machine's own nvcc builds them: each is taken for the struct it was built with."""
    try:
        nvcc = find_nvcc()
    except KernelHubError as missing:
        pytest.skip(f"they must be compiled: {missing}")
    for file, arch in drawn.some(BUILDS, 3, "stand-ins"):
        make_fakecuda(capability=(int(arch[3]), 0))
        check_build(nvcc, tmp_path / f"{file}_{arch}.cubin", file, arch)


def check_build(nvcc: Nvcc, target: Path, file: str, arch: str) -> None:
    source = Path(__file__).parents[1] / "gpu/fmha_stand_in.cu"
    flags = ["-cubin", f"-arch={arch}", "-std=c++17", f"-DSTRUCT={make_fmha_data.STRUCTS[file]}"]
    subprocess.run([nvcc.path, *flags, "-o", target, source], check=True)
    kernels = fmha_v2.load(target)
    assert len(kernels) == (12 if file in ("stand_in", "without_sinks") else 6)
    for name, function in kernels.items():
        found = struct_layouts.reader_of(function.load(0), name, 0)
        assert found.layout.struct.__name__ == FILES[file], str(name)


@pytest.mark.parametrize("file", FILES)
def test_each_kernels_struct(fakecuda: FakeCuda, file: str) -> None:
    for name, function in fmha_v2.load(DATA / f"fmha_{file}.cubin").items():
        function.load(0)
        found = struct_layouts.reader_of(function, name, 0)
        assert found.layout.struct.__name__ == FILES[file], str(name)
        assert struct_layouts.reader_of(function, name, 0) is found


def test_reads_of_machine_code() -> None:
    """Those of one stand-in: what `read_always` of its source names, and no more."""
    reads = struct_reads((DATA / "fmha_640.cubin").read_bytes(), CAUSAL, 640)
    assert fields_read(param_struct.Params640, reads) == {
        *("qkv", "qkv_stride", "out", "out_stride", "softmax_stats", "softmax_stats_stride"),
        *("num_heads", "num_kv_heads", "max_seqlen_q", "head_dim", "head_dim_v"),
        *("cu_seqlens_q", "has_alibi", "alibi.num_heads_pow2", "is_padded"),
    }


def test_bytes_and_fields() -> None:
    fields = {field.name: field for field in all_fields(param_struct.Params)}
    assert fields["paged.pool"][:3] == ("paged.pool", 64, 8)
    short = {field.name for field in all_fields(param_struct.LongParams512)}
    assert short == {field.name for field in all_fields(param_struct.Params512)}
    for reads, found in (
        ([(96, 8)], {"out"}),
        ([(96, 4), (100, 4)], {"out"}),
        ([(96, 16)], {"out", "softmax_stats"}),
        ([(456, 8)], {"batch_size", "num_heads"}),
        ([(56, 8)], {"paged.bytes_per_block"}),  # padding follows
        ([(592, 2)], {"balanced", "is_padded"}),
        ([(593, 1)], {"is_padded"}),
        ([(492, 1)], {"log2_chunk_size"}),
        ([(192, 8), (200, 4)], {"tma_q"}),
        ([(100, 4)], None),  # half a pointer
        ([(98, 4)], None),
        ([(160, 4)], None),
        ([(561, 1)], None),
        ([(560, 1)], None),  # a byte of a float
        ([(704, 4)], None),
    ):
        assert fields_read(param_struct.Params, frozenset(Read(*one) for one in reads)) == found, (
            reads
        )


# -- refused


def run(function: KernelFunction, *inputs: Any, **options: Any) -> Any:
    return fmha_v2.run(function, *inputs, cu_seqlens=starts(20, TOTAL), **options)


def test_another_struct_of_the_same_size_is_refused(fakecuda: FakeCuda) -> None:
    function = load("edge", mask="causal", variant="nl")
    with pytest.raises(LaunchConfigError, match="is of TensorRT-Edge-LLM: its kernels are not run"):
        run(function, array(TOTAL, 3, HEADS, DIM))
    assert fakecuda.launch_count == 0


def test_a_struct_that_is_not_known_is_refused(fakecuda: FakeCuda) -> None:
    rng = random.Random(11)
    image = CUBIN.read_bytes()
    known = {field.offset for field in all_fields(param_struct.Params) if field.size == 8}
    for field in ("out", "cu_seqlens_q", "qkv"):
        old = getattr(param_struct.Params, field).offset
        # A field of another place; a byte that is no field's.
        for new in (rng.choice(sorted(known - {old})), 160, 696):
            function = Kernel(changed(image, CAUSAL, 704, old, new))[CAUSAL]
            with pytest.raises(ParamsError, match="reads its struct of 704 bytes as") as caught:
                run(function, array(TOTAL, 3, HEADS, DIM))
            assert "no version known here would have it" in str(caught.value)
    assert fakecuda.launch_count == 0


def test_two_oddities_are_refused(fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    function = load("stand_in", mask="custom_mask", layout="q_kv").load(0)
    name = fmha_v2.parse_name(function.name)
    places = {field.name: Read(*field[1:3]) for field in all_fields(param_struct.Params)}
    fields = [
        *("q", "q_stride", "out", "out_stride", "num_heads", "max_seqlen_q", "is_padded"),
        *("cu_seqlens_q", "packed_mask", "packed_mask_stride", "cu_mask_rows"),
        *("softmax_stats", "softmax_stats_stride"),
    ]
    reads = frozenset(places[field] for field in fields)
    newest = "to TensorRT-LLM from August 2025 on it"
    for made, said in (
        (reads | {Read(160, 4)}, r"no version known here .*\(bytes 8, 80, .*, 160, 460,"),
        (
            reads - {places["out_stride"], places["is_padded"]},
            f"known here .*; {newest} should read is_padded, it should read out_stride",
        ),
        (
            (reads | {places["softcap"]}) - {places["is_padded"]},
            f"known here .*; {newest} should read is_padded, it has no use for softcap",
        ),
    ):
        monkeypatch.setattr(struct_layouts, "struct_reads", lambda *_, made=made: made)
        with pytest.raises(ParamsError, match=said):
            struct_layouts.reader_of(function, name, 0)
    monkeypatch.setattr(struct_layouts, "struct_reads", lambda *_: reads)
    reader = struct_layouts.reader_of(function, name, 0)
    assert (reader.layout.struct, reader.may_assert) == (param_struct.Params, False)
    assert reader.fields == set(fields)


def test_structs_that_the_reads_do_not_tell_apart(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Longer(ctypes.Structure):
        """As Params, with a field more where there was padding."""

        _fields_ = (
            *param_struct.Params._fields_[:-1],
            ("more", ctypes.c_uint64),
            ("_to_704", ctypes.c_uint8 * 48),
        )

    later = struct_layouts.StructLayout(Longer, "a later one")
    monkeypatch.setattr(struct_layouts, "LAYOUTS", (*struct_layouts.LAYOUTS, later))
    for name, function in fmha_v2.load(CUBIN).items():
        with pytest.raises(ParamsError, match="August 2025 on or a later one would have it"):
            struct_layouts.reader_of(function.load(0), name, 0)


def test_other_sizes_and_images_without_machine_code(fakecuda: FakeCuda) -> None:
    ptx = """.version 8.0
.target sm_90
.address_size 64
.visible .entry {name}(.param .align 64 .b8 p[{size}]) {{ ret; }}
"""
    for size, said in (
        (704, "only machine code tells which one a kernel reads; its image for this GPU is ptx"),
        (448, r"takes parameters of \[448\] bytes, not one struct of 512, 576, 640, 704"),
    ):
        function = Kernel(ptx.format(name=CAUSAL, size=size))[CAUSAL]
        with pytest.raises(ParamsError, match=said):
            run(function, array(TOTAL, 3, HEADS, DIM))
    assert fakecuda.launch_count == 0

"""Images in C sources: as bin2c, xxd and people write them, and damaged in every way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_hub import Kernel
from kernel_hub.errors import CubinCorruptError, CubinNotFoundError, ParamsError
from kernel_hub.formats import carray, fmha_v2

ROOT = Path(__file__).resolve().parents[2]
CUBIN = (ROOT / "cubins/sm90/launch_probe.cubin").read_bytes()
PTX = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u32 n)\n{ ret; }\n"
ELF = b"\x7fELF"


def array(name: str, data: bytes, kind: str = "unsigned char", width: int = 1) -> str:
    data = data + b"\0" * (-len(data) % width)
    words = [data[i : i + width] for i in range(0, len(data), width)]
    numbers = ", ".join(f"{int.from_bytes(word, 'little'):#04x}" for word in words)
    return f"{kind} {name}[] = {{\n{numbers}\n}};\n"


def test_a_cubin_as_tensorrt_llm_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "x.cubin.cpp"
    path.write_text(
        '#include "a.h"\n/* a comment with unsigned char fake[] = {1}; */\nnamespace kernels\n{\n'
        "#ifndef EXCLUDE_SM_90\n// clang-format off\n"
        + array("cubin_x_cu_cubin", CUBIN)
        + f"uint32_t cubin_x_cu_cubin_len = {len(CUBIN)}U;\n#endif\n}} // namespace kernels\n"
    )
    images = carray.load(path)
    assert images == {"cubin_x_cu_cubin": CUBIN}
    path.write_bytes(
        path.read_bytes().replace(b"#endif", b"#define X \\\n {").replace(b"\n", b"\r\n")
    )
    assert carray.load(path) == images
    kernel = Kernel(images["cubin_x_cu_cubin"])
    assert kernel.function_names == Kernel(CUBIN).function_names != []


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        ("const unsigned char", 1),
        ("static const std::uint8_t", 1),
        ("alignas(8) static unsigned char const", 1),
        ("unsigned short", 2),
        ("const uint32_t", 4),
        ("static unsigned", 4),
        ("static const unsigned long long", 8),
        ("uint64_t const", 8),
    ],
)
def test_every_integer_type_keeps_its_bytes(kind: str, width: int) -> None:
    padded = CUBIN + b"\0" * (-len(CUBIN) % width)
    assert carray.loads(array("image", CUBIN, kind, width)) == {"image": padded}


def test_attributes_between_name_and_numbers() -> None:
    text = array("image", CUBIN).replace("[] =", "[] __attribute__((aligned(8))) =")
    assert carray.loads(text) == {"image": CUBIN}


def test_several_images_and_arrays_that_hold_none() -> None:
    text = array("table", bytes(range(20))) + array("a", CUBIN) + array("p", PTX + b"\0", "char")
    text += "float weights[] = {1.5f, 2.5f};\n" + f"int p_len = {len(PTX)};\n"
    assert carray.loads(text) == {"a": CUBIN, "p": PTX + b"\0"}


def test_decimal_octal_and_suffixes() -> None:
    numbers = "127, 0105, 0x4CU, 0b1000110"
    text = f"unsigned char e[] = {{{numbers}}}; unsigned char e2[] = {{{numbers},}};"
    assert carray.loads(text) == {"e": ELF, "e2": ELF}


@pytest.mark.skipif(shutil.which("xxd") is None, reason="xxd is not installed")
def test_xxd(tmp_path: Path) -> None:
    (tmp_path / "k.cubin").write_bytes(CUBIN)
    out = subprocess.run(["xxd", "-i", "k.cubin"], cwd=tmp_path, capture_output=True, check=True)
    assert carray.loads(out.stdout.decode()) == {"k_cubin": CUBIN}


@pytest.mark.skipif(shutil.which("bin2c") is None, reason="bin2c is not on PATH")
@pytest.mark.parametrize("kind", ["char", "short", "int", "longlong"])
def test_bin2c(tmp_path: Path, kind: str) -> None:
    (tmp_path / "k.cubin").write_bytes(CUBIN)
    command = ["bin2c", "--const", "--name", "image", "--type", kind, "k.cubin"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    (image,) = carray.loads(out.stdout.decode()).values()
    assert image[: len(CUBIN)] == CUBIN


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=80), width=st.sampled_from([1, 2, 4, 8]), base=st.sampled_from("xdo")
)
def test_any_bytes_come_back(data: bytes, width: int, base: str) -> None:
    data = ELF + data
    data += b"\0" * (-len(data) % width)
    kind = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}[width]
    form = {"x": "{:#x}", "d": "{}", "o": "0{:o}"}[base]
    words = [
        form.format(int.from_bytes(data[i : i + width], "little"))
        for i in range(0, len(data), width)
    ]
    text = f"{kind} image[{len(words)}] = {{{','.join(words)}}};"
    assert carray.loads(text) == {"image": data}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unsigned char a[] = {0x7f, 0x45, 0x4c", "src: a (line 1) is cut off"),
        ("\n\nunsigned char a[] = {0x7f, oops};", "a (line 3): element 1 is 'oops', not a number"),
        ("unsigned char a[] = {0x7f, 0x145};", "element 1 is 0x145, more than 1 bytes hold"),
        ("unsigned char a[] = {0x7f, -1};", "element 1 is '-1'"),
        ("unsigned char a[] = {09};", "element 0 is '09'"),
        ("unsigned char a[9] = {0x7f, 0x45};", "declared with 9 bytes and lists 2, which are no"),
        ("unsigned char a[1] = {0x7f, 0x45};", "declared with 1 elements and lists 2"),
        (
            "\n#define N 2\nchar a[N] = {1, 2, 3};",
            "a (line 3) is declared with N elements",
        ),
        (array("a", CUBIN[:-9]).replace("[]", "[9999999]"), "no whole image: it was cut or edited"),
        (array("a", ELF) + "unsigned a_len = 400;", "a (line 1) has 4 bytes, and the file gives"),
        (array("a", ELF) + array("a", ELF + b"x"), "two different arrays are called a"),
        (array("a", ELF) + "int a_len = 010;", "4 bytes, and the file gives its length as 010"),
        (array("a", ELF) + "int a_len = 09;", "the file gives its length as 09"),
        (array("a", ELF) + f"int a_len = {'9' * 5000};", f"its length as {'9' * 24}:"),
        ("unsigned char a[01] = {1, 2};", "declared with 01 elements and lists 2"),
        ("unsigned char a[08] = {1, 2};", "declared with 08 elements and lists 2"),
        (f"unsigned char a[] = {{{'9' * 5000}}};", f"element 0 is '{'9' * 24}', not a number"),
        ("unsigned char a[] = {0x7f'45};", 'element 0 is "0x7f\'45", not a number'),
        ("unsigned char a[] = /* b[ */\n= {1};\n\nchar c[1] = {1, 2};", "c (line 4)"),
    ],
)
def test_damage_is_named(text: str, words: str) -> None:
    with pytest.raises(CubinCorruptError) as caught:
        carray.loads(text, "src")
    assert words in str(caught.value)


def triton_source(name: str, data: bytes, digits_an_element: int = 1) -> str:
    """What surrounds the image in the sources that Triton's compile.py writes.

    digits_an_element: before 3.0 the array is declared with the number of its hex digits, so
    that C fills its second half with zeros.
    """
    listed = ", ".join(f"0x{byte:02x}" for byte in data)
    return f"""
#define CUDA_CHECK(ans) {{\\
    check((ans), __FILE__, __LINE__);\\
  }}\\

static inline void check(CUresult code, const char *file, int line) {{
    char err[1024] = {{0}};
    printf("%s\\n", err);
}}
#define CUBIN_NAME {name}_cubin
CUmodule {name}_mod = NULL;
unsigned char CUBIN_NAME[{len(data) * digits_an_element}] = {{ {listed} }};
CUresult {name}(CUstream stream, CUdeviceptr x, int n) {{
    CUdeviceptr global_scratch = 0;
    void *args[3] = {{ &x, &n, &global_scratch }};
    unsigned int sizes[2] = {{ (n + 3) / 4, 1 }};
}}
"""


@pytest.mark.parametrize("digits", [1, 2])
def test_a_source_as_triton_writes_it(digits: int) -> None:
    text = triton_source("add_785f2513_0d1d2", CUBIN, digits)
    assert carray.loads(text) == {"add_785f2513_0d1d2_cubin": CUBIN}
    two = text + triton_source("add_11111111_0d1d2", CUBIN[:-1] + b"\0", digits)
    assert sorted(carray.loads(two)) == ["CUBIN_NAME"]  # one macro of two meanings says nothing
    cut = triton_source("add_785f2513_0d1d2", CUBIN[: len(CUBIN) // 2], 2 * digits)
    with pytest.raises(CubinCorruptError, match="no whole image: it was cut or edited"):
        carray.loads(cut)


@pytest.mark.parametrize("digits", [1, 2])
def test_triton_s_own_template(digits: int) -> None:
    """As the installed compile.py fills it, which needs an active GPU driver itself."""
    found = pytest.importorskip("triton.tools", reason="the template is Triton's")
    folder = Path(found.__path__[0]) / "extra/cuda"
    names = re.findall(r"(?<!{){(\w+)}(?!})", (folder / "compile.c").read_text())
    values = {
        **dict.fromkeys(names, "1"),
        "kernel_name": "add_785f2513_0d1d2",
        "bin_size": len(CUBIN) * digits,
        "bin_data": ", ".join(f"0x{byte:02x}" for byte in CUBIN),
        "signature": "CUdeviceptr x, int32_t n",
        "arg_pointers": "&x, &n, &global_scratch, &profile_scratch",
        "num_args": 4,
        "_placeholder": "",
        "full_signature": "CUdeviceptr x, int32_t n",
        "algo_info": "256_warps4xstages3",
        "backend_name": "cuda",  # since Triton 3.7
    }
    text = (folder / "compile.c").read_text().format(**values)
    assert carray.loads(text) == {"add_785f2513_0d1d2_cubin": CUBIN}
    with pytest.raises(CubinNotFoundError, match="no integer array"):
        carray.loads((folder / "compile.h").read_text().format(**values))


def test_sizes_by_macros_that_the_file_defines() -> None:
    size = f"#define SIZE BYTES\n#  define BYTES {len(CUBIN)}\n"
    text = array("a", CUBIN).replace("[]", "[SIZE]")
    assert carray.loads(size + text) == carray.loads(text) == {"a": CUBIN}
    loop = "#define SIZE BYTES\n#define BYTES SIZE\n"
    either = f"#ifdef A\n#define SIZE 1\n#else\n#define SIZE {len(CUBIN)}\n#endif\n"
    assert carray.loads(loop + text) == carray.loads(either + text) == {"a": CUBIN}
    with pytest.raises(CubinCorruptError, match=r"a \(line 2\) is declared with SIZE elements"):
        carray.loads("#define SIZE 16\n" + text)


@pytest.mark.parametrize(
    "others",
    [
        "int wide[2][2] = {{1, 2}, {3, 4}}; char err[1024] = {0}; int m[2] = {FIRST, SECOND};",
        "unsigned char table[4] = {1, 2, 3}; int big[1] = {0xfffffffff}; short n[3] = {-1, 1, 2};",
        "int n_size = face; int a_len = sizeof(a); int a_size = N;",
        "unsigned n_len = 0100; unsigned char macro[N] = {1}, product[2*3] = {1};",
        "int x[1] = {0}; struct s t = { .a = {1} }; a[0] = x[1] = 5;",
        '#error don\'t "\n#define D \\\n int e[] = {x}\nconst char* d = "}"; // \'',
    ],
)
def test_what_else_a_file_says(others: str) -> None:
    image = array("ns::a", ELF, "extern const unsigned char").replace(
        "[]", "[4] /*" + "c" * 9999 + "*/\n __attribute__((aligned(8)))\n"
    )
    assert carray.loads(f"{others}\n{image}") == {"a": ELF}
    assert carray.loads(f"{image}\n{others}") == {"a": ELF}


@pytest.mark.parametrize(
    "unit", ["a ", "int x[3", '\\"', "int a[]={1};", "={", "a_len ", " ", "/*"]
)
def test_time_is_in_proportion_to_the_text(unit: str) -> None:
    """Not to its square, with which 200 KB of some of these would take over ten minutes."""
    for before in ("", "int x[3]"):
        started = time.perf_counter()
        with pytest.raises((CubinNotFoundError, CubinCorruptError)):
            carray.loads(before + unit * (200_000 // len(unit)))
        assert time.perf_counter() - started < 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no integer array"),
        ("int main() { return 0; }", "no integer array"),
        ("unsigned char a[] = {1, 2, 3};", "a (3 bytes, from 01 02 03)"),
        ("double a[] = {1, 2, 3};", "no integer array"),
    ],
)
def test_no_image_says_what_is_there(text: str, words: str) -> None:
    with pytest.raises(CubinNotFoundError, match="no cubin, fatbin or PTX in src") as caught:
        carray.loads(text, "src")
    assert words in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.cpp")
    (tmp_path / "zero.cpp").symlink_to("/dev/zero")
    for path, said in (
        (tmp_path / "no.cpp", "cannot read"),
        ("nul\0byte", "cannot read"),
        (tmp_path, "is a folder"),
        (tmp_path / "pipe.cpp", "is a pipe or a device"),
        (tmp_path / "zero.cpp", "is a pipe or a device"),
    ):
        with pytest.raises(CubinNotFoundError, match=said):
            carray.load(path)
        with pytest.raises(CubinNotFoundError, match=said):
            fmha_v2.load(path)
    with pytest.raises(ParamsError, match="a str, not bytes"):
        carray.loads(b"unsigned char")  # type: ignore[arg-type]
    with pytest.raises(ParamsError, match="a path, not bytes"):
        carray.load(b"unsigned char")  # type: ignore[arg-type]

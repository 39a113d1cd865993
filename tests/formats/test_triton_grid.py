"""Grid expressions: what Python computes is what C computes, and what is none is refused."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from exported import COMPILERS

from kernel_hub.errors import LaunchConfigError, ParamsError
from kernel_hub.formats.c_export.text import functions_used
from kernel_hub.formats.triton.grid import Grid

BINARY = ["+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^", "<", "<=", ">", ">=", "==", "!="]
LAST = (1 << 63) - 1
VALUES = [0, 1, 2, 3, 7, 16, 31, 64, 1000, -1, -5, (1 << 31) - 1, -(1 << 31), LAST, -LAST - 1]


def test_what_triton_s_users_write() -> None:
    sizes = {"n": 1000, "m": 33, "BLOCK": 256, "heads": 8}
    for text, expected in {
        "n": (1000, 1, 1),
        "(n + BLOCK - 1) / BLOCK, heads": (4, 8, 1),
        "(n + 1023) / 1024, 1, 1": (1, 1, 1),
        "triton.cdiv(n, BLOCK) * tl.cdiv(m, 16), heads, 2": (12, 8, 2),
        "n % 2 == 0 ? min(n, 4) : max(n, 4)": (4, 1, 1),
        "m>32&&n||0, 0x10 | 1, 010": (1, 17, 8),
        "-n + 1001 - - 1, !n, ~n + n + 1": (2, 0, 0),
        "1 << 4 >> 2, 2 + 3 * 4 - 20 / 3, (2 + 3) * 4u": (4, 8, 20),
        "n ? m ? 1 : 2 : 3, 0 && n / 0, 1 || n / 0": (1, 0, 1),
    }.items():
        assert Grid(text)(sizes) == expected, text
    assert Grid("cdiv(n, BLOCK) * heads").names == {"n", "BLOCK", "heads"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a text such as"),
        (7, "a text such as"),
        ("n,", "expected a number or a name, found 'the end'"),
        ("n m", "'m' does not belong there"),
        ("(n", r"expected '\)', found 'the end'"),
        ("1, 2, 3, 4", "4 sizes: a grid has up to three"),
        ("n // 2", "expected a number or a name, found '/'"),
        ("n.shape", r"'.shape' is not known"),
        ("system(n)", "no function 'system': cdiv, min, max are"),
        ("cdiv(n)", "expected ','"),
        ("n ? 1", "expected ':'"),
        ("1.5", "is not known"),
        ("09", "09 is no number"),
        ("9" * 30, "no number of 64 bits"),
        ("(" * 99 + "n" + ")" * 99, "nested too deeply"),
        ("-" * 99 + "n", "nested too deeply"),
        ("n; exit(1)", "is not known"),
        ("n" * 3000, "a text such as"),
    ],
)
def test_what_is_no_grid(text: str, words: str) -> None:
    with pytest.raises(ParamsError, match=words):
        Grid(text)


def test_values_that_make_no_grid() -> None:
    for text, words in (
        ("n / (m - m)", "divides by zero for m=3, n=5"),
        ("n % 0", "divides by zero"),
        ("n - 6", r"is \(-1,\) for n=5: each is from 0 to 2147483647"),
        ("n << 40", "each is from 0"),
        ("n << 62", "leaves 64 bits"),
        ("n << 64", "leaves 64 bits"),
        ("9223372036854775807 + n", "leaves 64 bits"),
        ("n - 9223372036854775807 - m - 9", "leaves 64 bits"),
    ):
        with pytest.raises(LaunchConfigError, match=words):
            Grid(text)({"n": 5, "m": 3})


def drawn(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 4 or kind < 0.2:
        return rng.choice(["a", "b", "c", str(min(abs(rng.choice(VALUES)), LAST))])
    if kind < 0.3:
        return f"{rng.choice('-+!~')}({drawn(rng, depth + 1)})"
    first, second = drawn(rng, depth + 1), drawn(rng, depth + 1)
    if kind < 0.4:
        return f"{rng.choice(['cdiv', 'min', 'max'])}({first}, {second})"
    if kind < 0.5:
        return f"({first} ? {second} : {drawn(rng, depth + 1)})"
    if kind < 0.6:
        return f"({first} {rng.choice(['&&', '||'])} {second})"
    if kind < 0.8:
        return f"({first} {rng.choice(BINARY)} {second})"
    return f"{first} {rng.choice(BINARY)} {second}"


def literal(value: int) -> str:
    return f"{value}ll" if value >= -LAST else f"{value + 1}ll - 1"


@pytest.mark.parametrize("language", COMPILERS)
def test_c_computes_the_same(tmp_path: Path, language: str) -> None:
    """400 expressions drawn by lot, 5 times each, compiled with the sanitizer of undefined work."""
    rng = random.Random(11)
    rows, expected = [], []
    while len(rows) < 400:
        grid = Grid(drawn(rng))
        (x, _, _) = grid.as_c(lambda name: name)
        rows.append(f"case {len(rows)}: return {x};")
        for _ in range(5):
            values = {name: rng.choice(VALUES) for name in "abc"}
            try:
                out = str(grid(values)[0])
            except LaunchConfigError as error:
                found = str(error)
                bad = "divides by zero" in found or "leaves 64 bits" in found
                out = "bad" if bad else found.partition(" is (")[2].partition(",")[0]
            expected.append((len(rows) - 1, *values.values(), out))
    body = "static int64_t f(int which, int64_t a, int64_t b, int64_t c, int* at) {\n"
    body += "int bad = 0; (void)a; (void)b; (void)c; (void)bad;\n#define bad (*at)\n"
    body += "switch (which) {\n" + "\n".join(rows) + "\n}\nreturn 0;\n#undef bad\n}\n"
    calls = "\n".join(
        f"bad = 0; got = f({which}, {literal(a)}, {literal(b)}, {literal(c)}, &bad);\n"
        'if (bad) puts("bad"); else printf("%lld\\n", (long long)got);'
        for which, a, b, c, _ in expected
    )
    text = "#include <stdint.h>\n#include <stdio.h>\n" + functions_used("export_grid.c.in", body)
    text += f"{body}int main(void) {{ int bad; int64_t got;\n{calls}\nreturn 0; }}\n"
    (tmp_path / "grid.c").write_text(text)
    command = [*COMPILERS[language], "-w", "-fsanitize=undefined"]
    command += ["-fno-sanitize-recover", "-o", str(tmp_path / "grid"), str(tmp_path / "grid.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    ran = subprocess.run([tmp_path / "grid"], capture_output=True, text=True, check=True)
    for (which, *values, out), got in zip(expected, ran.stdout.split(), strict=True):
        assert got == out, (rows[which], values)
    assert 100 < sum(out == "bad" for *_, out in expected) < len(expected) / 2

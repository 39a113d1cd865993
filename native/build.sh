#!/usr/bin/env bash
# Builds native/launcher.c and its headers -> kernel_hub/native/launcher_linux_x86_64.so, or with --check compares the two.
# Reproducible with one compiler version, which is recorded beside the library. The library's own digest is written into
# cubins/manifest.json; kernel_hub/launch/c_launcher.py opens no other file.
set -euo pipefail
cd "$(dirname "$0")/.."
CC=${CC:-gcc}
out=kernel_hub/native
name=launcher_linux_x86_64
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "the launcher is built on Linux x86_64 only; elsewhere the Python launcher serves"
    exit 0
fi
compiler=$($CC --version | head -n 1)
record="$compiler
$(cat native/launcher.h native/read.h native/launcher.c | sha256sum | cut -d ' ' -f 1)"
made=$(mktemp)
trap 'rm -f "$made"' EXIT
$CC -std=gnu11 -O2 -fPIC -shared -nostdlib -ffreestanding -fvisibility=default -fno-ident -fno-stack-protector \
    -fno-asynchronous-unwind-tables -Wall -Wextra -Werror -Wl,--build-id=none -Wl,-z,now,-z,noexecstack -s \
    -o "$made" native/launcher.c
vouch() { # [is_check=True]
    "${PYTHON:-python3}" -c "
import sys
from pathlib import Path
from kernel_hub.collection.manifest_write import KernelHubError, vouch
try:
    vouch(Path('cubins'), Path('kernel_hub'), 'native/$name.so', $*)
except KernelHubError as error:
    sys.exit(f'{error}: run native/build.sh')"
}
if [ "${1:-}" = --check ]; then
    vouch is_check=True
    if [ "$record" != "$(cat "$out/$name.txt")" ]; then
        if [ "$(tail -n 1 "$out/$name.txt")" != "$(tail -n 1 <<<"$record")" ]; then
            echo "native/launcher.c changed since $out/$name.so was built: run native/build.sh" >&2
            exit 1
        fi
        echo "not compared: built with $(head -n 1 "$out/$name.txt"), here is $compiler"
        exit 0
    fi
    cmp "$made" "$out/$name.so" && echo "$out/$name.so is what native/launcher.c builds"
    exit 0
fi
mkdir -p "$out"
install -m 644 "$made" "$out/$name.so"
echo "$record" >"$out/$name.txt"
vouch
echo "built $out/$name.so ($(stat -c %s "$out/$name.so") bytes, $compiler)"

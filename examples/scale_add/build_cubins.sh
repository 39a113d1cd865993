#!/usr/bin/env bash
# csrc/*.cu -> scale_add/cubins/<arch>/*.cubin + manifest.json. Needs nvcc and kernel_hub.
# Options: see ./build_cubins.sh --help.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" -m kernel_hub.build \
    --csrc "$here/csrc" --out "$here/scale_add/cubins" "$@"

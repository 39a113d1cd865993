#!/usr/bin/env bash
# csrc/**/*.cu -> cubins/<arch>/<name>.cubin + cubins/manifest.json. Needs Python >= 3.10 and nvcc,
# and nothing installed: see ./build_cubins.sh --help.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m kernel_hub.build --csrc "$here/csrc" --out "$here/cubins" "$@"

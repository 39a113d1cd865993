#!/usr/bin/env bash
# csrc/*.cu -> scale_add/cubins/<arch>/*.cubin + manifest.json. Needs nvcc, and a Python that has
# kernel_hub: $PYTHON, or the first below that does. Options: see ./build_cubins.sh --help.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pythons=("${VIRTUAL_ENV:-$here/.venv}/bin/python" python python3)
# The first line of the command `kernel-hub` names its Python.
if command=$(command -v kernel-hub); then
    first=$(head -n 1 "$command" | tr -d '\0')
    [[ "$first" != '#!'*python* ]] || pythons+=("${first#'#!'}")
fi
[ -z "${PYTHON:-}" ] || pythons=("$PYTHON")
for python in "${pythons[@]}"; do
    if "$python" -c 'import kernel_hub' 2>/dev/null; then
        exec "$python" -m kernel_hub.build --csrc "$here/csrc" --out "$here/scale_add/cubins" "$@"
    fi
done
echo "none of these has kernel_hub: ${pythons[*]}" >&2
echo "pip install kernel_hub, or name a Python that has it: PYTHON=/path/to/python $0" >&2
exit 1

#!/bin/sh
# For the lead, about 5 minutes on the GPU; delete afterwards. Peers' site folder on PYTHONPATH first.
cd "$(dirname "$0")/.." || exit 1
OUT="${OUT:-/tmp}"; export OUT PYTHONPATH=".:benchmarks:$PYTHONPATH"
python3 -m pytest tests/ops -q -m gpu --require-gpu -x 2>&1 | tail -5
cat > /tmp/inductor_rms.py <<'PY'
import torch
def f(x, w):
    a = x.float()
    return (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
x = torch.randn(32768, 8192, device="cuda", dtype=torch.bfloat16)
torch.compile(f, dynamic=False)(x, torch.randn(8192, device="cuda", dtype=torch.bfloat16))
PY
TORCH_LOGS=output_code python3 /tmp/inductor_rms.py > "$OUT/inductor_rms.txt" 2>&1
python3 benchmarks/tune_memory_bound.py --throttle --peer --tokens 8192,32768 --families rms_norm,add_rms_norm \
    --sizes 4096,8192 --json "$OUT/round3a.json" --seconds 100
python3 benchmarks/tune_memory_bound.py --throttle --tokens 64,1024,8192,32768 --families rope,rope_in_place,silu_and_mul \
    --sizes 14336,28672,32,64 --json "$OUT/round3b.json" --seconds 150
for op in rms_norm silu_and_mul rope; do python3 benchmarks/bench_$op.py --quick --out "$OUT/bench_$op.json"; done

#!/bin/sh
# Third tuning round on the GPU: fewer blocks an SM (by shared memory nobody uses), rope without a positions tensor, and
# the kernel torch.compile makes of rms_norm 8192. About 4 minutes. Peers' site folder on PYTHONPATH first.
cd "$(dirname "$0")/.." || exit 1
OUT="${OUT:-/tmp}"
cat > /tmp/inductor_rms.py <<'PY'
import torch
def f(x, w):
    a = x.float()
    return (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)
x = torch.randn(32768, 8192, device="cuda", dtype=torch.bfloat16)
torch.compile(f, dynamic=False)(x, torch.randn(8192, device="cuda", dtype=torch.bfloat16))
PY
TORCH_LOGS=output_code python3 /tmp/inductor_rms.py > "$OUT/inductor_rms.txt" 2>&1
sed -n '/@triton_heuristics/,/tl.store/p' "$OUT/inductor_rms.txt"
python3 benchmarks/tune_memory_bound.py --no-policies --throttle --rounds 16 --top 6 --tokens 8192,32768 \
    --families "rms_norm,add_rms_norm,silu_and_mul,rope,rope in place" --seconds 330 \
    --hidden 4096,5120,8192,14336,28672,32,64 --json "$OUT/tune_round3.json"
python3 benchmarks/tune_memory_bound.py --no-policies --rounds 40 --top 5 --tokens 1,64,1024 \
    --families "silu_and_mul,rope,rope in place" --seconds 120 \
    --hidden 14336,28672,32,64 --json "$OUT/tune_round3_small.json"

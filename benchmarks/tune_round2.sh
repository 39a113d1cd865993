#!/bin/sh
# Second tuning round on the GPU: more launches of rms_norm, rope in place, Liger beside them if on PYTHONPATH.
# About 3 minutes. Put the peers' site folder on PYTHONPATH first (shared/facts/peers.md).
cd "$(dirname "$0")/.." || exit 1
exec python3 benchmarks/tune_memory_bound.py --no-policies --rounds 24 --top 7 --tokens 64,1024,8192,32768 \
    --families "rms_norm,add_rms_norm,rope,rope in place" --seconds 400 \
    --json "${OUT:-/tmp}/tune_round2.json"

"""Projections whose results go into caches. Knows core, matmul and kv_cache."""

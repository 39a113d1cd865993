"""Time on a GPU: launches beside every peer, ops as the demo runs them, variants to be tuned; rows.

Imports torch, but for `torch_builds`, `results` and `demo_numpy`; knows every op.
"""

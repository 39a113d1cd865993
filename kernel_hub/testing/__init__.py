"""References, the numeric rule, guarded outputs and timing: shared by tests, benchmarks and demo.

Imports torch; knows no op and no kernel.
"""

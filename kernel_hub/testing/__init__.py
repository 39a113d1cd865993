"""For kernels' authors: references, the numeric rule and guarded outputs; tests, benchmarks, demo.

Imports torch; knows no op and no kernel.
"""

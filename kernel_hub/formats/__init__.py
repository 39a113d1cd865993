"""GPU code as other projects keep it, turned into images that `Kernel` takes, and ours for them.

One module a format: `carray` (arrays in C sources). Nothing here is imported by the runtime.
"""

"""GPU code as other projects keep it, turned into images that `Kernel` takes, and ours for them.

One module or room a format: `carray` holds arrays in C sources. The runtime imports none.
"""

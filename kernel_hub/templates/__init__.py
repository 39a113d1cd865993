"""What `kernel-hub new NAME` writes out: each `.in` file with @NAME@ replaced.

`examples/scale_add` is this for NAME = scale_add, byte for byte (a test holds them together).
"""

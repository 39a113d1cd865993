"""Where other projects' code meets kernel_hub: what stands in for packages that it imports.

Nothing is put in place by importing a module of this folder; each has an `install()`.
"""

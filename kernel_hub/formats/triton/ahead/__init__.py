"""Kernels built ahead of time: compiled into a collection, tuned, found and chosen there."""

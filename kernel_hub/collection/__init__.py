"""Cubins as data: manifests, where they lie, which fits a GPU. Knows no driver."""

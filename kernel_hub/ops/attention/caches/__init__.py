"""Attention over caches that are not of the dtype of their queries."""

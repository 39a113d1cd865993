"""Attention over whole sequences, forward and backward. Knows core alone."""

"""Ops of a row at a time. A room knows core alone, never another room."""

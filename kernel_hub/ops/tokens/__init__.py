"""Tokens as rows. A room knows core alone, never another room."""

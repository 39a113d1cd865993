"""Products and what is fused into them. Knows core and tuning alone."""

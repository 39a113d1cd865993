"""Writing to caches of keys and values, attention of few queries over them. Knows core alone."""

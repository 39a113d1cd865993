"""Device memory, ours and other libraries': addresses, dtypes, streams. Knows no kernel."""

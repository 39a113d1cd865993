"""Token ids from logits. A room knows core alone, never another room."""

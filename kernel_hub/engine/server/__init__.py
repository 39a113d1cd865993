"""OpenAI's HTTP interface to an engine: one thread steps it, an event loop talks to clients."""

"""Steps of an engine, taken apart."""

"""What a kernel takes: C types, parameters, a function as an image describes it."""

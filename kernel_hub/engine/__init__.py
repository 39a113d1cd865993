"""A small engine on the shipped kernels: models, paged cache, scheduler, runner."""

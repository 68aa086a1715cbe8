"""Limits of this host (memory, descriptors, cores), signals, and the memory of processes."""

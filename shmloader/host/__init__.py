"""Limits of this machine and of its operating system: memory, descriptors, cores, signals."""

"""Benchmarks of a checkout. README.md has the map: which file answers which question."""

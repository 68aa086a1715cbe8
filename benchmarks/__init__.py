"""Benchmarks of a checkout. README.md says which file answers which question."""

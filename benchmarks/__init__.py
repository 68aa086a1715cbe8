"""Benchmarks: run `python benchmarks/transport.py`; `docs/benchmarks.md` says what is measured."""

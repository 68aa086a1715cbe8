"""Batches for an accelerator. Main process."""

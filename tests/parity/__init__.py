"""Parts that the parity tests share: datasets, batches, a deep comparison and a runner."""

"""Index batches: drawn from samplers, and packed for their way to a worker. Main process."""

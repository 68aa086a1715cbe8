"""Index batches: drawn from samplers, packed for their way to a worker, and (there) unpacked."""

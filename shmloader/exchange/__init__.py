"""The exchange of tasks and batches with the workers."""

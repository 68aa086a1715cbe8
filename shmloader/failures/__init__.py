"""Reports of trouble: exceptions that travel, bad samples, samples that do not fit together, stacks."""

"""A worker: its loop, fetching, collation and random generators. Runs in worker processes and threads."""

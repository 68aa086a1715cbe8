"""Records between the main process and its workers."""

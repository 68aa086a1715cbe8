"""Records between the main process and its workers, and the channels that carry them."""

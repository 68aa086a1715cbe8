"""Which worker makes which batch, and when. Main process."""

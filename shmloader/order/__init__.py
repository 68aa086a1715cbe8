"""Order: which worker makes which batch, and when. Main process."""

"""Deaths, interrupts, small machines, threads and epoch edges; see docs/robustness.md."""

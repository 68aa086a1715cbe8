"""``DataLoader.state_dict()`` and ``load_state_dict()``: the states of a loader.

The loader owns its `States`, which outlive its iterators. An iterator begins each epoch with a `Pass`: seeds,
order, and a `Progress`, which it tells how far the program has come; for an iterable-style dataset also a
`StreamProgress`. A state needs nothing else: the main process knows the order.
"""

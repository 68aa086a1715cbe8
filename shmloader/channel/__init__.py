"""A queue between two processes: a loader's exchange with one producer and one consumer.

::

    producer                                       consumer, owner of the table of places
    ────────                                       ────────
    new_empty(): memory in a granted slot
    put(): leaves into the slot, the rest
    pickled; small objects into the record
           │
           ├── IN_SLOT: grant, header's place ───▶ get(): arrive, take: MAKING -> ARRIVED -> LEASED
           │   or INLINE: the object itself        wraps the leaves in place
           │                                       the last view dies: LEASED -> FREE
           ◀── GRANT: room for one more object, ───┤
               and a free slot                     (sent by each get)

The grants for the first ``maxsize`` objects lie in the pipe from the beginning, so that no ``put`` waits for
the first ``get``. Which process has which end, and who else could have it, is in `roles`. Nothing here is
imported by loading.
"""

# SPDX-License-Identifier: Apache-2.0
"""The index of a corpus's keys, looked up in memory: a set that only grows, and listings.

``docs/index-format.md`` has the files, in the bucket and on a node, and the rules.

**A writer announces** through ``deltas.Announcer``: ``add(key, nbytes, done)`` after the object is
stored, ``send_soon()``, ``close()``. It announces an existing object (a 412) as well, unless
``ManifestIndex.is_announced``.

**A reader** is a ``reader.ManifestIndex``. ``Node`` makes one per process::

    folder = NodeFolder.of(tier.folders, namespace, need_room=...)
    index = ManifestIndex(store, layout, folder, jobs=in_child(settings), ...)
    await index.refresh()        # again every ``index.poll_s``; asks the bucket only if no
                                 # process of the node did within ``refresh_s``
    index.maybe_contains(key)    # any thread, no lock, no I/O, about a microsecond
    index.nbytes(key)            # size, 0 if unknown, None if the key is not held
    index.add(key, nbytes)       # this process stored it
    index.mark_missing(key, absent=True)   # a GET got a 404; the node's other engines learn of it
    index.mark_present(key)      # a GET found it (counted: a listing is due at more than 1% 404s)
    index.mark_bad(key), index.is_bad(key)

``in_child(settings)`` runs downloads and makers in a fresh interpreter of low priority;
``in_process(store)`` runs them in this process (commands, tests with a bucket in memory).

**A writer may maintain**: ``maker.Maintainer(...).run_forever()`` lets a child make unions when
deltas pile up, and one listing a day in the fleet.

**Commands**: ``maker.rebuild`` lists and writes a snapshot. ``maker.verify`` compares the index
with a listing. ``delete.delete_chosen`` (gc) lists, deletes and writes the rest as a snapshot.
``delete.delete_entries`` (rm, verify --repair) deletes 1,000 objects per request and notifies the
node's engines. ``delete.survey`` and ``delete.remove_namespace`` are for ``ns``.
``maker.newest_rows`` reads how many rows the newest snapshot has (a LIST and a GET).
"""

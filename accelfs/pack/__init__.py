"""How does a tree of small files become a version?

`source` walks the tree once into a `listing` on disk; `profile` decides order and compression; `worker`
processes read, compress and write shards; `build` runs them, writes the catalog and publishes.
"""

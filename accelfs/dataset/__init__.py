"""How does a version become a tree that one can read?

`versions` finds a version in a store and opens it, `trust` verifies its catalog once, `shards` holds its
shards mapped, and `tree` is what everybody reads: names, attributes, bytes.  None of it knows FUSE.
"""

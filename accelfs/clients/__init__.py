"""Which doors does another program have to a slot, besides the mount path itself?

`slots` finds mounted slots and mounts the ones that are not.  Everything here works from outside
the daemons: it may know `dataset`, `store`, `format` and `errors`, never `mount` or `cli`.
"""

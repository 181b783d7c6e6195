"""What is on disk, byte by byte: manifest, catalog and shard.

Hides lmdb and zstandard from every other layer.  All structures are little-endian unless a key
must sort by number (then big-endian, said where it stands).  Reserved bytes are zero and checked.
"""

"""How fast is a packed data set, against what else could serve it on the same machine?

    python -m benchmarks            both programs with default options; rows go to benchmarks/results/latest.jsonl too
    python -m benchmarks.read       a mount against two floors in C, squashfuse, ratarmount and the plain file system
    python -m benchmarks.pack       a pack against mksquashfs; `--million` packs 1,000,000 tiny files

Figures are compared, never judged by themselves: every server is measured once a round, the order of the servers
turns from round to round, and a row gives ratios of the medians first, then medians, minima and maxima. Rows are JSON
lines on stdout, the same as a table on stderr. Nothing here is imported by the product.

| module | answers |
|---|---|
| `data` | which files are read: seeded trees and their listings |
| `native` | how the C programs are built, and how a pass of the reader is run |
| `servers` | how each server prepares an image, mounts, shows its processes and unmounts |
| `processes` | commands with a deadline, memory and pinning of processes |
| `report` | what a row looks like |
| `read`, `pack` | what is measured, in which order |
"""

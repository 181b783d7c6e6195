"""accelfs packs a dataset of small files once and serves it read-only at the speed of the kernel."""

__version__ = "0.1.0"

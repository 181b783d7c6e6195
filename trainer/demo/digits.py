"""How does scikit-learn's image set of handwritten digits become a folder of small files?

1,797 grayscale images of 8x8 pixels, part of scikit-learn itself, one PNG file each, one folder for each of
the ten classes:  0/0000.png, 0/0010.png … 9/1794.png

Concurrency: one plain blocking call.
"""

from __future__ import annotations

from pathlib import Path

import numpy
from PIL import Image
from sklearn.datasets import load_digits

# The pixels of the set count from 0 to 16.
BRIGHTEST = 16


def write(folder: Path) -> int:
    """Write the images below `folder`, which must not exist; return how many."""
    digits = load_digits()
    for label in digits.target_names:
        (folder / str(label)).mkdir(parents=True)
    pixels = numpy.rint(digits.images * (255 / BRIGHTEST)).astype(numpy.uint8)
    for number, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{number:04d}.png")
    return len(pixels)

"""Train a small classifier on the images of the slot `digits`.  Copy this file and make it yours.

    accel-train run --slot digits -- python train.py

Nothing in it knows about accelfs: the images are files in a folder, and the folder's name is in ACCEL_SLOT_DIGITS.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read once, at the import: only errors that end the job
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # the same sums in every run, and no message about it

import tensorflow as tf

SEED = 7
SIZE = (8, 8)

tf.keras.utils.set_random_seed(SEED)

# One fifth of the files, chosen by the seed, is never trained on.
train, test = tf.keras.utils.image_dataset_from_directory(
    os.environ["ACCEL_SLOT_DIGITS"],
    color_mode="grayscale",
    image_size=SIZE,
    batch_size=32,
    validation_split=0.2,
    subset="both",
    seed=SEED,
)

model = tf.keras.Sequential(
    [
        tf.keras.Input((*SIZE, 1)),
        tf.keras.layers.Rescaling(1 / 255),
        tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        tf.keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dropout(0.3),
        tf.keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer=tf.keras.optimizers.Adam(2e-3),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
# The data set shuffles itself, anew in every epoch.
model.fit(train.prefetch(tf.data.AUTOTUNE), epochs=12, shuffle=False, verbose=2)

_, accuracy = model.evaluate(test, verbose=0)
print(f"test accuracy {accuracy:.3f}")
model.save("digits.keras")
Path("metrics.json").write_text(json.dumps({"test_accuracy": accuracy}) + "\n")

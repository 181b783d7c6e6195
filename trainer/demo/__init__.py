"""What does the whole path look like: pack a folder, mount it, train from it?

`python -m trainer.demo` shows it on a real image set that needs no network.

    digits     the image set, written as small files
    train.py   the training script: an ordinary one, to be copied
    __main__   the commands, typed one after the other, and what they said

Every command runs as a process of its own, as a user would type it.
"""

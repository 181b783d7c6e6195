"""The reader as a training script has it: `open().read()` in Python, one process per reader.

    python python_reader.py [--threads N] [--seed S] [--cpu C] LISTING ROOT

Prints the same line as reader.c. Its readers are processes, as the workers of a PyTorch loader are: threads of one
interpreter would measure its lock. Runs by itself, so it imports nothing of this package.
"""

import argparse
import json
import os
import random
import time


def read_share(paths: list[str]) -> int:
    """Read each file whole; the number of bytes seen."""
    total = 0
    for path in paths:
        with open(path, "rb") as file:
            total += len(file.read())
    return total


def start_reader(paths: list[str], start: int) -> tuple[int, int]:
    """Fork a reader that waits until a byte comes from `start`; its pid and the pipe that brings its count of bytes."""
    result, answer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(answer)
        return pid, result
    status = 1
    try:
        os.read(start, 1)
        os.write(answer, str(read_share(paths)).encode("ascii"))
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """One whole pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("listing")
    parser.add_argument("root")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    with open(options.listing, encoding="ascii") as lines:
        entries = [line.rstrip("\n").split(" ", 2) for line in lines]
    paths = [path for mark, _, path in entries if mark == "f"]
    random.Random(options.seed).shuffle(paths)
    os.chdir(options.root)
    start, release = os.pipe()
    readers = []
    for index in range(options.threads):
        pid, result = start_reader(paths[index :: options.threads], start)
        readers.append((pid, result))
    begin = time.perf_counter()
    # Every forked reader holds a copy of the write end as well, so a byte each wakes them, not the end of the file.
    os.write(release, b"." * options.threads)
    total = sum(int(os.read(result, 32) or 0) for _, result in readers)
    seconds = time.perf_counter() - begin
    if any(os.waitpid(pid, 0)[1] for pid, _ in readers):
        raise SystemExit("a reader failed")
    print(json.dumps({"seconds": seconds, "files": len(paths), "bytes": total}))


if __name__ == "__main__":
    main()

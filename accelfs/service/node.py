"""Where does this node keep things, and what does the environment say about it?

    ACCELFS_HOME         /var/lib/accelfs as root, else ~/.local/share/accelfs
      store/             the embedded store
      scratch/<slot>/    what a pack writes before it is published
      trusted/           which catalogs of this node were verified whole
      run/, log/         state and logs of the mounts
    ACCELFS_MOUNT_ROOT   /mnt/accel

Concurrency: sync, stateless.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelfs.errors import UsageError
from accelfs.store.layout import DEFAULT_INSTANCE, SlotName
from accelfs.store.posix import PosixStore

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Node:
    """The folders of this node, absolute."""

    home: Path
    mount_root: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Node:
        home = environment.get("ACCELFS_HOME")
        if not home:
            home = "/var/lib/accelfs" if os.geteuid() == 0 else "~/.local/share/accelfs"
        root = environment.get("ACCELFS_MOUNT_ROOT") or "/mnt/accel"
        for name, value in (("ACCELFS_HOME", home), ("ACCELFS_MOUNT_ROOT", root)):
            if "\n" in value or "\0" in value:
                raise UsageError(f"{name} must be one path on one line")
        return cls(Path(os.path.abspath(os.path.expanduser(home))), Path(os.path.abspath(os.path.expanduser(root))))

    @property
    def store(self) -> PosixStore:
        return PosixStore(self.home / "store")

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def log(self) -> Path:
        return self.home / "log"

    @property
    def trusted(self) -> Path:
        return self.home / "trusted"

    def scratch(self, slot: SlotName) -> Path:
        return self.home / "scratch" / slot.file_name

    def mountpoint(self, slot: SlotName) -> Path:
        """Slots of the default instance stand right below the mount root, others below their instance."""
        if slot.instance == DEFAULT_INSTANCE:
            return self.mount_root / slot.name
        return self.mount_root / slot.instance / slot.name

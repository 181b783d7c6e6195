"""What is a slot called, and under which key does a store hold each of its objects?

    <instance>/slots/<slot>/versions/000001.json            manifest
                           /catalogs/<hash>.lmdb  /reports/<hash>.jsonl  /shards/<hash>.lmdb
                           /dictionaries/<hash>

Concurrency: sync, stateless.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from accelfs.errors import UsageError

DEFAULT_INSTANCE = "default"
NAME_CHARACTERS_MAX = 100
# A name is a path component, a part of an environment variable's name and of a systemd instance name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_VERSION = re.compile(r"([0-9]{6,})\.json\Z")


@dataclass(frozen=True, slots=True)
class SlotName:
    """`name` of the default instance, or `instance/name`."""

    instance: str
    name: str

    def __str__(self) -> str:
        return self.name if self.instance == DEFAULT_INSTANCE else f"{self.instance}/{self.name}"

    @property
    def file_name(self) -> str:
        """One path component that tells every slot of a node apart; `+` cannot stand in a name."""
        return f"{self.instance}+{self.name}"


def parse_slot(text: str) -> SlotName:
    """Raises UsageError for anything that is not a slot's name."""
    instance, slash, name = text.rpartition("/")
    if not slash:
        instance = DEFAULT_INSTANCE
    for part in (instance, name):
        if len(part) > NAME_CHARACTERS_MAX:
            raise UsageError(f"slot name of {len(part)} characters: at most {NAME_CHARACTERS_MAX} are allowed")
        if not _NAME.match(part) or ".." in part:
            raise UsageError(
                f"{text!r} is not a slot: use NAME or INSTANCE/NAME with letters, digits, '.', '_' and '-', "
                "beginning with a letter or digit"
            )
    return SlotName(instance, name)


def slot_prefix(slot: SlotName) -> str:
    return f"{slot.instance}/slots/{slot.name}"


def versions_prefix(slot: SlotName) -> str:
    return f"{slot_prefix(slot)}/versions"


def manifest_key(slot: SlotName, version: int) -> str:
    return f"{versions_prefix(slot)}/{version:06d}.json"


def version_number(object_name: str) -> int | None:
    """The version that an object below `versions_prefix` is the manifest of, if it is one."""
    match = _VERSION.match(object_name)
    return int(match[1]) if match else None


def catalog_key(slot: SlotName, digest: str) -> str:
    return f"{slot_prefix(slot)}/catalogs/{digest}.lmdb"


def report_key(slot: SlotName, digest: str) -> str:
    return f"{slot_prefix(slot)}/reports/{digest}.jsonl"


def shards_prefix(slot: SlotName) -> str:
    return f"{slot_prefix(slot)}/shards"


def shard_key(slot: SlotName, digest: str) -> str:
    return f"{shards_prefix(slot)}/{digest}.lmdb"


def dictionary_key(slot: SlotName, digest: str) -> str:
    return f"{slot_prefix(slot)}/dictionaries/{digest}"

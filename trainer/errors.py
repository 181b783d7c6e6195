"""What stops a job before it starts, and which exit code says so?

    125  something that the job needs is missing: a slot, a GPU, a sensible command line
    126  the command is there and cannot be executed
    127  the command is not there

The same numbers as `env`, `timeout`, `nohup` and `docker run` use.  Every other exit code of
`accel-train run` is the job's own, so a command line that cannot work gives 125 there, not 2.
"""

from __future__ import annotations

NOT_STARTED = 125
NOT_EXECUTABLE = 126
NOT_FOUND = 127


class StartError(Exception):
    """The job was not started; the message is one line that says why and what to do."""

    def __init__(self, message: str, exit_code: int = NOT_STARTED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

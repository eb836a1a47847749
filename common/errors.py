"""Errors that end a run with one sentence instead of a traceback."""

import errno

# The disk is full, a quota is used up, it can only be read, or the file would be too large.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class RunError(Exception):
    """A run cannot start or go on; one sentence says why and what to do, instead of a traceback."""


def disk_error(error: BaseException | None) -> BaseException | None:
    """Return the disk's error that caused this one, or None: libraries wrap it in their own."""
    while error is not None and getattr(error, "errno", None) not in DISK_ERRORS:
        error = error.__cause__
    return error

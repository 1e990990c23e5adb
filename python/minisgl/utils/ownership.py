"""Folders and files that no other user of the machine can have written.

Code is loaded from such places only. The superuser is trusted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_own_folder(folder: Path) -> Path:
    """Create a folder with the mode 0700, or give an existing one of this user that mode.

    Raises:
        PermissionError: the folder is another user's, or another user can replace it.
        OSError: it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    for above in folder.parents:
        if _is_open_to_others(above.stat()):
            raise PermissionError(f"{above}, above {folder}, can be changed by other users")
    folder.chmod(0o700)
    return folder


def is_own_file(path: Path) -> bool:
    """Whether a path is a plain file of this user that no other user can write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and not status.st_mode & _WRITABLE_BY_OTHERS


def _is_open_to_others(status: os.stat_result) -> bool:
    """Whether other users can rename what is in a folder."""
    if status.st_uid not in (0, os.geteuid()):
        return True
    if status.st_mode & stat.S_ISVTX:  # entries can be renamed by their owners only
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    # Many systems give each user a group of their own, and folders that this group can write.
    return bool(status.st_mode & stat.S_IWGRP) and status.st_gid not in (0, os.getegid())

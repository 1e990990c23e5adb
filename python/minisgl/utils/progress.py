"""A progress bar, shown only on a terminal."""

from __future__ import annotations

import threading
from typing import Any

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar of this process alone, shown on a terminal only.

    tqdm's own lock is a semaphore between processes. A process that is killed leaves it behind, and
    the server's last line would be a warning about that instead of the reason.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, disable=None, **options)


ProgressBar.set_lock(threading.RLock())

"""`python -m minisgl`, and the installed command `minisgl`."""

from __future__ import annotations

import sys


def main() -> None:
    from minisgl.server import (
        launch_server,
    )  # here: every worker that is started imports this file, and no server

    sys.exit(launch_server())


if __name__ == "__main__":
    main()

"""`python -m minisgl`, and the installed command `minisgl`."""

from __future__ import annotations

import sys

from minisgl.server import launch_server


def main() -> None:
    sys.exit(launch_server())


if __name__ == "__main__":
    main()

"""`python -m minisgl`, and the installed command `minisgl`."""

from __future__ import annotations

import sys


def main() -> None:
    # Imported here: every worker imports this file, and no worker needs the server.
    from minisgl.utils.bytecode import keep_bytecode

    keep_bytecode()
    from minisgl.server import launch_server

    sys.exit(launch_server())


if __name__ == "__main__":
    main()

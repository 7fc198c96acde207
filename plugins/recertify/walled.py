"""Raise a worker's walls around this process, then become a runner: `python -m … WALLS COMMAND`.

No file but the system's, the interpreters' and the task's is reached, and no network.
"""

import json
import os
import sys

from modelyard.serve.walls.raising import Walls, die_with_parent, raise_walls


def main() -> None:
    """Become the command of the arguments."""
    die_with_parent()
    if (walls := json.loads(sys.argv[1])) is not None:
        raise_walls(Walls.of_message(walls))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()

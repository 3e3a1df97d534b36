"""Which process a rank is."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parlinalg.comm.base import Comm


def ranks_map(comm: Comm) -> list[dict[str, Any]]:
    """Where the ranks are: `{"rank", "host", "pid"}` for each, on every rank.  Collective.

    When a rank is killed the launcher names its process only; this list, printed at the start, says which rank it was.
    """
    mine = {"rank": comm.world_ranks[comm.rank], "host": socket.gethostname(), "pid": os.getpid()}
    return comm.share(mine)

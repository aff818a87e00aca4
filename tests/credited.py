"""The leaderboard of a history, as a monitor that starts with it has it."""

from __future__ import annotations

from manyhands.monitor.credit import Credit, leaders_of
from manyhands.monitor.history import History
from manyhands.monitor.picture import LeaderboardRow


def leaders_in(history: History) -> list[LeaderboardRow]:
    """The rows, by rank; of what is written."""
    names = {peer: (known.peer_id, known.name) for peer, known in history.peers().items()}
    return leaders_of(Credit(history.steps(), history.settled()).totals, names)

"""Averages vectors among the peers of a run. Its rules are tables at the head of files without clocks or sockets:

=====================================================  =================================================
question                                               file
=====================================================  =================================================
who is a member, who leads, who is at fault            ``roster.py``
who comes to a round                                   ``attendees.py``
whose request for a place is refused, and why          ``matchmaking/admission.py``
how a peer finds the group of its round                ``matchmaking/matchmaking_machine.py``
how long it waits for others there                     ``matchmaking/patience.py``
what one peer does in a round                          ``round/round_machine.py``
how the leader decides a round                         ``round/count.py``
when a member is asked, lost, or too slow              ``round/times.py``
what a member may not send                             ``round/limits.py``
when another donor of a state is asked                 ``state/download.py``
how long anything takes at most                        ``timing.py``
=====================================================  =================================================

Its folders are the steps of a round. ``matchmaking/`` finds the peers that average together. ``round/`` is one round in
a formed group: exchanges of values, and a vote after each, until all members know one verdict. ``allreduce/`` moves the
values of an exchange, in the encodings of ``codecs/``: ``butterfly.py`` is one member's part, ``reducer.py`` its own
span of the mean. A mean goes from there through ``round/exchange.py`` and ``round/driver.py`` to ``rounds.py``, which
returns it. ``state/`` hands the state of a run to newcomers, and ``grid/`` forms the groups of a swarm that is larger
than one group. ``averager_presence.py`` and ``averager_loop.py`` serve averagers outside an optimizer alone.
"""

from manyhands.averaging.config import AveragingConfig

__all__ = ["AveragingConfig"]

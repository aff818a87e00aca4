"""The owners whose records one read of a key is for. Pure.

========================  =======================================  =====================================
read                      records that count                       of these, read from every holder
========================  =======================================  =====================================
of certain owners         theirs                                   theirs
in a run by invitation    those of its members                     those of its members
any other                 all                                      those of peers that are known here
========================  =======================================  =====================================

Signatures of other records are not checked. Records of unknown owners are read and checked only as far as the network
that shows them can afford it (:mod:`manyhands.dht.rate_limit`); those of known owners in any case.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from manyhands.dht.config import MAX_NAMED
from manyhands.dht.records import Record


@dataclass(frozen=True)
class LookedFor:
    """See the table at the top of this file.

    Attributes:
        known: peer ids of the members of the run, or of the peers that this node was in a round with.
        only: the owners that the caller named; None if it named none.
        is_by_invitation: only known owners count.
    """

    known: Collection[str] = ()
    only: frozenset[str] | None = None
    is_by_invitation: bool = False

    def is_known(self, record: Record) -> bool:
        """Whether a record is to be read and checked in any case."""
        return record.owner in self.known

    def counts(self, record: Record) -> bool:
        """Whether the reader wants a record."""
        if self.only is not None:
            return record.owner in self.only
        return not self.is_by_invitation or record.owner in self.known

    def names(self, rng: random.Random) -> list[str]:
        """Return the owners to ask a holder for that is not to show others; random ones if they are too many."""
        owners: Iterable[str] = self.only if self.only is not None else self.known
        names = sorted(owners)
        return sorted(rng.sample(names, MAX_NAMED)) if len(names) > MAX_NAMED else names

"""What a fast peer beside slow ones counts for, round by round, by the rules of the library. No network, no time.

    python benchmarks/earned_weight.py [--fast 400] [--slow 10] [--json FILE]

Slow peers found an open run and are its members; a fast one joins them in round 1. Printed for some numbers of slow
peers and some rounds: the weight for which the fast one counts, its share of the mean, and the share of all samples
that count, in that round and in all rounds until then. JSON: a list of
`{num_slow, round, weight, share, used, used_until_then}`.
"""

from __future__ import annotations

from typing import Any

from _command_line import Parser, json_path, positive_int, run, write_json

from manyhands.averaging.messages import Group, Member, Position
from manyhands.averaging.roster import Attendance, Roster
from manyhands.averaging.round.limits import OPEN_LIMITS, limited
from manyhands.base.identity import PeerId

ROUNDS_BEFORE = 20
NUM_SLOW = (3, 20, 40, 80)
SHOWN = (1, 4, 14, 20, 30, 41, 100)


def round_of(roster: Roster, weights: dict[PeerId, float]) -> tuple[Roster, list[float]]:
    """One committed round; the weights that count in it."""
    members = [Member(peer_id, [], is_client=False, weight=weight) for peer_id, weight in weights.items()]
    group = limited(Group(b"", members[0].peer_id, Position(roster.round, b""), members), OPEN_LIMITS, roster)
    return roster.after(Attendance.of(group.manifest(b""))), [member.weight for member in group.members]


def rows_of(num_slow: int, slow: float, fast: float) -> list[dict[str, Any]]:
    roster, others = Roster(), {PeerId(f"slow {number:02}"): slow for number in range(num_slow)}
    for _ in range(ROUNDS_BEFORE):
        roster, _ = round_of(roster, others)
    given = {**others, PeerId("the fast one"): fast}
    rows, until_then, total = [], 0.0, sum(given.values())
    for number in range(1, SHOWN[-1] + 1):
        roster, counted = round_of(roster, given)
        until_then += sum(counted)
        if number in SHOWN:
            rows.append({
                "num_slow": num_slow,
                "round": number,
                "weight": round(counted[-1], 1),
                "share": round(counted[-1] / sum(counted), 3),
                "used": round(sum(counted) / total, 3),
                "used_until_then": round(until_then / (number * total), 3),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--fast", type=positive_int, default=400, help="samples of the fast peer (default: 400)")
    parser.add_argument("--slow", type=positive_int, default=10, help="samples of each slow one (default: 10)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    rows = [row for num_slow in NUM_SLOW for row in rows_of(num_slow, float(options.slow), float(options.fast))]
    for row in rows:
        print(
            f"beside {row['num_slow']:2}, round {row['round']:3}: counts for {row['weight']:5.1f}, {row['share']:.2f} "
            f"of the mean; of all samples {row['used']:.2f} count, and {row['used_until_then']:.2f} until then"
        )
    write_json(options.json, rows)


if __name__ == "__main__":
    run(main)

"""What a fast peer beside slow ones counts for, round by round, by the rules of the library. No network, no time.

    python benchmarks/earned_weight.py [--fast 400] [--slow 10] [--num-slow 3] [--json FILE]

The slow peers found an open run and are its members; the fast one joins them in round 1, or founds the run with them.
Printed for some rounds: the weight for which the fast one counts, its share of the mean, and the share of all samples
that count, in that round and in all rounds until then. JSON: a list of `{joins, round, weight, share, used,
used_until_then}`.
"""

from __future__ import annotations

from typing import Any

from _command_line import Parser, json_path, positive_int, run, write_json

from manyhands.averaging.messages import Group, Member, Position
from manyhands.averaging.roster import Attendance, Roster
from manyhands.averaging.round.limits import OPEN_LIMITS, limited
from manyhands.base.identity import PeerId

ROUNDS_BEFORE = 20
SHOWN = (1, 3, 4, 10, 13, 14, 20, 30, 40, 50, 100)


def round_of(roster: Roster, weights: dict[PeerId, float]) -> tuple[Roster, list[float]]:
    """One committed round; the weights that count in it."""
    members = [Member(peer_id, [], is_client=False, weight=weight) for peer_id, weight in weights.items()]
    group = limited(Group(b"", members[0].peer_id, Position(roster.round, b""), members), OPEN_LIMITS, roster)
    return roster.after(Attendance.of(group.manifest(b""))), [member.weight for member in group.members]


def rows_of(joins: str, slow: dict[PeerId, float], fast: float) -> list[dict[str, Any]]:
    roster, given = Roster(), {**slow, PeerId("the fast one"): fast}
    for _ in range(ROUNDS_BEFORE if joins == "later" else 0):
        roster, _ = round_of(roster, slow)
    rows, counted_until_then = [], 0.0
    for number in range(1, SHOWN[-1] + 1):
        roster, counted = round_of(roster, given)
        counted_until_then += sum(counted)
        if number in SHOWN:
            total = sum(given.values())
            rows.append({
                "joins": joins,
                "round": number,
                "weight": round(counted[-1], 1),
                "share": round(counted[-1] / sum(counted), 3),
                "used": round(sum(counted) / total, 3),
                "used_until_then": round(counted_until_then / (number * total), 3),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--fast", type=positive_int, default=400, help="samples of the fast peer (default: 400)")
    parser.add_argument("--slow", type=positive_int, default=10, help="samples of each slow one (default: 10)")
    parser.add_argument("--num-slow", type=positive_int, default=3, help="number of slow ones (default: 3)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    slow = {PeerId(f"slow {number}"): float(options.slow) for number in range(options.num_slow)}
    rows = [row for joins in ("first", "later") for row in rows_of(joins, slow, float(options.fast))]
    for row in rows:
        print(
            f"joins {row['joins']:5} round {row['round']:3}: counts for {row['weight']:6.1f}, {row['share']:.2f} of the "
            f"mean; {row['used']:.2f} of all samples count, {row['used_until_then']:.2f} until then"
        )
    write_json(options.json, rows)


if __name__ == "__main__":
    run(main)

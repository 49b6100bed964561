"""What a look-up changes in a pool. Pure.

Invariant: a pool never holds more addresses than it may, nor one that another pool holds; of too many the ones it has
stay, so that a name with more records than are used does not make the pool change at each look-up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Changes:
    """Addresses, in the order in which they are to be taken."""

    join: tuple[str, ...]
    leave: tuple[str, ...]
    elsewhere: tuple[str, ...]
    """Given by the name, and another pool's."""
    left_out: int
    """How many records are too many."""


def changes(members: Collection[str], answer: Iterable[str], *, elsewhere: Collection[str], most: int) -> Changes:
    """`members`: the pool's addresses before; `elsewhere`: those of the other pools."""
    given = set(answer)
    foreign = given.intersection(elsewhere)
    ours = given - foreign
    leave = [address for address in members if address not in ours]
    new = sorted(ours.difference(members))
    room = most - (len(members) - len(leave))
    return Changes(tuple(new[:room]), tuple(leave), tuple(sorted(foreign)), max(0, len(new) - room))

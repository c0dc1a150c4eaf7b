"""Which faults strike, drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from tests.chaos.faults import Fault, Harm, KillEngine, KillGateway, KillServer, KillStore, Together, catalogue


def faults_of(random: Random, number: int, faults: Iterable[Fault], only: str = "", most: int = 3) -> Iterator[Fault]:
    """Yield `number` of these faults whose names contain `only`, each of one kind or, half the time, of up to `most`
    kinds at once."""
    chosen = [fault for fault in faults if only in str(fault)]
    while number and chosen:
        fault = _drawn(random, chosen, most)
        if _is_possible(fault):
            number -= 1
            yield fault


def kills_of(random: Random, number: int) -> Iterator[Fault]:
    """Yield kills of a gateway, the server, the engine or Valkey. Every fifth one combines several of them."""
    for count in range(number):
        victims: list[Fault] = [KillGateway(), KillEngine(), KillStore(), KillServer()]
        random.shuffle(victims)
        yield Together(victims[: random.randint(2, 4)]) if count % 5 == 4 else victims[0]


def lasting_faults_of(random: Random, number: int) -> Iterator[Fault]:
    """Yield random faults of every kind, except those after which Redis knows nothing of a job."""
    known = [fault for fault in catalogue() if Harm.BOOKS not in fault.harm]
    for _ in range(number):
        yield random.choice(known)


def _drawn(random: Random, catalogue: Iterable[Fault], most: int) -> Fault:
    kinds: dict[type[Fault], list[Fault]] = {}
    for fault in catalogue:
        kinds.setdefault(type(fault), []).append(fault)
    number = min(len(kinds), most, random.choice((1, 1, 2, 3)))
    chosen = random.sample(sorted(kinds, key=lambda kind: kind.__name__), number)
    faults = [random.choice(kinds[kind]) for kind in chosen]
    return faults[0] if len(faults) == 1 else Together(faults)


def _is_possible(fault: Fault) -> bool:
    """Return whether the faults can be combined: two faults of the store would undo each other."""
    return sum(each.strikes_store for each in getattr(fault, "faults", ())) < 2

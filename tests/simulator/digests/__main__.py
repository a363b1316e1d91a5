"""``python -m tests.simulator.digests store`` or ``compare``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.simulator.digests.groups import GROUPS, lines
from tests.simulator.digests.stored import differences, is_stored, read, write

_SHOWN = 10


def store(groups: Sequence[str], *, again: bool) -> int:
    """Store the digests of groups that have none; with ``again`` of all."""
    for group in groups:
        if again or not is_stored(group):
            started = time.process_time()
            found = list(lines(group))
            write(group, found)
            print(f"{group}: {len(found)} cases stored in {time.process_time() - started:.0f} s", flush=True)
    return 0


def compare(groups: Sequence[str]) -> int:
    """Say which cases are not as they were stored; gives how many groups have some."""
    wrong = 0
    for group in groups:
        started, stored = time.process_time(), read(group)
        found = list(lines(group))
        differing = differences(stored, found)
        differing += [(name, ("not run",)) for name in sorted(stored.keys() - {line["case"] for line in found})]
        seconds = time.process_time() - started
        print(f"{group}: {len(found)} cases, {len(differing)} differ, {seconds:.0f} s", flush=True)
        for name, fields in differing[:_SHOWN]:
            print(f"    {name}: {', '.join(fields)}")
        if differing:
            counted = Counter(field for _, fields in differing for field in fields)
            print("    in all:", ", ".join(f"{field} {count}" for field, count in counted.items()), flush=True)
            wrong += 1
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    """Store or compare; gives the exit status, 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.digests", description=__doc__)
    parser.add_argument("what", choices=("store", "compare"))
    parser.add_argument("--only", action="append", choices=GROUPS, help="only this group; may be given again")
    parser.add_argument("--again", action="store_true", help="store groups anew that are stored already")
    arguments = parser.parse_args(words)
    groups = arguments.only or GROUPS
    if arguments.what == "store":
        return store(groups, again=arguments.again)
    return min(1, compare(groups))


if __name__ == "__main__":
    sys.exit(main())

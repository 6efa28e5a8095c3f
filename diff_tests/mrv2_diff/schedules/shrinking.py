"""Makes a failing list of actions short, by leaving parts of it out as long as it still fails."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shrink(
    items: Sequence[Item], fails: Callable[[Sequence[Item]], bool], most_tries: int = 2000
) -> list[Item]:
    """Return a part of `items` that fails, of which no single item can be left out.

    Args:
        items: Fail as they are.
        fails: Whether a part of them does; the same at every call.
        most_tries: Calls of `fails` after which the shortest part so far is returned.
    """
    kept, size = list(items), len(items) // 2
    tries = 0
    while size:
        start, before = 0, len(kept)
        while start < len(kept):
            if tries == most_tries:
                return kept
            tries += 1
            part = kept[:start] + kept[start + size :]
            if fails(part):
                kept = part
            else:
                start += size
        if size > 1:
            size = min(size // 2, len(kept))
        elif len(kept) == before:
            break
    return kept

"""Fragments of a model: its blocks dealt out in turn, as Streaming DiLoCo's strided pattern."""

import re
from collections.abc import Sequence

from gradwire.errors import ConfigError


def cut_into_fragments(names: Sequence[str], count: int) -> list[list[str]]:
    """Return the names of parameters by fragment.

    Block i is in fragment i mod `count`. Parameters in front of the first block, the embeddings,
    are in the first fragment, and those behind the last block in the last fragment.
    """
    numbers = [re.search(r"\.(\d+)\.", name) for name in names]
    blocks = [int(found[1]) for found in numbers if found]
    if count > 1 and len(set(blocks)) < count:
        raise ConfigError(
            f"{count} fragments need as many blocks, this model has {len(set(blocks))}"
        )
    fragments: list[list[str]] = [[] for _ in range(count)]
    is_behind = False
    for name, found in zip(names, numbers, strict=True):
        is_behind = is_behind or bool(found)
        if found:
            fragments[int(found[1]) % count].append(name)
        else:
            fragments[count - 1 if is_behind else 0].append(name)
    return fragments

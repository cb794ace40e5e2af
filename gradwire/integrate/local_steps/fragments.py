"""Fragments of a model that take turns: the parameters of each, and the steps of its rounds."""

from collections.abc import Mapping


def cut_model(sizes: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Return the fragment of each parameter: `fragments` runs of parameters of about equal sizes.

    sizes: entries of each whole parameter, in the model's order. No fragment is empty.
    """
    total, seen, number = sum(sizes.values()), 0, 0
    out: dict[str, int] = {}
    for index, (name, size) in enumerate(sizes.items()):
        left, open_ = len(sizes) - index, fragments - number
        has_some = number in out.values()
        # Half of a parameter beyond the even share goes to the next fragment.
        is_full = fragments * (seen + size / 2) > total * (number + 1)
        if has_some and number + 1 < fragments and (is_full or left < open_):
            number += 1
        out[name] = number
        seen += size
    return out


def is_turn(number: int, fragments: int, every: int, step: int) -> bool:
    """Return True if fragment `number` ends a round at this inner step.

    Fragments end their rounds at even distances, and the last one at multiples of `every`.
    """
    return (step - (number + 1) * every // fragments) % every == 0

"""Numbers in the units that people use, with three digits and never with an exponent."""

from collections.abc import Sequence

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_COUNTS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def show_number(number: float) -> str:
    """Return three digits: 0.123, 1.23, 12.3, 123, 1,234."""
    if number >= 99.95:
        return f"{number:,.0f}"
    decimals = 2 if number < 9.995 else 1
    return f"{number:.{decimals if number >= 1 else 3}f}".rstrip("0").rstrip(".") or "0"


def show_seconds(seconds: float) -> str:
    """Return 2.41 s, 35.3 ms or 84 us."""
    if seconds >= 120:
        return f"{show_number(seconds)} s ({show_number(seconds / 60)} min)"
    return _show(seconds, _TIMES)


def show_bytes(size: float) -> str:
    """Return 28 GB, 1.5 MB or 12 kB."""
    return _show(size, _SIZES)


def show_count(count: int) -> str:
    """Return 7 billion, 25.6 million or 2,048."""
    return f"{count:,}" if count < _COUNTS[-1][0] else _show(count, _COUNTS)


def _show(number: float, units: Sequence[tuple[float, str]]) -> str:
    # 0.9995 of a unit would be shown as 1000 of the one below.
    factor, unit = next((u for u in units if number >= 0.9995 * u[0]), units[-1])
    return f"{show_number(number / factor)} {unit}"

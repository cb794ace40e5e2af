"""Link rates and times: parsed from text, and shown as text."""

import math
import re

from gradwire.errors import ConfigError

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
# The traffic shaper of the lab (TBF) counts bytes per second in 32 bits.
SLOWEST, _FASTEST = 10**6, 34 * 10**9


def parse_rate(text: str, fastest: int = _FASTEST) -> int:
    """Return bits per second of `100mbit`, `2.5gbit`, ..."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.strip().lower())
    if match is None:
        raise ConfigError(
            f"link must be a number and kbit, mbit or gbit, such as 100mbit, got {text!r}"
        )
    rate = float(match[1]) * UNITS[match[2]]
    if not SLOWEST <= rate <= fastest:
        raise ConfigError(
            f"link must be from {show_rate(SLOWEST)} to {show_rate(fastest)}, got {text!r:.60}"
        )
    return round(rate)


def show_rate(rate: float) -> str:
    """Return the rate as people write it: 96.1 Mbit/s."""
    unit = "g" if rate >= UNITS["g"] else "m"
    return f"{rate / UNITS[unit]:.3g} {unit.upper()}bit/s"


def show_time(seconds: float) -> str:
    """Return the time as people write it: 5.1 ms."""
    return f"{1e3 * seconds:.3g} ms"


def parse_time(text: str | float, name: str = "latency") -> float:
    """Return seconds of `50us`, `5ms`, `0.1s`, or of a number of seconds."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", str(text).strip().lower())
        if match is None:
            raise ConfigError(
                f"{name} must be a number and s, ms or us, such as 50us; got {text!r}"
            )
        seconds = float(match[1]) * _TIMES[match[2]]
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{name} must be 0 or more seconds, got {text!r}")
    return seconds

"""Link rates and times: as written, and as shown."""

import math
import re

from gradwire.errors import ConfigError

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
SLOWEST, FASTEST = 10**6, 34 * 10**9  # TBF counts bytes a second in 32 bits


def parse_rate(text: str, fastest: int = FASTEST) -> int:
    """Bits a second of `100mbit`, `2.5gbit`, ..."""
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
    """As people say it: 96.1 Mbit/s."""
    unit = "g" if rate >= UNITS["g"] else "m"
    return f"{rate / UNITS[unit]:.3g} {unit.upper()}bit/s"


def show_time(seconds: float) -> str:
    """As people say it: 5.1 ms."""
    return f"{1e3 * seconds:.3g} ms"


def parse_time(text: str | float, name: str = "latency") -> float:
    """Seconds of `50us`, `5ms`, `0.1s`, or of a number of seconds."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", str(text).strip().lower())
        if match is None:
            raise ConfigError(
                f"{name} must be a number and s, ms or us, such as 50us; got {text!r}"
            )
        seconds = float(match[1]) * TIMES[match[2]]
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{name} must be 0 or more seconds, got {text!r}")
    return seconds

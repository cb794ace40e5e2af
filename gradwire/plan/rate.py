"""Link rates and times: parsed from text, and shown as text."""

import math
import re

from gradwire.errors import ConfigError

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
# The traffic shaper of the lab (TBF) counts bytes per second in 32 bits.
SLOWEST, _FASTEST = 10**6, 34 * 10**9
_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])b(?:its?)?(?:/s|ps)?", re.ASCII | re.IGNORECASE)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT])B(?:/s|ps)?", re.ASCII)
"""Only the case of the B tells bits from bytes: 10Gb/s are bits, 10GB/s bytes."""
NAMED = {
    "nvlink2": 1200, "nvlink3": 2400, "nvlink4": 3600, "nvlink5": 7200,
    "pcie3": 126, "pcie4": 252, "pcie5": 504,
}  # fmt: skip
"""Gbit/s one way of a GPU's links, by the data sheets: NVLink of V100, A100, H100 and B200, and
PCIe with 16 lanes. NVIDIA's totals for NVLink (300 to 1,800 GB/s) count both ways."""
_NVLINK = "nvlink3"
"""NVLink without a generation: that of an A100."""


def parse_rate(text: str, fastest: int = _FASTEST) -> int:
    """Return bits per second of `100mbit`, `10Gbps`, `10 Gbit/s`, `1.2 GB/s`, `NVLink`, ..."""
    rate = _named_rate(text) or _written_rate(text)
    if rate is None:
        raise ConfigError(
            f"link must be a number and kbit, mbit or gbit, such as 100mbit, got {text!r:.60}"
        )
    if not SLOWEST <= rate <= fastest:
        raise ConfigError(
            f"link must be from {show_rate(SLOWEST)} to {show_rate(fastest)}, got {text!r:.60}"
        )
    return round(rate)


def _named_rate(text: str) -> float | None:
    """Return bits per second of the name of a link; None for other text."""
    name = re.sub(r"[\s_-]", "", text.lower()).replace("gen", "").removesuffix("x16")
    gbits = NAMED.get(_NVLINK if name == "nvlink" else name)
    return None if gbits is None else float(gbits * UNITS["g"])


def _written_rate(text: str) -> float | None:
    """Return bits per second of a number with its unit; None for other text."""
    in_bytes = _BYTES.fullmatch(text.strip())
    match = in_bytes or _BITS.fullmatch(text.strip())
    if match is None:
        return None
    return float(match[1]) * UNITS[match[2].lower()] * (8 if in_bytes else 1)


def show_rate(rate: float) -> str:
    """Return the rate as people write it: 96.1 Mbit/s."""
    unit = next((u for u in "tgm" if rate >= 0.9995 * UNITS[u]), "k")
    return f"{rate / UNITS[unit]:.3g} {unit if unit == 'k' else unit.upper()}bit/s"


def show_time(seconds: float) -> str:
    """Return the time as people write it: 5.1 ms."""
    return f"{1e3 * seconds:.3g} ms"


def parse_time(text: str | float, name: str = "latency") -> float:
    """Return seconds of `50us`, `5 ms`, `0.1s`, or of a number of seconds."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)", str(text).strip().lower())
        if match is None:
            raise ConfigError(
                f"{name} must be a number and s, ms or us, such as 50us; got {text!r}"
            )
        seconds = float(match[1]) * _TIMES[match[2]]
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{name} must be 0 or more seconds, got {text!r}")
    return seconds

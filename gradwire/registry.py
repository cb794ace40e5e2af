"""The names of methods and exchanges, and the options that each of them has."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradwire.compress import METHODS
from gradwire.errors import ConfigError, unknown
from gradwire.exchange import EXCHANGES


def resolve_names(method: str, exchange: str = "") -> tuple[str, str]:
    """Return (method, exchange); `method` may name both, as in "topk/dense".

    Without an exchange the method's default is used.
    """
    name, _, suffix = str(method).partition("/")
    if suffix and exchange not in ("", suffix):
        raise ConfigError(
            f"method={method!r} names exchange {suffix!r}, exchange={exchange!r} another: give one"
        )
    if name == "auto":
        raise ConfigError(
            "method='auto' is for gradwire.attach and the trainers' integrations, on "
            "DistributedDataParallel; here ask `gradwire plan` and give what it recommends"
        )
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    needed = METHODS[name].exchange
    exchange = suffix or exchange or needed or ("dense" if name == "dense" else "allgather")
    if exchange not in EXCHANGES:
        raise unknown("exchange", exchange, EXCHANGES)
    if needed and exchange != needed:
        raise ConfigError(
            f"method {name!r} works with exchange {needed!r} only, in which all agree on what each "
            f"chose in its part; got exchange={exchange!r}: leave it out"
        )
    return name, exchange


def options_of(method: str, exchange: str = "") -> dict[str, Any]:
    """Return the options of a method and an exchange together, with their defaults."""
    method_options = METHODS[method].options
    exchange_options = EXCHANGES[exchange].options if exchange else {}
    if shared := sorted(method_options.keys() & exchange_options.keys()):
        raise ConfigError(
            f"method {method!r} and exchange {exchange!r} both have an option {shared[0]!r}: "
            f"rename one of them"
        )
    return method_options | exchange_options


def parse_options(texts: Sequence[str], method: str, exchange: str = "") -> dict[str, Any]:
    """Return options from "name=value" texts, each value with the type of its default."""
    method, exchange = resolve_names(method, exchange)
    known = options_of(method, exchange)
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"an option is NAME=VALUE, got {text!r}")
        booleans = {"true": True, "false": False}
        kind = type(known.get(name, ""))
        try:
            options[name] = booleans[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            raise ConfigError(
                f"option {name} of {_owner(name, method, exchange)} must be {kind.__name__}, "
                f"got {value!r}"
            ) from None
    return options


def check_options(options: Mapping[str, Any], method: str, exchange: str = "") -> None:
    """Raise ConfigError for an option of the wrong type, or one that neither side has."""
    known = options_of(method, exchange)
    for name, value in options.items():
        if name not in known:
            raise no_option_error(name, method, exchange)
        wanted = type(known[name])
        fits = isinstance(value, int | float if wanted is float else wanted)
        if not fits or (isinstance(value, bool) and wanted is not bool):
            owner = _owner(name, method, exchange)
            raise ConfigError(f"option {name} of {owner} must be {wanted.__name__}, got {value!r}")
    chosen = METHODS[method]
    chosen.check_options({k: v for k, v in options.items() if k in chosen.options})


def _owner(name: str, method: str, exchange: str) -> str:
    return exchange if exchange and name in EXCHANGES[exchange].options else method


def no_option_error(
    name: str, method: str, exchange: str, fields: Iterable[str] = ()
) -> ConfigError:
    """Return the error for an unknown option; the error names the owners of such an option."""
    if not exchange and not METHODS[method].options:
        return ConfigError(f"method {method!r} has no options, got {name!r}")
    pair = f"{method}/{exchange}" if exchange else method
    owners = [n for n, m in METHODS.items() if name in m.options]
    owners += [n for n, x in EXCHANGES.items() if name in x.options]
    if owners:
        return ConfigError(f"{pair} has no option {name!r}; there is one of {', '.join(owners)}")
    known = options_of(method, exchange)
    if not known and not fields:
        return ConfigError(f"{pair} has no options, got {name!r}")
    return unknown("option" if fields else f"option of {pair}", name, {*known, *fields})

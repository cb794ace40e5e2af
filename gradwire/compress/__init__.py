"""Methods of choosing entries: u -> Sparse, one file per method.

A method is a function `(u, k, memory, scan, *, options...) -> Sparse`. It changes nothing but
`memory`. To add a method, write it in a new file, with a METHOD, and add one line to METHODS.
"""

from gradwire.compress.method import BoundMethod, Method
from gradwire.types import Registry

__all__ = ["METHODS", "BoundMethod", "Method"]

METHODS: Registry[Method] = Registry(
    {
        "topk": "gradwire.compress.topk:METHOD",
        "gaussiank": "gradwire.compress.gaussiank:METHOD",
        "dgc": "gradwire.compress.dgc:METHOD",
        "trimmed": "gradwire.compress.trimmed:METHOD",
        "bisect": "gradwire.compress.bisect:METHOD",
        "mstopk": "gradwire.compress.mstopk:METHOD",
        "sidco": "gradwire.compress.sidco:METHOD",
        "threshold": "gradwire.compress.threshold:METHOD",
        "chunked": "gradwire.compress.chunked:METHOD",
        "randk": "gradwire.compress.randk:METHOD",
        "micro": "gradwire.compress.parts.micro:METHOD",
        "exdyna": "gradwire.compress.parts.exdyna:METHOD",
        "deft": "gradwire.compress.parts.deft:METHOD",
        "dense": "gradwire.compress.dense:METHOD",
    }
)

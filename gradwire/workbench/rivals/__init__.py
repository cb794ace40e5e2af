"""The rivals: other ways to train over slow links, to compare with and not to install.

Each simulates P workers on one device. An exchange forms the mean, a part trains with it, and
`catalogue.py` names them. They are workbench: what pays of them is in the library already, as
`sign`, `two-bit`, `decay`, `chunked` and `owner`.
"""

from gradwire.workbench.rivals.catalogue import RIVAL_RATES, RIVALS

__all__ = ["RIVALS", "RIVAL_RATES"]

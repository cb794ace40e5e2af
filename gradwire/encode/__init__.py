"""Sparse <-> one uint8 buffer, and how many bytes that takes."""

from gradwire.encode.message import HEADER, Encoding, Message, decode, encode, nbytes

__all__ = ["HEADER", "Encoding", "Message", "decode", "encode", "nbytes"]

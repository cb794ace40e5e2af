"""Benchmarks of this machine: each stage timed beside the memory floor, in one run."""

from gradwire.workbench.bench.compress import bench_compress
from gradwire.workbench.bench.encode import bench_encode
from gradwire.workbench.bench.exchange import bench_exchange
from gradwire.workbench.bench.row import Row

__all__ = ["Row", "bench_compress", "bench_encode", "bench_exchange"]

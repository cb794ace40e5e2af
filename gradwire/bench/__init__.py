"""What this machine does: each stage timed against the memory floor, in one run."""

from gradwire.bench.compress import bench_compress
from gradwire.bench.encode import bench_encode
from gradwire.bench.exchange import bench_exchange
from gradwire.bench.row import Row

__all__ = ["Row", "bench_compress", "bench_encode", "bench_exchange"]

"""What uses the library: command line, training, models, data, studies, benchmarks, lab."""

"""The users of the library: command line, training, models, data, studies, benchmarks, lab."""

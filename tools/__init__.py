"""For people: command line, reference engine, reports and benchmarks."""

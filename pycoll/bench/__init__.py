"""The library of all benchmarks: oracle, cases, timing, records, and libraries under test."""

"""Pipeline schedules as data: generators, registry, proof and simulation."""

"""Pipeline schedules as data: generators, registry, validation and simulation."""

// Schedules and programs as stable text, like SQLite's EXPLAIN.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

/// One line: `send chunk 1 -> rank 2`, `recv-reduce-send chunk 0: rank 3, self -> rank 1`.
std::string explain_step(const Program& program, const Step& step);

/// The whole program of every rank, in the format of the golden files.
std::string explain(const Schedule& schedule, const std::vector<Program>& programs);

}  // namespace pycoll

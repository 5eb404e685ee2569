// The main function of every perf binary.
#pragma once

#include <string_view>

namespace pycoll::perf {

/// Measures the collective of this name as the arguments say. Returns the exit status: 0, 1 when
/// an element was wrong or a rank failed, 2 when asked wrongly.
int run(std::string_view collective, int argc, char** argv);

}  // namespace pycoll::perf

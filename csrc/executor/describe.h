// Calls and records as text, for errors that name both sides.
#pragma once

#include <string>

#include "transport/segment.h"

namespace pycoll {

/// `all_reduce #412`.
std::string describe_operation(const CallRecord& record);
/// `all_reduce(shape (3, 4), dtype f32, op sum)`, as the record's rank called it.
std::string describe_call(const CallRecord& record);

}  // namespace pycoll

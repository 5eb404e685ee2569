// From the arrays of a call to the core's buffers: which shapes each collective takes, where the
// result goes, and what may overlap.
#pragma once

#include <span>

#include "bindings/arguments/invocation.h"

namespace pycoll {

/// Fills the call's buffers, counts and shape, and `in.result`. `in.call` has the collective and
/// the root. Arrays are cut into blocks along their first axis; its entries are rows.
/// Raises UsageError for arrays that do not fit.
void set_operands(Invocation& in);

}  // namespace pycoll

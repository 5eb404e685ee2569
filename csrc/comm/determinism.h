// deterministic=True: the bits of a result are those of one reduction from rank 0 on, in the type
// that the dtype is accumulated in, rounded once. Whatever else decides bits - the algorithm, where
// a message is cut, the number of slots - must not.
#pragma once

#include "comm/call.h"
#include "schedule/expressions.h"

namespace pycoll {

/// The least canonical order of reduction that gives these bits for `call`; kOther: any does,
/// which is so for every call that does not ask.
Order order_needed(const Call& call);

}  // namespace pycoll

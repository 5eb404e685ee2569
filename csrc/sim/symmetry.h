// Combines ranks that behave equally into one actor. The result is exact.
//
// The partition of ranks, channels and links is refined until it is equitable: ranks of a class run
// the same script over channels of the same classes, channels of a class cross links of the same
// classes, and every link of a class is crossed by equally many channels of each class. Then, by
// induction over simulated time, all members of a class are always in the same state: nothing in
// the model (max-min fair shares, slots, steps) depends on names or on the order of ties.
//
// Source: colour refinement, B. Weisfeiler, A. Leman, 1968; equitable partitions, C. Godsil,
// G. Royle, "Algebraic Graph Theory", 2001, chapter 9.
#pragma once

#include <optional>

#include "sim/flow_system.h"

namespace pycoll {

/// The system of classes. Returns nothing when it would have more than half as many actors, or
/// would need too many rounds of refinement. Cost: rounds times channels; a ring of n ranks needs
/// as many rounds as hosts differ along it.
std::optional<FlowSystem> compress(const FlowSystem& full);

}  // namespace pycoll

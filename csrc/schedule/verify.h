// The proof: executes lowered programs on symbolic values with a given number of slots.
//
// Proved: the goal state is reached; no contribution is lost or counted twice; all ranks that end
// with a reduction have the same expression (so the same bits); every link is FIFO and its two ends
// agree on the chunks; there is no deadlock; a slot is written again only after all its readers are
// done; the steps of a phase do not depend on each other, and a phase that waits for all that its
// steps wait for, and only then posts, comes to an end. The programs are a Kahn network with
// bounded buffers, so one order of execution represents all, and a program that completes once also
// completes when it is repeated for every tile.
#pragma once

#include <string>
#include <vector>

#include "schedule/expressions.h"
#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

struct Proof {
  bool ok = false;
  std::string error;  // what fails, and where; empty when ok
  int slots = 0;
  // The least canonical order of any reduction that the goal asks for; kFlat when there is none.
  Order order = Order::kOther;
};

/// `collective`, `num_chunks` and `root` define what the programs must achieve.
Proof verify(const Schedule& schedule, const std::vector<Program>& programs, int slots);

/// The smallest number of slots in [1, max_slots] for which verify() holds, or 0 if there is none;
/// then `error` (if given) gets the reason why max_slots is not enough. `order` (if given) gets the
/// order of the proof.
int min_safe_slots(const Schedule& schedule, const std::vector<Program>& programs, int max_slots,
                   std::string* error = nullptr, Order* order = nullptr);

}  // namespace pycoll

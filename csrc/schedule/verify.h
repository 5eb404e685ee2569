// The proof: lowered programs are executed on symbolic values under a real number of slots.
//
// Proved: the goal state is reached; no contribution is lost or counted twice; all ranks that end
// with a reduction have the same expression (so the same bits); every link is FIFO with both ends
// agreeing on the chunks; nothing deadlocks; a slot is written again only after all its readers are
// done. The programs are a Kahn network with bounded buffers, so one order of execution speaks for
// all, and a program that completes once completes when repeated for every tile.
#pragma once

#include <string>
#include <vector>

#include "schedule/expressions.h"
#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

struct Proof {
  bool ok = false;
  std::string error;  // what fails, where: empty when ok
  int slots = 0;
  // The least canonical order of any reduction that the goal asks for; kFlat when there is none.
  Order order = Order::kOther;
};

/// `collective`, `num_chunks` and `root` say what the programs must achieve.
Proof verify(const Schedule& schedule, const std::vector<Program>& programs, int slots);

/// The smallest slot count in [1, max_slots] for which verify() holds, or 0 with no such count;
/// then `error` (when given) tells why max_slots does not do. `order` (when given) gets the
/// proof's.
int min_safe_slots(const Schedule& schedule, const std::vector<Program>& programs, int max_slots,
                   std::string* error = nullptr, Order* order = nullptr);

}  // namespace pycoll

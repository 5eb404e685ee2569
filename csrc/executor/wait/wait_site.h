// What a rank is waiting for: used in error messages and by the progress engine.
#pragma once

namespace pycoll {

struct WaitSite {
  int peer = 0;             // rank that must act
  int step = 0;             // of the program
  int chunk = 0;            // first chunk of the step
  bool for_credit = false;  // waits for a free slot rather than for a full one
  // Replaces the check for trouble at a collective's peer: checks for what could make this wait
  // endless, and returns true to end it.
  bool (*look)(const void* context) = nullptr;
  const void* look_context = nullptr;
};

}  // namespace pycoll

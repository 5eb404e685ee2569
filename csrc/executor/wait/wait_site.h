// What a wait is for, for messages and for who looks after it.
#pragma once

namespace pycoll {

struct WaitSite {
  int peer = 0;             // rank that must act
  int step = 0;             // of the program
  int chunk = 0;            // first chunk of the step
  bool for_credit = false;  // a free slot, rather than a full one
  // Looks for what could make this wait endless, instead of the look for a collective's peer; true
  // ends the wait.
  bool (*look)(const void* context) = nullptr;
  const void* look_context = nullptr;
};

}  // namespace pycoll

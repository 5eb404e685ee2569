// Estimates the time of an operation on ranks that share a host's memory and cores, from their
// programs.
//
// Model: the writer of b bytes is busy for b*beta/2 per slot (once for a multicast slot, whatever
// its readers), each of its readers for b*beta/2, and combining takes b*gamma per further source;
// each slot costs its writer and its reader a few instructions. Written bytes can be read alpha
// later. When ranks outnumber the cores, a waiting rank yields its core: alpha is then a turn of
// the scheduler, which every waiting step costs, and the cores' time for the work of all ranks is
// added to the longest chain of steps. Otherwise a quarter of a rank's mean work is added, since
// calls follow each other.
//
// Between hosts a message also costs both ranks some instructions and a copy; what a rank has in a
// local buffer it sends without a slot. The message waits until its host's port has sent the
// messages before it and the receiver's port has received those before it, at beta per byte each,
// and can be read alpha later. Copies and the transfer of one message overlap.
//
// Without slots (plan/direct_plan.h) a rank is busy for b*beta per b bytes of a peer that it reads
// or writes, and waits for alpha twice: at the exchange and at the exit.
//
// schedule/simulate.h models links with ports, for pictures and formulas; there a multicast costs
// as much as n-1 messages, in memory it does not.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/direct_plan.h"
#include "schedule/schedule.h"
#include "schedule/simulate.h"
#include "schedule/step.h"
#include "topology/topology.h"

namespace pycoll {

/// Lowers as a plan does: messages hold several blocks if these fit one slot together.
std::vector<Program> lower_for(const Schedule& schedule, int64_t nbytes,
                               const HostLevel& hosts = {});

/// Seconds from the first rank's start to the last one's end.
/// Cost: one visit of every step for each of at most 4 tiles.
double estimate_s(const std::vector<Program>& programs, int64_t nbytes, const LinkCost& cost,
                  int num_cores, const HostLevel& hosts = {});

/// Like estimate_s(), without slots. `work`: by rank, for blocks of `block_nbytes`.
double estimate_direct_s(const std::vector<DirectWork>& work, double block_nbytes,
                         const LinkCost& cost, int num_cores);

}  // namespace pycoll

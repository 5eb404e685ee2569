// How long ranks that share one host's memory and cores take for a message, from their programs.
//
// Model: the writer of b bytes is busy for b*beta/2 per slot (a multicast slot once, whatever its
// readers), each of its readers for b*beta/2, and combining takes b*gamma per further source; each
// slot costs its writer and its reader a few instructions. What is written can be read alpha later.
// When ranks are more than cores, a rank that waits gives its core away: alpha is then a turn of
// the scheduler, which every step that waits costs, and the cores' time for the work of all ranks
// adds to the longest chain of steps. Otherwise a quarter of a rank's mean work is added, since
// calls follow each other.
//
// Between hosts a message also costs both ranks some instructions and a copy, then waits until its
// host's port has sent what came before it, and the receiver's port has received what did, at beta
// per byte each, and can be read alpha later.
//
// Without slots (plan/direct_plan.h) a rank is busy for b*beta per b bytes of a peer that it reads
// or writes, and waits twice, at the exchange and at the exit, for alpha each.
//
// schedule/simulate.h is the model of links with ports that pictures and formulas use; there a
// multicast is as dear as n-1 messages, which memory is not.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/direct_plan.h"
#include "schedule/schedule.h"
#include "schedule/simulate.h"
#include "schedule/step.h"
#include "topology/topology.h"

namespace pycoll {

/// Lowers as a plan does: messages hold several blocks where these fit one slot together.
std::vector<Program> lower_for(const Schedule& schedule, int64_t nbytes,
                               const HostLevel& hosts = {});

/// Seconds from the first rank's start to the last one's end.
/// Cost: one visit of every step for each of at most 4 tiles.
double estimate_s(const std::vector<Program>& programs, int64_t nbytes, const LinkCost& cost,
                  int num_cores, const HostLevel& hosts = {});

/// The same without slots. `work`: by rank, of blocks of so many bytes.
double estimate_direct_s(const std::vector<DirectWork>& work, double block_nbytes,
                         const LinkCost& cost, int num_cores);

}  // namespace pycoll

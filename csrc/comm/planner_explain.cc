// What a planner says of its choice, for people.
#include <cstdio>

#include "comm/planner.h"

namespace pycoll {
namespace {

std::string microseconds(double s) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g us", s * 1e6);
  return text;
}

std::string name_of(const PlannedCall& planned) {
  return planned.plan.algorithm + "/" + protocol_name(planned.protocol);
}

std::string either(const CallPlan& plan, Reach reach) {
  const std::string apart = name_of(*plan.of(reach, false));
  const std::string in_place = name_of(*plan.of(reach, true));
  return apart == in_place ? apart : apart + ", or " + in_place + " where x is out";
}

}  // namespace

std::string Planner::describe_arrays(const PlanKey& wanted, const CallPlan& plan) {
  if (!plan.enters) {
    return num_ranks_ == 1 ? "" : "  whatever the arrays: none is reached directly\n";
  }
  if (links_.all_mapped) return "  the ranks are threads: they reach each other's arrays\n";
  const auto why = [&](Arrays arrays) {
    const Rule* rule = selector_.rules().find(wanted.collective, wanted.nbytes);
    return rank_candidates(wanted, arrays, rule).why;
  };
  std::string text =
      "  when all arrays of all ranks are mapped (comm.empty()): " + either(plan, Reach::kMapped) +
      ", " + why(Arrays::kMapped) + "\n";
  if (plan.uses_processes) {
    text += "  when none is, and the system lets processes read each other: " +
            either(plan, Reach::kProcess) + ", " + why(Arrays::kPlain) + "\n";
  }
  return text + "  else: " + name_of(*plan.slots) + ", through slots\n";
}

std::string Planner::explain(const PlanKey& wanted, Arrays arrays, std::string_view transport) {
  const CallPlan& plan = find(wanted);
  if (links_.all_mapped) arrays = Arrays::kMapped;
  const PlannedCall& planned =
      *plan.of(arrays == Arrays::kMapped ? Reach::kMapped : Reach::kProcess, false);
  const Topology& topology = selector_.topology();
  const CollectiveInfo& row =
      info(wanted.collective == Collective::kBarrier ? Collective::kAllReduce : wanted.collective);
  const Rule* rule = selector_.rules().find(row.id, wanted.nbytes);
  // Where nobody asks for the arrays, those of plain ones have decided.
  const Ranking ranking = rank_candidates(wanted, plan.enters ? arrays : Arrays::kPlain, rule);
  std::string text = std::string(info(wanted.collective).name) + " of " +
                     std::to_string(wanted.nbytes) + " bytes on " + std::to_string(num_ranks_) +
                     " ranks: " + name_of(planned) + " over " + std::string(transport) + "\n";
  text += "  chosen " + ranking.why + "\n";
  text += describe_arrays(wanted, plan);
  text +=
      planned.protocol == ProtocolKind::kDirect
          ? std::string("  proved: every byte is read where it starts or written where it ends\n")
          : "  proved: safe with " + std::to_string(planned.plan.min_slots) +
                " slots, links have " + std::to_string(links_.num_slots) + "\n";
  text +=
      "  measured: " +
      (planned.measured_s > 0 ? microseconds(planned.measured_s) + " (mean of " +
                                    std::to_string(planned.num_calls) + " calls of this size class)"
                              : std::string("not yet")) +
      "\n  " + arrays_name(arrays) +
      " arrays: the best first, predicted by simulation and measured by `pycoll tune`:\n";
  for (const Candidate& candidate : ranking.candidates) {
    char line[128];
    std::snprintf(line, sizeof(line), "    %-18s %-7s %12s %12s\n", candidate.algorithm.c_str(),
                  protocol_name(candidate.protocol),
                  candidate.predicted_s > 0 ? microseconds(candidate.predicted_s).c_str() : "-",
                  candidate.tabled_s > 0 ? microseconds(candidate.tabled_s).c_str() : "-");
    text += line;
  }
  text += selector_.describe_sources();
  if (topology.oversubscribed()) {
    text += "  " + std::to_string(num_ranks_) + " ranks share " +
            std::to_string(topology.num_cores) +
            " cores: each message is taken to cost a turn of the scheduler\n";
  }
  return text;
}

}  // namespace pycoll

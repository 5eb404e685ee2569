// Planner::explain(): what pycoll would choose for a call, and why, for people.
#include <cstdio>

#include "comm/planner.h"

namespace pycoll {
namespace {

std::string three_digits(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", value);
  return text;
}

std::string microseconds(double s) { return three_digits(s * 1e6) + " us"; }

std::string name_of(const PlannedCall& planned) {
  return planned.plan.algorithm + "/" + protocol_name(planned.protocol);
}

std::string names_of(const CallPlan& plan, Reach reach) {
  const std::string out_of_place = name_of(*plan.of(reach, false));
  const std::string in_place = name_of(*plan.of(reach, true));
  return out_of_place == in_place ? in_place : out_of_place + ", or " + in_place + " in place";
}

/// The plans that calls try, and what they took.
std::string text_of(const TunedPlans& tuned) {
  constexpr const char* kHow[kNumReaches] = {"through slots", "on copies",
                                             "by the kernel's copies"};
  std::string text;
  for (size_t i = 0; i < tuned.plans().size(); ++i) {
    const TunedPlan& plan = tuned.plans()[i];
    const double us_per_mib = tuned.ns_per_byte(i) * (1 << 20) * 1e-3;
    char line[128];
    std::snprintf(line, sizeof(line), "    %-26s %-22s %12s\n", name_of(*plan.planned).c_str(),
                  plan.planned->claims_few_slots ? "through few slots"
                                                 : kHow[static_cast<size_t>(plan.reach)],
                  us_per_mib > 0 ? (three_digits(us_per_mib) + " us/MiB").c_str() : "not yet");
    text += line;
  }
  return text;
}

}  // namespace

std::string Planner::describe_arrays(const PlanKey& wanted, const CallPlan& plan) {
  if (!plan.exchanges_buffers) {
    return num_ranks_ == 1 ? "" : "  for all arrays: the ranks do not access them directly\n";
  }
  if (links_.all_mapped)
    return "  the ranks are threads, and access each other's arrays directly\n";
  const auto why = [&](Arrays arrays) {
    const Rule* rule = selector_.rules().find(wanted.collective, wanted.nbytes);
    return rank_candidates(wanted, arrays, rule).why;
  };
  std::string text =
      "  if all arrays of all ranks are mapped (comm.empty()): " + names_of(plan, Reach::kMapped) +
      ", " + why(Arrays::kMapped) + "\n";
  if (plan.tuned.is_on()) {
    text += "  if not all are, calls try these plans in turn, and use the fastest; measured:\n" +
            text_of(plan.tuned);
  } else if (plan.uses_processes) {
    text += "  if none is, and processes may read each other's memory: " +
            names_of(plan, Reach::kProcess) + ", " + why(Arrays::kPlain) + "\n";
  }
  if (plan.copies_arrays && !plan.tuned.is_on()) {
    text += "  arrays that are not mapped are copied to mapped memory: " +
            name_of(*plan.of(Reach::kMapped, true)) + " in place\n";
  }
  return text + "  else: " + name_of(*plan.slots) + ", through slots\n";
}

std::string Planner::explain(const PlanKey& wanted, Arrays arrays, std::string_view transport) {
  const CallPlan& plan = find(wanted);
  const bool tuned = plan.tuned.is_on() && arrays == Arrays::kPlain;
  const bool copied = tuned ? plan.tuned.best().reach == Reach::kMapped
                            : plan.copies_arrays && arrays == Arrays::kPlain;
  if (links_.all_mapped || copied) arrays = Arrays::kMapped;
  const PlannedCall& planned =
      tuned ? *plan.tuned.best().planned
            : *plan.of(arrays == Arrays::kMapped ? Reach::kMapped : Reach::kProcess, copied);
  const Topology& topology = selector_.topology();
  const CollectiveInfo& row =
      info(wanted.collective == Collective::kBarrier ? Collective::kAllReduce : wanted.collective);
  const Rule* rule = selector_.rules().find(row.id, wanted.nbytes);
  // If the ranks do not exchange their buffers, the ranking for plain arrays has decided.
  const Ranking ranking =
      rank_candidates(wanted, plan.exchanges_buffers ? arrays : Arrays::kPlain, rule);
  std::string text = std::string(info(wanted.collective).name) + " of " +
                     std::to_string(wanted.nbytes) + " bytes on " + std::to_string(num_ranks_) +
                     " ranks: " + name_of(planned) + " over " + std::string(transport) + "\n";
  const bool by_times = tuned && plan.tuned.best().planned != plan.tuned.plans().front().planned;
  text += "  chosen " + (by_times ? "by the times of calls" : ranking.why) + "\n";
  text += describe_arrays(wanted, plan);
  text += is_direct(planned.protocol)
              ? std::string("  proved: runs without intermediate copies\n")
              : "  proved: safe with " + std::to_string(planned.plan.min_slots) +
                    " slots, links have " + std::to_string(links_.num_slots) + "\n";
  text +=
      "  measured: " +
      (planned.measured_s > 0 ? microseconds(planned.measured_s) + " (mean of " +
                                    std::to_string(planned.num_calls) + " calls of this size class)"
                              : std::string("not yet")) +
      "\n  " + arrays_name(arrays) +
      " arrays, best first; times predicted by simulation and measured by `pycoll tune`:\n";
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
            " cores: the simulation adds a scheduler time slice to each wait\n";
  }
  return text;
}

}  // namespace pycoll

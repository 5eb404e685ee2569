#include "perf/run.h"

#include <algorithm>
#include <cstdio>
#include <optional>

#include "base/error.h"
#include "perf/measure.h"
#include "perf/options.h"
#include "perf/ranks.h"
#include "perf/report.h"
#include "perf/sendrecv.h"

namespace pycoll::perf {
namespace {

/// Why a dtype and op cannot be measured together, or nothing.
std::optional<std::string> impossible(const CollectiveInfo& collective, DType dtype, Op op) {
  try {
    Pattern(collective, dtype, op, 0, 1);
    return {};
  } catch (const UsageError& error) {
    return error.what();
  }
}

bool measure_all(Communicator& comm, const Options& options, const CollectiveInfo& collective) {
  if (options.root >= comm.size()) {
    throw UsageError("--root " + std::to_string(options.root) + ": there are " +
                     std::to_string(comm.size()) + " ranks");
  }
  std::optional<Report> report;
  if (comm.rank() == 0) report.emplace(options, collective, comm);
  const std::vector<Op> ops = collective.has_op ? options.ops : std::vector<Op>{Op::kSum};
  std::vector<int64_t> all_sizes = sizes(options);
  if (collective.id == Collective::kBarrier) all_sizes = {0};
  int64_t num_wrong = 0;
  for (const DType dtype : options.dtypes) {
    for (const Op op : ops) {
      if (const auto why = impossible(collective, dtype, op)) {
        if (options.dtypes.size() * ops.size() == 1) throw UsageError(*why);
        if (report) report->comment(*why);
        continue;
      }
      for (const int64_t nbytes : all_sizes) {
        const auto unit =
            static_cast<int64_t>(dtype_size(dtype)) * collective.blocks_per_payload(comm.size());
        const RowPlan plan{collective, dtype, op, nbytes / unit};
        const auto out_of_place = measure(comm, options, plan, false);
        const auto in_place = measure(comm, options, plan, true);
        for (const auto& figures : {out_of_place, in_place}) {
          if (figures) num_wrong += figures->num_wrong.value_or(0);
        }
        if (report) report->add(plan, out_of_place, in_place);
      }
    }
  }
  if (report) report->end();
  return num_wrong == 0;
}

}  // namespace

int run(std::string_view name, int argc, char** argv) {
  try {
    const CollectiveInfo& collective = row_of(name);
    const Options options = parse_options(collective, argc, argv);
    return run_ranks(options,
                     [&](Communicator& comm) { return measure_all(comm, options, collective); });
  } catch (const UsageError& error) {
    std::fprintf(stderr, "%s_perf: %s\n", name.data(), error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s_perf: %s\n", name.data(), error.what());
    return 1;
  }
}

}  // namespace pycoll::perf

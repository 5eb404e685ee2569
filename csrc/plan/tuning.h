// The measured table: the results of `pycoll tune` on a machine, as lines of text.
//
//   pycoll-tuning 2                                the format's version
//   pycoll 0.1.0                                   the version that measured
//   machine AMD EPYC 9V74; 2 cores; x86_64         the machine (comm/machine.h)
//   cost RANKS CORES ARRAYS DATE PROTOCOL ALPHA_S BETA_S_PER_BYTE GAMMA_S_PER_BYTE
//   time COLLECTIVE RANKS CORES ARRAYS NBYTES DATE CHOICE=SECONDS ...
//   end DIGEST                                     FNV-1a of all lines before, 16 hex digits
//
// CORES is the number that the ranks could use, ARRAYS the kind of the arrays' memory
// (base/arrays.h: plain or mapped), a CHOICE is ALGORITHM/PROTOCOL, and a date is
// 2026-11-21T14:30:00Z. One space separates words. The last line tells a complete file from a
// truncated one. Names unknown to this build are kept, but never chosen.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/arrays.h"
#include "schedule/simulate.h"

namespace pycoll {

struct TunedCost {
  int num_ranks = 0;
  int num_cores = 0;
  Arrays arrays = Arrays::kPlain;
  std::string date;
  std::string protocol;
  LinkCost cost;
};

struct TunedTime {
  std::string choice;  // algorithm/protocol
  double time_s = 0;
};

struct TunedSize {
  std::string collective;
  int num_ranks = 0;
  int num_cores = 0;
  Arrays arrays = Arrays::kPlain;
  int64_t nbytes = 0;
  std::string date;
  std::vector<TunedTime> times;
};

/// The table's answer for one size: as measured, or interpolated between the neighbouring sizes.
struct TunedAnswer {
  std::vector<TunedTime> times;  // the fastest first; empty: the table says nothing
  std::string date;
  int64_t below_nbytes = 0;  // the measured sizes that the answer comes from
  int64_t above_nbytes = 0;
};

struct TuningTable {
  std::string version;  // of pycoll
  std::string machine;
  std::vector<TunedCost> costs;
  std::vector<TunedSize> sizes;

  /// Raises UsageError that names the first bad line.
  static TuningTable parse(std::string_view text);
  std::string to_text() const;

  /// Times for the same number of ranks and cores and such arrays. Between two measured sizes, each
  /// choice's time is interpolated on a log-log scale; outside them, the nearest size applies.
  TunedAnswer at(std::string_view collective, int num_ranks, int num_cores, Arrays arrays,
                 int64_t nbytes) const;
  /// Fitted costs for the same number of ranks, else for the nearest number that is oversubscribed
  /// if and only if this one is. Null when there are none.
  const TunedCost* cost(std::string_view protocol, int num_ranks, int num_cores,
                        Arrays arrays) const;
};

}  // namespace pycoll

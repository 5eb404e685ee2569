// The columns of nccl-tests on standard output, and the same figures as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "perf/measure.h"

namespace pycoll::perf {

/// The output of rank 0; the other ranks have none.
class Report {
 public:
  Report(const Options& options, const CollectiveInfo& collective, const Communicator& comm);

  void add(const RowPlan& plan, const std::optional<Figures>& out_of_place,
           const std::optional<Figures>& in_place);
  void comment(const std::string& text) const;
  /// Prints the last lines and writes the JSON file. Raises SystemError when it cannot.
  void end();

  int64_t num_wrong() const { return num_wrong_; }

 private:
  void print_form(const std::optional<Figures>& figures, int64_t nbytes);
  std::string json_of(const RowPlan& plan, const Figures& figures, bool in_place) const;
  const char* op_of(const RowPlan& plan) const;

  const Options& options_;
  const CollectiveInfo& collective_;
  int num_ranks_;
  int64_t num_wrong_ = 0;
  double busbw_sum_ = 0;
  int num_busbw_ = 0;
  std::vector<std::string> json_rows_;
};

}  // namespace pycoll::perf

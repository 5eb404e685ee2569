#include "perf/report.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <memory>

#include "base/error.h"

namespace pycoll::perf {
namespace {

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof(text), pattern, arguments);
  va_end(arguments);
  return text;
}

}  // namespace

Report::Report(const Options& options, const CollectiveInfo& collective, const Communicator& comm)
    : options_(options), collective_(collective), num_ranks_(comm.size()) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  const char* const kinds[] = {"processes", "threads", "launched processes"};
  std::printf("# pycoll %s_perf: %d ranks (%s) on %s, transport %s\n", collective.name.data(),
              num_ranks_, kinds[static_cast<int>(options.ranks_are)], host,
              std::string(comm.transport_name()).c_str());
  std::printf(
      "# minBytes %lld maxBytes %lld step: %lld(%s) warmup iters: %d iters of a block: %s "
      "validate: %d blocking: %d registered: %s algorithm: %s\n",
      static_cast<long long>(options.min_bytes), static_cast<long long>(options.max_bytes),
      static_cast<long long>(options.step_factor > 0 ? options.step_factor : options.step_bytes),
      options.step_factor > 0 ? "factor" : "bytes", options.warmup_iters,
      options.iters > 0 ? std::to_string(options.iters).c_str() : "2 ms of them", options.check,
      options.blocking,
      options.registered ? std::to_string(*options.registered).c_str() : "from 64 KiB on",
      options.algorithm.empty() ? "pycoll chooses" : options.algorithm.c_str());
  std::printf("#\n#%12s  %12s  %8s  %6s  %6s  %30s  %30s\n", "", "", "", "", "",
              "         out-of-place         ", "           in-place           ");
  std::printf("#%12s  %12s  %8s  %6s  %6s", "size", "count", "type", "redop", "root");
  for (int i = 0; i < 2; ++i) std::printf("  %9s %6s %6s %6s", "time", "algbw", "busbw", "#wrong");
  std::printf("\n#%12s  %12s  %8s  %6s  %6s", "(B)", "(elements)", "", "", "");
  for (int i = 0; i < 2; ++i) std::printf("  %9s %6s %6s %6s", "(us)", "(GB/s)", "(GB/s)", "");
  std::printf("\n");
}

void Report::comment(const std::string& text) const {
  std::printf("# %s\n", text.c_str());
  std::fflush(stdout);
}

void Report::print_form(const std::optional<Figures>& figures, int64_t nbytes) {
  if (!figures) {
    std::printf("  %9s %6s %6s %6s", "N/A", "N/A", "N/A", "N/A");
    return;
  }
  const double rate = static_cast<double>(nbytes) / figures->median_s / 1e9;  // GB/s
  const double busbw = rate * collective_.busbw_factor(num_ranks_);
  const double us = figures->median_s * 1e6;
  busbw_sum_ += busbw;
  ++num_busbw_;
  num_wrong_ += figures->num_wrong.value_or(0);
  const std::string wrong = figures->num_wrong ? std::to_string(*figures->num_wrong) : "N/A";
  const int digits = us < 100 ? 3 : us < 10000 ? 1 : 0;
  std::printf("  %9.*f %6.2f %6.2f %6s", digits, us, rate, busbw, wrong.c_str());
}

std::string Report::json_of(const RowPlan& plan, const Figures& figures, bool in_place) const {
  const int64_t nbytes = plan.payload_bytes(num_ranks_);
  const double algbw = static_cast<double>(nbytes) / figures.median_s;
  const std::string wrong = figures.num_wrong ? std::to_string(*figures.num_wrong) : "null";
  const std::string case_ = format(
      "{\"collective\": \"%s\", \"dtype\": \"%s\", \"num_ranks\": %d, \"nbytes\": %lld, "
      "\"op\": \"%s\", \"in_place\": %s, \"library\": \"pycoll C++\", ",
      collective_.name.data(), dtype_name(plan.dtype).data(), num_ranks_,
      static_cast<long long>(nbytes), op_of(plan), in_place ? "true" : "false");
  return case_ + format(
                     "\"algorithm\": \"%s\", \"where\": \"\", \"rewritten\": false, \"median_s\": "
                     "%.9g, \"min_s\": %.9g, "
                     "\"p99_s\": %.9g, \"num_calls\": %lld, \"algbw\": %.0f, \"busbw\": %.0f, "
                     "\"chosen\": \"%s\", \"num_wrong\": %s}",
                     options_.algorithm.empty() ? "auto" : options_.algorithm.c_str(),
                     figures.median_s, figures.min_s, figures.p99_s,
                     static_cast<long long>(figures.num_calls), algbw,
                     algbw * collective_.busbw_factor(num_ranks_), options_.algorithm.c_str(),
                     wrong.c_str());
}

const char* Report::op_of(const RowPlan& plan) const {
  return collective_.has_op ? op_name(plan.op).data() : "none";
}

void Report::add(const RowPlan& plan, const std::optional<Figures>& out_of_place,
                 const std::optional<Figures>& in_place) {
  const int64_t nbytes = plan.payload_bytes(num_ranks_);
  const int root = collective_.has_root ? options_.root : -1;
  std::printf(" %12lld  %12lld  %8s  %6s  %6d", static_cast<long long>(nbytes),
              static_cast<long long>(plan.count), dtype_name(plan.dtype).data(), op_of(plan), root);
  print_form(out_of_place, nbytes);
  print_form(in_place, nbytes);
  std::printf("\n");
  std::fflush(stdout);
  if (out_of_place) json_rows_.push_back(json_of(plan, *out_of_place, false));
  if (in_place) json_rows_.push_back(json_of(plan, *in_place, true));
}

void Report::end() {
  std::printf("# Out of bounds values : %lld %s\n", static_cast<long long>(num_wrong_),
              num_wrong_ == 0 ? "OK" : "FAILED");
  std::printf("# Avg bus bandwidth    : %g\n#\n", num_busbw_ > 0 ? busbw_sum_ / num_busbw_ : 0.0);
  std::fflush(stdout);
  if (options_.json_path.empty()) return;
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(options_.json_path.c_str(), "w"),
                                                   std::fclose);
  if (file == nullptr) throw SystemError("--json: cannot write " + options_.json_path);
  // As pycoll/bench/record.py.
  std::fprintf(file.get(), "{\"schema\": 3,\n\"complete\": true,\n\"root\": %d,\n\"rows\": [",
               options_.root);
  for (size_t i = 0; i < json_rows_.size(); ++i) {
    std::fprintf(file.get(), "%s\n%s", i == 0 ? "" : ",", json_rows_[i].c_str());
  }
  std::fprintf(file.get(), "\n]}\n");
}

}  // namespace pycoll::perf

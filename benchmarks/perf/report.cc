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

/// GB/s, units of 1000.
double algbw(int64_t nbytes, double us) { return static_cast<double>(nbytes) / us / 1e3; }

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
      "# minBytes %lld maxBytes %lld step: %lld(%s) warmup iters: %d iters: %d "
      "validate: %d blocking: %d registered: %d algorithm: %s\n",
      static_cast<long long>(options.min_bytes), static_cast<long long>(options.max_bytes),
      static_cast<long long>(options.step_factor > 0 ? options.step_factor : options.step_bytes),
      options.step_factor > 0 ? "factor" : "bytes", options.warmup_iters, options.iters,
      options.check, options.blocking, options.registered,
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
  const double rate = algbw(nbytes, figures->mean_us);
  const double busbw = rate * collective_.busbw_factor(num_ranks_);
  busbw_sum_ += busbw;
  ++num_busbw_;
  num_wrong_ += figures->num_wrong.value_or(0);
  const std::string wrong = figures->num_wrong ? std::to_string(*figures->num_wrong) : "N/A";
  const int digits = figures->mean_us < 100 ? 3 : figures->mean_us < 10000 ? 1 : 0;
  std::printf("  %9.*f %6.2f %6.2f %6s", digits, figures->mean_us, rate, busbw, wrong.c_str());
}

std::string Report::json_of(const std::optional<Figures>& figures, int64_t nbytes) const {
  if (!figures) return "null";
  const double rate = algbw(nbytes, figures->mean_us);
  return format(
      "{\"time_us\": %.4f, \"median_us\": %.4f, \"min_us\": %.4f, \"algbw\": %.4f, "
      "\"busbw\": %.4f, \"wrong\": %s}",
      figures->mean_us, figures->median_us, figures->min_us, rate,
      rate * collective_.busbw_factor(num_ranks_),
      figures->num_wrong ? std::to_string(*figures->num_wrong).c_str() : "null");
}

void Report::add(const RowPlan& plan, const std::optional<Figures>& out_of_place,
                 const std::optional<Figures>& in_place) {
  const int64_t nbytes = plan.message_bytes(num_ranks_);
  const char* const op = collective_.has_op ? op_name(plan.op).data() : "none";
  const int root = collective_.has_root ? options_.root : -1;
  std::printf(" %12lld  %12lld  %8s  %6s  %6d", static_cast<long long>(nbytes),
              static_cast<long long>(plan.count), dtype_name(plan.dtype).data(), op, root);
  print_form(out_of_place, nbytes);
  print_form(in_place, nbytes);
  std::printf("\n");
  std::fflush(stdout);
  json_rows_.push_back(format("{\"size\": %lld, \"count\": %lld, \"type\": \"%s\", \"redop\": "
                              "\"%s\", \"root\": %d, \"out_of_place\": ",
                              static_cast<long long>(nbytes), static_cast<long long>(plan.count),
                              dtype_name(plan.dtype).data(), op, root) +
                       json_of(out_of_place, nbytes) +
                       ", \"in_place\": " + json_of(in_place, nbytes) + "}");
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
  std::fprintf(file.get(), "{\"collective\": \"%s\", \"ranks\": %d, \"iters\": %d, \"rows\": [",
               collective_.name.data(), num_ranks_, options_.iters);
  for (size_t i = 0; i < json_rows_.size(); ++i) {
    std::fprintf(file.get(), "%s\n %s", i == 0 ? "" : ",", json_rows_[i].c_str());
  }
  std::fprintf(file.get(), "\n]}\n");
}

}  // namespace pycoll::perf

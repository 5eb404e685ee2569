#include "plan/tuning.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "base/error.h"

namespace pycoll {
namespace {

constexpr std::string_view kFormat = "pycoll-tuning 2";

std::string digest_of(std::string_view text) {
  uint64_t hash = 1469598103934665603ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

/// Splits a text into lines and words; an error names the line.
class Reader {
 public:
  explicit Reader(std::string_view text) : left_(text) {}

  bool at_end() const { return left_.empty(); }
  std::string_view rest() const { return left_; }

  void next_line() {
    ++line_idx_;
    const size_t end = left_.find('\n');
    if (end == std::string_view::npos) fail("the file ends in the middle of this line");
    line_ = left_.substr(0, end);
    left_.remove_prefix(end + 1);
  }
  std::string_view line() const { return line_; }
  bool line_has_more() const { return !line_.empty(); }

  std::string_view word(const char* what) {
    const size_t end = std::min(line_.find(' '), line_.size());
    const std::string_view found = line_.substr(0, end);
    const bool last = end == line_.size();
    if (found.empty() || (!last && end + 1 == line_.size())) fail(std::string("expected ") + what);
    line_.remove_prefix(last ? end : end + 1);
    return found;
  }
  std::string name(const char* what, bool slash = false) {
    const std::string_view found = word(what);
    check_name(found, what, slash);
    return std::string(found);
  }
  void check_name(std::string_view found, const char* what, bool slash) const {
    const auto good = [slash](char c) {
      return std::islower(static_cast<unsigned char>(c)) != 0 ||
             std::isdigit(static_cast<unsigned char>(c)) != 0 || c == '_' || (slash && c == '/');
    };
    if (found.empty() || !std::all_of(found.begin(), found.end(), good)) {
      fail(std::string("expected ") + what);
    }
  }
  int64_t integer(const char* what, int64_t least, int64_t most) {
    return number<int64_t>(word(what), what, least, most);
  }
  double seconds(const char* what) { return seconds_from(word(what), what); }
  double seconds_from(std::string_view found, const char* what) const {
    return number<double>(found, what, 0, 1e6);
  }
  Arrays arrays() {
    const auto found = find_arrays(word("plain or mapped"));
    if (!found) fail("expected plain or mapped");
    return *found;
  }
  std::string date() {
    constexpr std::string_view kForm = "0000-00-00T00:00:00Z";
    const std::string_view found = word("a date");
    bool good = found.size() == kForm.size();
    for (size_t i = 0; good && i < kForm.size(); ++i) {
      good = kForm[i] == '0' ? std::isdigit(static_cast<unsigned char>(found[i])) != 0
                             : found[i] == kForm[i];
    }
    if (!good) fail("expected a date such as 2026-11-21T14:30:00Z");
    return std::string(found);
  }
  void expect_line_end() const {
    if (line_has_more()) fail("it has more words than expected");
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw UsageError("line " + std::to_string(line_idx_) + ": " + why);
  }

 private:
  template <class Number>
  Number number(std::string_view text, const char* what, Number least, Number most) const {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    // This form of the comparison also refuses a NaN.
    if (error != std::errc() || end != text.data() + text.size() ||
        !(value >= least && value <= most)) {
      fail(std::string("expected ") + what);
    }
    return value;
  }

  std::string_view left_;
  std::string_view line_;
  int line_idx_ = 0;
};

std::string_view line_after(Reader& reader, std::string_view word) {
  reader.next_line();
  if (reader.word("a word") != word) reader.fail("expected '" + std::string(word) + "'");
  if (!reader.line_has_more()) reader.fail("expected a text after '" + std::string(word) + "'");
  return reader.line();
}

constexpr int kMostRanks = 1 << 20;

TunedCost read_cost(Reader& reader) {
  TunedCost row;
  row.num_ranks = static_cast<int>(reader.integer("a number of ranks", 1, kMostRanks));
  row.num_cores = static_cast<int>(reader.integer("a number of cores", 1, kMostRanks));
  row.arrays = reader.arrays();
  row.date = reader.date();
  row.protocol = reader.name("a protocol");
  row.cost.alpha_s = reader.seconds("alpha in seconds");
  row.cost.beta_s_per_byte = reader.seconds("beta in seconds per byte");
  row.cost.gamma_s_per_byte = reader.seconds("gamma in seconds per byte");
  reader.expect_line_end();
  return row;
}

TunedSize read_size(Reader& reader) {
  TunedSize row;
  row.collective = reader.name("a collective");
  row.num_ranks = static_cast<int>(reader.integer("a number of ranks", 1, kMostRanks));
  row.num_cores = static_cast<int>(reader.integer("a number of cores", 1, kMostRanks));
  row.arrays = reader.arrays();
  row.nbytes = reader.integer("a size in bytes", 1, int64_t{1} << 50);
  row.date = reader.date();
  while (reader.line_has_more()) {
    constexpr const char* kWhat = "a choice with its time, such as ring/simple=1.2e-05";
    const std::string_view pair = reader.word(kWhat);
    const size_t sign = pair.find('=');
    if (sign == std::string_view::npos) reader.fail(std::string("expected ") + kWhat);
    TunedTime time;
    time.choice = pair.substr(0, sign);
    reader.check_name(time.choice, kWhat, /*slash=*/true);
    time.time_s = reader.seconds_from(pair.substr(sign + 1), kWhat);
    if (std::count(time.choice.begin(), time.choice.end(), '/') != 1 || !(time.time_s > 0)) {
      reader.fail(std::string("expected ") + kWhat);
    }
    row.times.push_back(std::move(time));
  }
  if (row.times.empty()) reader.fail("it has no times");
  return row;
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.5g", value);
  return text;
}

void sort_times(std::vector<TunedTime>& times) {
  std::stable_sort(times.begin(), times.end(),
                   [](const TunedTime& a, const TunedTime& b) { return a.time_s < b.time_s; });
}

}  // namespace

TuningTable TuningTable::parse(std::string_view text) {
  Reader reader(text);
  reader.next_line();
  if (reader.line() != kFormat) reader.fail("expected '" + std::string(kFormat) + "'");
  TuningTable table;
  table.version = line_after(reader, "pycoll");
  table.machine = line_after(reader, "machine");
  for (;;) {
    const std::string_view before = text.substr(0, text.size() - reader.rest().size());
    reader.next_line();
    const std::string_view kind = reader.word("cost, time or end");
    if (kind == "cost") {
      table.costs.push_back(read_cost(reader));
    } else if (kind == "time") {
      table.sizes.push_back(read_size(reader));
    } else if (kind == "end") {
      if (reader.word("a digest") != digest_of(before)) {
        reader.fail(
            "the digest does not match the lines before: the file was changed or truncated");
      }
      reader.expect_line_end();
      if (!reader.at_end()) reader.fail("expected no text after the end line");
      return table;
    } else {
      reader.fail("expected cost, time or end");
    }
  }
}

std::string TuningTable::to_text() const {
  std::string text = std::string(kFormat) + "\npycoll " + version + "\nmachine " + machine + "\n";
  for (const TunedCost& row : costs) {
    text += "cost " + std::to_string(row.num_ranks) + " " + std::to_string(row.num_cores) + " " +
            arrays_name(row.arrays) + " " + row.date + " " + row.protocol + " " +
            number_text(row.cost.alpha_s) + " " + number_text(row.cost.beta_s_per_byte) + " " +
            number_text(row.cost.gamma_s_per_byte) + "\n";
  }
  for (const TunedSize& row : sizes) {
    text += "time " + row.collective + " " + std::to_string(row.num_ranks) + " " +
            std::to_string(row.num_cores) + " " + arrays_name(row.arrays) + " " +
            std::to_string(row.nbytes) + " " + row.date;
    std::vector<TunedTime> times = row.times;
    sort_times(times);
    for (const TunedTime& time : times) text += " " + time.choice + "=" + number_text(time.time_s);
    text += "\n";
  }
  return text + "end " + digest_of(text) + "\n";
}

TunedAnswer TuningTable::at(std::string_view collective, int num_ranks, int num_cores,
                            Arrays arrays, int64_t nbytes) const {
  const TunedSize* below = nullptr;  // largest that is not above nbytes
  const TunedSize* above = nullptr;  // smallest that is not below
  for (const TunedSize& row : sizes) {
    if (row.collective != collective || row.num_ranks != num_ranks || row.num_cores != num_cores ||
        row.arrays != arrays) {
      continue;
    }
    if (row.nbytes <= nbytes && (below == nullptr || row.nbytes > below->nbytes)) below = &row;
    if (row.nbytes >= nbytes && (above == nullptr || row.nbytes < above->nbytes)) above = &row;
  }
  TunedAnswer answer;
  if (below == nullptr) below = above;
  if (above == nullptr) above = below;
  if (below == nullptr) return answer;
  answer.date = std::max(below->date, above->date);
  answer.below_nbytes = below->nbytes;
  answer.above_nbytes = above->nbytes;
  if (below == above) {
    answer.times = below->times;
  } else {
    const double share = std::log2(static_cast<double>(nbytes) / below->nbytes) /
                         std::log2(static_cast<double>(above->nbytes) / below->nbytes);
    for (const TunedTime& low : below->times) {
      for (const TunedTime& high : above->times) {
        if (low.choice != high.choice) continue;
        answer.times.push_back(
            {low.choice, std::pow(low.time_s, 1 - share) * std::pow(high.time_s, share)});
      }
    }
  }
  sort_times(answer.times);
  return answer;
}

const TunedCost* TuningTable::cost(std::string_view protocol, int num_ranks, int num_cores,
                                   Arrays arrays) const {
  const TunedCost* nearest = nullptr;
  const auto distance = [num_ranks](const TunedCost* row) {
    return std::abs(std::log2(static_cast<double>(row->num_ranks) / num_ranks));
  };
  for (const TunedCost& row : costs) {
    const bool same_load = (row.num_ranks > row.num_cores) == (num_ranks > num_cores);
    if (row.protocol != protocol || row.num_cores != num_cores || row.arrays != arrays ||
        !same_load) {
      continue;
    }
    if (nearest == nullptr || distance(&row) < distance(nearest)) nearest = &row;
  }
  return nearest;
}

}  // namespace pycoll

#include "perf/options.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "base/error.h"
#include "perf/sendrecv.h"

namespace pycoll::perf {
namespace {

struct Flag {
  std::string_view shorter;  // "-b"
  std::string_view longer;   // "--minbytes"
  std::string_view value;    // what stands in the help
  std::string_view help;
  std::function<void(Options&, std::string_view)> set;
};

[[noreturn]] void refuse(std::string_view what, std::string_view text, std::string_view expected) {
  throw UsageError(std::string(what) + " '" + std::string(text) + "': expected " +
                   std::string(expected));
}

int64_t parse_bytes(std::string_view text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  std::string_view unit(stop, static_cast<size_t>(end - stop));
  for (const std::string_view suffix : {"iB", "B"}) {
    if (unit.size() > suffix.size() && unit.ends_with(suffix)) unit.remove_suffix(suffix.size());
  }
  const std::string_view units = "KMGkmg";
  const size_t which = unit.empty() ? 0 : units.find(unit[0]) % 3 + 1;
  if (error != std::errc() || unit.size() > 1 || number < 0 || number > 1e15 ||
      (!unit.empty() && units.find(unit[0]) == units.npos)) {
    refuse("size", text, "bytes such as 8, 64K or 128M");
  }
  return static_cast<int64_t>(number * static_cast<double>(int64_t{1} << (10 * which)));
}

int parse_int(std::string_view text, int least, int most) {
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < least || value > most) {
    refuse("number", text, std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

constexpr int kMost = 1'000'000'000;

/// nccl-tests' names beside this library's.
std::string_view own_name(std::string_view name) {
  constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
      {"float", "f32"},   {"double", "f64"},  {"half", "f16"},         {"bfloat16", "bf16"},
      {"int8", "i8"},     {"uint8", "u8"},    {"int32", "i32"},        {"uint32", "u32"},
      {"int64", "i64"},   {"uint64", "u64"},  {"fp8_e4m3", "f8_e4m3"}, {"fp8_e5m2", "f8_e5m2"},
      {"float32", "f32"}, {"float64", "f64"}, {"float16", "f16"},
  };
  for (const auto& [alias, own] : kAliases) {
    if (name == alias) return own;
  }
  return name;
}

std::vector<DType> parse_dtypes(std::string_view text) {
  std::vector<DType> all;
  std::string known = "all";
  for (int d = 0; d < kNumDTypes; ++d) {
    all.push_back(static_cast<DType>(d));
    known += ", " + std::string(dtype_name(all.back()));
  }
  if (text == "all") return all;
  const auto found = find_dtype(own_name(text));
  if (!found) refuse("dtype", text, "one of " + known);
  return {*found};
}

std::vector<Op> parse_ops(std::string_view text) {
  std::vector<Op> all;
  std::string known = "all";
  for (int o = 0; o < kNumOps; ++o) {
    all.push_back(static_cast<Op>(o));
    known += ", " + std::string(op_name(all.back()));
  }
  if (text == "all") return all;
  const auto found = find_op(text);
  if (!found) refuse("op", text, "one of " + known);
  return {*found};
}

void set_ranks(Options& o, RanksAre what, std::string_view text) {
  if (o.ranks_are == RanksAre::kThreads || what == RanksAre::kThreads) {
    o.ranks_are = what;  // the last one of -r and -t counts
  }
  o.num_ranks = parse_int(text, 1, 64);
}

std::vector<Flag> flags(const CollectiveInfo& collective) {
  using Text = std::string_view;
  std::vector<Flag> table = {
      {"-b", "--minbytes", "SIZE", "smallest message; K, M and G are units of 1024 (32M)",
       [](Options& o, Text t) { o.min_bytes = parse_bytes(t); }},
      {"-e", "--maxbytes", "SIZE", "largest message (32M)",
       [](Options& o, Text t) { o.max_bytes = parse_bytes(t); }},
      {"-i", "--stepbytes", "SIZE", "difference between sizes (1M)",
       [](Options& o, Text t) { o.step_bytes = parse_bytes(t); }},
      {"-f", "--stepfactor", "N", "factor between sizes, instead of -i",
       [](Options& o, Text t) { o.step_factor = parse_int(t, 2, kMost); }},
      {"-n", "--iters", "N", "calls of a timed block (as many as take 2 ms)",
       [](Options& o, Text t) { o.iters = parse_int(t, 1, kMost); }},
      {"-N", "--blocks", "N", "timed blocks, at most (40)",
       [](Options& o, Text t) { o.num_blocks = parse_int(t, 1, kMost); }},
      {"-w", "--warmup_iters", "N", "calls before all blocks (10)",
       [](Options& o, Text t) { o.warmup_iters = parse_int(t, 0, kMost); }},
      {"-c", "--check", "0|1", "compare the result with the exact one, outside the timed calls (1)",
       [](Options& o, Text t) { o.check = parse_int(t, 0, kMost) != 0; }},
      {"-d", "--datatype", "TYPE", "f32, bf16, ...; nccl-tests' names too; or all (f32)",
       [](Options& o, Text t) { o.dtypes = parse_dtypes(t); }},
      {"-r", "--ranks", "N", "ranks that are processes of this host (2); a launcher's count first",
       [](Options& o, Text t) { set_ranks(o, RanksAre::kProcesses, t); }},
      {"-t", "--nthreads", "N", "ranks that are threads of one process, instead of -r",
       [](Options& o, Text t) { set_ranks(o, RanksAre::kThreads, t); }},
      {"-z", "--blocking", "0|1",
       "1: each call on the caller's thread; 0: queued, then waited for (1)",
       [](Options& o, Text t) { o.blocking = parse_int(t, 0, 1) != 0; }},
      {"-R", "--local_register", "0|1", "buffers in memory that the peers reach (from 64 KiB on)",
       [](Options& o, Text t) { o.registered = parse_int(t, 0, 2) != 0; }},
      {"-g", "--gpus", "N", "arrays on N devices, dealt to the ranks in turn; 0: on the host (0)",
       [](Options& o, Text t) { o.num_devices = parse_int(t, 0, 64); }},
      {"-p", "--pin", "0|1", "one core per rank, unless a launcher started them (1)",
       [](Options& o, Text t) { o.pinned = parse_int(t, 0, 1) != 0; }},
      {"-T", "--timeout", "SECONDS", "of joining and of each call (60)",
       [](Options& o, Text t) { o.timeout_s = parse_int(t, 1, kMost); }},
      {"-J", "--json", "FILE", "the figures, with medians and minima, as JSON",
       [](Options& o, Text t) { o.json_path = t; }},
  };
  if (collective.id != kSendRecv) {  // a message has no schedule
    table.push_back({"-a", "--algorithm", "NAME", "ring, ring/ll, ...; without it pycoll chooses",
                     [](Options& o, Text t) { o.algorithm = t; }});
  }
  if (collective.has_op) {
    table.push_back({"-o", "--op", "OP", "sum, max, ...; or all (sum)",
                     [](Options& o, Text t) { o.ops = parse_ops(t); }});
  }
  if (collective.has_root) {
    table.push_back(
        {"", "--root", "RANK", "(0)", [](Options& o, Text t) { o.root = parse_int(t, 0, 63); }});
  }
  return table;
}

[[noreturn]] void print_help(const CollectiveInfo& collective) {
  const std::string name = std::string(collective.name) + "_perf";
  std::printf("%s: time and bandwidth of %s, with the flags and columns of nccl-tests.\n\n",
              name.c_str(), collective.name.data());
  for (const Flag& flag : flags(collective)) {
    std::string names = std::string(flag.shorter) + (flag.shorter.empty() ? "    " : ", ") +
                        std::string(flag.longer) + " " + std::string(flag.value);
    std::printf("  %-30s %s\n", names.c_str(), flag.help.data());
  }
  std::printf("  %-30s this\n\nExamples\n", "-h, --help");
  const char* n = name.c_str();
  std::printf("  %s -b 8 -e 128M -f 4                  2 processes on this host\n", n);
  std::printf("  %s -b 1K -e 1M -f 2 -t 4 -d bf16      4 threads\n", n);
  std::printf("  %s -b 8 -e 256M -f 4 -t 8 -g 1        8 threads on one GPU\n", n);
  std::printf("  mpiexec -n 4 %s -b 1M -e 1M -J out.json\n", n);
  std::exit(0);
}

/// Whether a launcher has named the ranks.
bool launched() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return std::getenv("SLURM_STEP_ID") != nullptr && std::getenv("SLURM_PROCID") != nullptr;
}

}  // namespace

std::vector<int64_t> sizes(const Options& options) {
  std::vector<int64_t> found;
  for (int64_t nbytes = options.min_bytes; nbytes <= options.max_bytes;) {
    found.push_back(nbytes);
    nbytes = options.step_factor > 0 ? nbytes * options.step_factor : nbytes + options.step_bytes;
  }
  return found;
}

Options parse_options(const CollectiveInfo& collective, int argc, char** argv) {
  Options options;
  const auto table = flags(collective);
  for (int i = 1; i < argc; ++i) {
    std::string_view word = argv[i];
    if (word == "-h" || word == "--help") print_help(collective);
    std::string_view text;
    const size_t equals = word.starts_with("--") ? word.find('=') : word.npos;
    const bool attached = equals != word.npos;
    if (attached) {
      text = word.substr(equals + 1);
      word = word.substr(0, equals);
    }
    const Flag* found = nullptr;
    for (const Flag& flag : table) {
      if (word == flag.longer || (!flag.shorter.empty() && word == flag.shorter)) found = &flag;
    }
    if (found == nullptr) {
      throw UsageError("no flag is called '" + std::string(word) + "': -h lists them");
    }
    if (!attached) {
      if (i + 1 == argc) {
        throw UsageError(std::string(word) + " needs a value: " + std::string(found->value));
      }
      text = argv[++i];
    }
    try {
      found->set(options, text);
    } catch (const UsageError& error) {
      throw UsageError(std::string(word) + ": " + error.what());
    }
  }
  if (options.step_factor == 0 && options.step_bytes <= 0) {
    throw UsageError("-i: expected more than 0 bytes");
  }
  if (options.step_factor > 0 && options.min_bytes == 0) {
    throw UsageError("-b 0 with -f: no factor leads away from 0, use -i");
  }
  if (options.max_bytes < options.min_bytes) {
    throw UsageError("-e: the largest message is smaller than the smallest one, -b");
  }
  if (options.num_devices > 0 && (collective.id == kSendRecv || !options.blocking)) {
    throw UsageError("-g: messages and queued calls (-z 0) are measured on the CPU only");
  }
  if (launched()) options.ranks_are = RanksAre::kLaunched;
  if (options.ranks_are != RanksAre::kLaunched && options.root >= options.num_ranks) {
    throw UsageError("--root " + std::to_string(options.root) + ": there are " +
                     std::to_string(options.num_ranks) + " ranks");
  }
  return options;
}

}  // namespace pycoll::perf

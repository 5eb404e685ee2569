// Frames of a hostile rank of another host, against the links, the proxy and the message engine of
// a rank: first known attacks one by one, then mutated frames by seed.
//
//   frame_check [NUM_FRAMES [FIRST_SEED]]   the attacks, then so many mutated frames
//   frame_check case SEED                   one case again
//   frame_check attack NAME                 one attack again
//
// A frame may end the link of its sender. It must not end the process, change a byte outside the
// receives that its messages match, or make this rank's texts unreadable; and a valid frame must
// not end its link.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>

#include "executor/wait/describe.h"
#include "frame_attacks.h"

namespace pycoll {
namespace {

constexpr int kFramesPerCase = 48;
constexpr unsigned kAttackSeconds = 60;
constexpr int kMaxFailures = 10;

/// What a child process tells its parent, which reports it if the child crashes.
struct Progress {
  char current[128];
  int num_cases;
  int num_frames;
  int num_failures;
};

/// Makes the texts that errors contain, and returns whether all are readable.
bool describes_everything(FrameWorld& world) {
  Segment& segment = world.segment();
  std::string text;
  for (const int rank : {1, 2}) {
    text += describe_last(segment, rank) + describe_place(segment, rank, 1);
    for (uint64_t sequence = 1; sequence < 4; ++sequence) {
      CallRecord record;
      if (!segment.records(rank).read(sequence, &record)) continue;
      text += describe_operation(record) + describe_call(segment, rank, record);
    }
    text += describe_message_mismatch(segment.message_mismatch(rank), 0);
  }
  const Failure failure = Failure::unpack(load_acquire(segment.failure_word()));
  if (failure.code != FailureCode::kNone) {
    text += describe_failed_message(segment, failure);
    failure_to_bytes(segment);
  }
  for (const char c : text) {
    if (static_cast<uint8_t>(c) < 0x20) return false;
  }
  return true;
}

std::string judge(FrameWorld& world) {
  const std::string damage = world.damage();
  if (!damage.empty()) return damage;
  return describes_everything(world) ? "" : "a text has control characters";
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t word() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  size_t below(size_t n) { return static_cast<size_t>(word() % n); }
  bool one_in(size_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

/// A value near the limits of what code computes with, or near the present one.
uint64_t odd_value(Random& random, uint64_t now) {
  constexpr uint64_t kOne = 1;
  const uint64_t values[] = {0,
                             1,
                             ~uint64_t{0},
                             0x7fffffff,
                             0x80000000,
                             0xffffffff,
                             kOne << 46,
                             (kOne << 62) - 1,
                             kOne << 63,
                             now + 1,
                             now - 1,
                             now + 64,
                             now ^ (kOne << random.below(64)),
                             random.below(256),
                             random.below(100'000),
                             random.word()};
  return values[random.below(std::size(values))];
}

void mutate_at(Random& random, std::byte* bytes, size_t size) {
  const size_t widths[] = {1, 2, 4, 8};
  const size_t width = std::min(size, widths[random.below(4)]);
  if (width == 0) return;
  const size_t at = random.below(size / width) * width;
  uint64_t value = 0;
  std::memcpy(&value, bytes + at, width);
  value = odd_value(random, value);
  std::memcpy(bytes + at, &value, width);
}

void mutate(Random& random, Frame& frame) {
  auto* header = reinterpret_cast<std::byte*>(&frame.header);
  auto* payload = reinterpret_cast<std::byte*>(frame.payload.data());
  switch (random.below(8)) {
    case 0:
    case 1:
      return mutate_at(random, header, sizeof(frame.header));
    case 2:
    case 3:  // the header of a message, or the start of a state
      return mutate_at(random, payload, std::min<size_t>(frame.payload.size(), 64));
    case 4:
      return mutate_at(random, payload, frame.payload.size());
    case 5:
      frame.payload.resize(random.one_in(2) ? random.below(300) : random.below(130'000), 'm');
      if (random.one_in(2)) frame.payload.resize(frame.payload.size() / 64 * 64);
      frame.header.nbytes = static_cast<uint32_t>(frame.payload.size());
      return;
    case 6:
      frame.header.nbytes = static_cast<uint32_t>(odd_value(random, frame.header.nbytes));
      return;
    default:
      frame.header.kind = static_cast<FrameKind>(random.below(12));
  }
}

/// A frame that this sender may send now.
Frame make_frame(Random& random, FrameWorld& world, FrameSender& sender) {
  const auto lines_or_skip = [&](Frame frame) {
    const uint64_t num_lines = frame.payload.size() / sizeof(MessageHeader);
    if (num_lines > sender.lines_to_end()) frame = sender.skip();
    MessageHeader header;
    std::memcpy(&header, frame.payload.data(), sizeof(header));
    return sender.has_room(header.num_lines) ? frame : sender.frame(FrameKind::kCredit);
  };
  switch (random.below(16)) {
    case 0:
    case 1: {
      const auto protocol = static_cast<ProtocolKind>(random.below(kNumSlotProtocols));
      const RingMemory ring = world.segment().ring(protocol, sender.rank(), 0);
      const Frame frame = sender.slot(protocol, random.below(7000));
      const auto unread = static_cast<uint32_t>(frame.header.sequence - ring.heads[0].value);
      return unread <= static_cast<uint32_t>(ring.num_slots) ? frame
                                                             : sender.frame(FrameKind::kCredit);
    }
    case 2:
    case 3: {
      const std::pair<size_t, int32_t> matching[] = {{24, 0}, {3000, 1}, {500, 3}};
      const auto [nbytes, tag] = matching[sender.rank() == 1 ? random.below(3) : 2];
      return lines_or_skip(sender.eager(nbytes, tag));
    }
    case 4:
      return lines_or_skip(sender.eager(random.below(2000), 50));
    case 5:
    case 6:
      return lines_or_skip(sender.announce(sender.rank() == 1 ? 100'000 : 70'000, 2));
    case 7:
      return lines_or_skip(sender.announce(1 + random.below(200'000), 60));
    case 8:
    case 9:
    case 10: {
      if (sender.pulls.empty()) return sender.mail();
      FrameSender::Pull& pull = sender.pulls[random.below(sender.pulls.size())];
      const size_t nbytes = std::min<size_t>(pull.nbytes - pull.moved, 1 + random.below(32'768));
      const Frame frame =
          lines_or_skip(sender.part(pull.send_id, pull.recv_id, pull.moved, nbytes));
      if (frame.payload.size() > sizeof(MessageHeader)) pull.moved += nbytes;
      std::erase_if(sender.pulls, [](const auto& one) { return one.moved == one.nbytes; });
      return frame;
    }
    case 11:
    case 12: {
      if (sender.sends_to_me.empty()) return sender.mail();
      const auto kind = random.one_in(2) ? MessageKind::kTaken : MessageKind::kPull;
      const Frame frame = lines_or_skip(sender.answer(kind, sender.sends_to_me.front()));
      const bool is_answer =
          frame.header.kind == FrameKind::kLines && frame.payload[22] == static_cast<char>(kind);
      if (is_answer) sender.sends_to_me.erase(sender.sends_to_me.begin());
      return frame;
    }
    case 13:
      return sender.state(random.one_in(2) ? FrameKind::kAsk : FrameKind::kTell);
    case 14:
      if (random.one_in(8)) return sender.failure(static_cast<FailureCode>(1 + random.below(6)));
      return sender.frame(random.one_in(8) ? FrameKind::kLeft : FrameKind::kJoin);
    default:
      return sender.mail();
  }
}

/// One world, and frames until it is broken. Returns what is wrong, or nothing.
std::string run_case(uint64_t seed, int max_frames, int* num_frames) {
  Random random(seed);
  std::unique_ptr<FrameNetwork> network = random.one_in(4) ? make_mpi_network() : nullptr;
  const bool in_messages = network != nullptr;
  if (network == nullptr) network = std::make_unique<SocketNetwork>();
  FrameWorld world(*network);
  FrameSender one(world, 1);
  FrameSender two(world, 2);
  bool is_hostile[kNumRanks] = {};
  one.receive();
  two.receive();
  for (int i = 0; i < max_frames && !world.is_broken(); ++i) {
    FrameSender& sender = world.is_closed(1) || random.one_in(3) ? two : one;
    const int rank = sender.rank();
    if (world.is_closed(rank)) break;
    Frame frame = make_frame(random, world, sender);
    const bool mutates = random.one_in(4);
    is_hostile[rank] = is_hostile[rank] || mutates;
    for (size_t times = mutates ? 1 + random.below(2) : 0; times > 0; --times) {
      mutate(random, frame);
    }
    std::string bytes = frame.bytes();
    if (mutates && in_messages && random.one_in(4)) bytes.resize(random.below(200'000));
    const size_t cut = in_messages || random.one_in(2) ? 0 : random.below(bytes.size() + 1);
    if (cut != 0) world.deliver(rank, bytes.substr(0, cut));
    world.deliver(rank, bytes.substr(cut));
    sender.count(frame);
    sender.receive();
    ++*num_frames;
    if (random.one_in(4)) world.use_slots(rank);
    if (random.one_in(4)) world.buffer_announced();
    if (random.one_in(4)) world.repost();
    if (random.one_in(32)) {
      Frame of_four = one.frame(static_cast<FrameKind>(random.below(10)));
      mutate(random, of_four);
      world.deliver(4, of_four.bytes());
    }
    const std::string wrong = judge(world);
    if (!wrong.empty()) return wrong + ", after frame " + std::to_string(i);
    for (const int peer : {1, 2}) {
      if (world.is_closed(peer) && !is_hostile[peer]) {
        return "frame " + std::to_string(i) + " ended the link of rank " + std::to_string(peer) +
               ", whose frames were all valid";
      }
    }
  }
  return "";
}

std::string run_attack(const Attack& attack) {
  std::unique_ptr<FrameNetwork> network = std::make_unique<SocketNetwork>();
  if (attack.over_mpi) network = make_mpi_network();
  if (network == nullptr) return "";  // this build has no MPI
  FrameWorld world(*network);
  FrameSender one(world, 1);
  FrameSender two(world, 2);
  const std::string wrong = attack.run(world, one, two);
  const std::string damage = judge(world);
  return wrong.empty() ? damage : wrong;
}

/// Runs `work` in a process of its own, for at most `seconds`. Returns whether it ended well.
template <class Work>
bool run_apart(Progress& progress, unsigned seconds, Work&& work) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(seconds);
    work();
    std::exit(0);  // with the check for leaks
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (status == 0) return true;
  ++progress.num_failures;
  std::fprintf(stderr, "FAILED: status %#x; again with: frame_check %s\n",
               static_cast<unsigned>(status), progress.current);
  return false;
}

void run_attacks(Progress& progress, const std::string& only) {
  for (const Attack& attack : attacks()) {
    if (!only.empty() && only != attack.name) continue;
    std::snprintf(progress.current, sizeof(progress.current), "attack \"%s\"", attack.name);
    run_apart(progress, kAttackSeconds, [&] {
      const std::string wrong = run_attack(attack);
      if (wrong.empty()) return;
      ++progress.num_failures;
      std::fprintf(stderr, "FAILED: %s: %s\n", attack.name, wrong.c_str());
    });
  }
}

void run_cases(Progress& progress, int num_frames, uint64_t first_seed) {
  run_apart(progress, /*seconds=*/0, [&] {
    for (uint64_t seed = first_seed; progress.num_frames < num_frames; ++seed) {
      if (progress.num_failures >= kMaxFailures) return;
      std::snprintf(progress.current, sizeof(progress.current), "case %llu",
                    static_cast<unsigned long long>(seed));
      const std::string wrong = run_case(seed, kFramesPerCase, &progress.num_frames);
      ++progress.num_cases;
      if (wrong.empty()) continue;
      ++progress.num_failures;
      std::fprintf(stderr, "FAILED: %s; again with: frame_check %s\n", wrong.c_str(),
                   progress.current);
    }
  });
}

int check(int argc, char** argv) {
  const Mapping shared(-1, sizeof(Progress));
  auto& progress = *new (shared.base()) Progress{};
  const std::string command = argc > 1 ? argv[1] : "20000";
  const auto number = [&](int at, uint64_t otherwise) {
    return argc > at ? std::strtoull(argv[at], nullptr, 10) : otherwise;
  };
  if (command == "case") {
    run_cases(progress, 1, number(2, 1));
  } else {
    const bool is_attack = command == "attack";
    run_attacks(progress, is_attack && argc > 2 ? argv[2] : "");
    if (!is_attack) run_cases(progress, static_cast<int>(number(1, 20'000)), number(2, 1));
  }
  std::printf("%d frames in %d cases, %zu attacks, %d failures\n", progress.num_frames,
              progress.num_cases, attacks().size(), progress.num_failures);
  return progress.num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) { return pycoll::check(argc, argv); }

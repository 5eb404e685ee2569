#include "plan/place.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace pycoll {
namespace {

constexpr int kNowhere = -1;

class Placer {
 public:
  Placer(const Schedule& schedule, Program& program, const std::vector<bool>& written_by_peers)
      : schedule_(schedule),
        program_(program),
        written_by_peers_(written_by_peers),
        row_(info(schedule.collective)),
        pieces_(schedule.pieces_per_block()) {}

  std::optional<Placement> run() {
    store_sent_start_values();
    // Each failed attempt moves at least one block permanently, so the loop ends.
    while (!attempt()) {
      if (stuck_) return std::nullopt;
    }
    return std::move(placement_);
  }

 private:
  int block_of(int chunk) const { return chunk / pieces_; }
  int last_block_of(const Step& step) const {
    return block_of(step.first_chunk + step.num_chunks - 1);
  }
  BlockAt at(int block) const { return {program_.rank, block, program_.num_ranks, schedule_.root}; }
  bool has_goal(int block) const { return row_.goal(at(block)).kind != Goal::Kind::kAny; }

  /// Index of the block in that buffer; kNoBlock when it is not there.
  int index_in(BufferKind buffer, int block) const {
    if (buffer == BufferKind::kInput) return row_.input_block(at(block));
    if (buffer == BufferKind::kOutput) return row_.output_block(at(block));
    const auto found = scratch_index_.find(block);
    return found == scratch_index_.end() ? kNoBlock : found->second;
  }
  /// First index of a range of blocks that are contiguous in that buffer; else kNoBlock.
  int index_of_range(BufferKind buffer, int first, int last) const {
    const int index = index_in(buffer, first);
    for (int block = first; index != kNoBlock && block <= last; ++block) {
      if (index_in(buffer, block) != index + block - first) return kNoBlock;
    }
    return index;
  }

  /// Finds start values of this rank that its output needs and that no step writes. The step that
  /// sends such a value stores it too, since it reads it anyway.
  void store_sent_start_values() {
    std::vector<bool> written(static_cast<size_t>(schedule_.num_chunks));
    for (const Step& step : program_.steps) {
      if (step.has(kWriteLocal)) {
        std::fill_n(written.begin() + step.first_chunk, step.num_chunks, true);
      }
    }
    for (Step& step : program_.steps) {
      if (!step.has(kReadLocal) || step.has(kWriteLocal) || step.src_peers != 0) continue;
      bool wanted = true;
      for (int chunk = step.first_chunk; chunk < step.chunks().end(); ++chunk) {
        wanted = wanted && !written[static_cast<size_t>(chunk)] && has_goal(block_of(chunk));
      }
      if (!wanted) continue;
      step.flags |= kWriteLocal;
      std::fill_n(written.begin() + step.first_chunk, step.num_chunks, true);
    }
  }

  /// Puts blocks that a step writes and that have no place in the output into scratch.
  void choose_scratch() {
    std::set<int> blocks = kept_in_scratch_;
    for (const Step& step : program_.steps) {
      if (step.has(kWriteLocal) && target_of(step) == BufferKind::kScratch) {
        for (int b = block_of(step.first_chunk); b <= last_block_of(step); ++b) blocks.insert(b);
      }
    }
    scratch_index_.clear();
    placement_.scratch.assign(blocks.begin(), blocks.end());
    for (int block : blocks) {
      const int index = static_cast<int>(scratch_index_.size());
      scratch_index_[block] = index;
    }
  }

  BufferKind target_of(const Step& step) const {
    const int first = block_of(step.first_chunk);
    const int last = last_block_of(step);
    for (int block = first; block <= last; ++block) {
      if (kept_in_scratch_.count(block) != 0) return BufferKind::kScratch;
    }
    return index_of_range(BufferKind::kOutput, first, last) == kNoBlock ? BufferKind::kScratch
                                                                        : BufferKind::kOutput;
  }

  bool attempt() {
    placement_ = {};
    placement_.num_pieces = pieces_;
    choose_scratch();
    std::vector<int> where(static_cast<size_t>(schedule_.num_chunks), kNowhere);
    for (int chunk = 0; chunk < schedule_.num_chunks; ++chunk) {
      const int block = block_of(chunk);
      const auto loaded = loaded_.find(block);
      if (!written_by_peers_.empty() && written_by_peers_[static_cast<size_t>(chunk)]) {
        where[chunk] = static_cast<int>(BufferKind::kOutput);
      } else if (loaded != loaded_.end()) {
        where[chunk] = static_cast<int>(loaded->second);
      } else if (row_.starts_with_value(at(block))) {
        where[chunk] = static_cast<int>(BufferKind::kInput);
      }
    }
    for (const auto& [block, buffer] : loaded_) add_copy(placement_.before, block, buffer);
    std::vector<std::pair<ChunkRange, int>> written;  // in this phase, and to which buffer
    const auto end_phase = [&] {
      for (const auto& [chunks, buffer] : written) {
        std::fill_n(where.begin() + chunks.first, chunks.count, buffer);
      }
      written.clear();
    };
    for (const Step& step : program_.steps) {
      if (!step.has(kSamePhase)) end_phase();
      StepPlace place;
      const int first = block_of(step.first_chunk);
      const int last = last_block_of(step);
      place.block = first;
      place.first_piece = step.first_chunk - first * pieces_;
      if (first != last) placement_.spans_blocks = true;
      if (step.has(kReadLocal)) {
        const auto begin = where.begin() + step.first_chunk;
        if (!is_uniform(begin, begin + step.num_chunks)) return reconcile(step, where);
        place.src = static_cast<BufferKind>(*begin);
        place.src_index = index_of_range(place.src, first, last);
        if (place.src_index == kNoBlock) return give_up();
      }
      if (step.has(kWriteLocal)) {
        place.dst = target_of(step);
        place.dst_index = index_of_range(place.dst, first, last);
        if (place.dst_index == kNoBlock) return give_up();
        written.emplace_back(step.chunks(), static_cast<int>(place.dst));
      }
      placement_.steps.push_back(place);
    }
    end_phase();
    return finish(where);
  }

  template <class Iterator>
  static bool is_uniform(Iterator begin, Iterator end) {
    return std::all_of(begin, end, [begin](int value) { return value == *begin; });
  }

  /// Handles a range whose chunks are in different buffers: either those from the input are copied
  /// to the others at the start, or all are kept in scratch.
  bool reconcile(const Step& step, const std::vector<int>& where) {
    const size_t before = loaded_.size() + kept_in_scratch_.size();
    int written = kNowhere;
    bool mixed = false;
    for (int chunk = step.first_chunk; chunk < step.chunks().end(); ++chunk) {
      const int here = where[chunk];
      if (here == static_cast<int>(BufferKind::kInput)) continue;
      mixed = mixed || (written != kNowhere && here != written);
      written = here;
    }
    for (int chunk = step.first_chunk; chunk < step.chunks().end(); ++chunk) {
      if (mixed) {
        kept_in_scratch_.insert(block_of(chunk));
      } else if (where[chunk] == static_cast<int>(BufferKind::kInput)) {
        const auto buffer = static_cast<BufferKind>(written);
        loaded_[block_of(chunk)] = buffer;
        if (buffer == BufferKind::kScratch) kept_in_scratch_.insert(block_of(chunk));
      }
    }
    for (auto& [block, buffer] : loaded_) {
      if (kept_in_scratch_.count(block) != 0) buffer = BufferKind::kScratch;
    }
    stuck_ = loaded_.size() + kept_in_scratch_.size() == before;
    return false;
  }
  bool give_up() {
    stuck_ = true;
    return false;
  }

  bool finish(const std::vector<int>& where) {
    const int num_blocks = schedule_.num_chunks / pieces_;
    for (int block = 0; block < num_blocks; ++block) {
      if (!has_goal(block)) continue;
      const auto begin = where.begin() + block * pieces_;
      if (!is_uniform(begin, begin + pieces_)) {
        // Some pieces of the block were written: the rest must be in the output, too.
        if (!loaded_.try_emplace(block, BufferKind::kOutput).second) return give_up();
        return false;
      }
      if (*begin == static_cast<int>(BufferKind::kInput)) {
        add_copy(placement_.any_time, block, BufferKind::kOutput);
      } else if (*begin == static_cast<int>(BufferKind::kScratch)) {
        placement_.after.push_back({block, BufferKind::kScratch, BufferKind::kOutput,
                                    index_in(BufferKind::kScratch, block),
                                    index_in(BufferKind::kOutput, block)});
      }
    }
    return true;
  }

  void add_copy(std::vector<BlockCopy>& copies, int block, BufferKind to) const {
    copies.push_back(
        {block, BufferKind::kInput, to, index_in(BufferKind::kInput, block), index_in(to, block)});
  }

  const Schedule& schedule_;
  Program& program_;
  const std::vector<bool>& written_by_peers_;
  const CollectiveInfo& row_;
  const int pieces_;
  std::map<int, BufferKind> loaded_;  // blocks copied from the input before the program starts
  std::set<int> kept_in_scratch_;
  std::map<int, int> scratch_index_;
  Placement placement_;
  bool stuck_ = false;
};

}  // namespace

std::optional<Placement> place_chunks(const Schedule& schedule, Program& program,
                                      const std::vector<bool>& written_by_peers) {
  return Placer(schedule, program, written_by_peers).run();
}

}  // namespace pycoll

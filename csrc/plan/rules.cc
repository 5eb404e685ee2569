#include "plan/rules.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>

#include "base/error.h"
#include "base/printable.h"

namespace pycoll {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(separator);
    parts.push_back(trimmed(text.substr(0, end)));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool starts_with_digit(std::string_view text) {
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text.front())) != 0;
}

/// All pieces are views into one text, so that an error can point to them.
class Parser {
 public:
  Parser(std::string_view text, std::string_view name) : text_(text), name_(name) {}

  std::vector<Rule> run() {
    std::vector<Rule> rules;
    std::vector<std::string_view> pieces = split(text_, ';');
    if (pieces.back().empty()) pieces.pop_back();
    for (std::string_view piece : pieces) rules.push_back(parse_rule(piece));
    return rules;
  }

 private:
  Rule parse_rule(std::string_view piece) {
    if (piece.empty()) fail(piece, "a rule is empty");
    std::vector<std::string_view> words = split(piece, ':');
    Rule rule;
    rule.text = piece;
    // all_to_all is both a collective and an algorithm, so the position of a word decides: only a
    // range begins with a digit, and only a collective precedes another word.
    if (words.size() > 1 && starts_with_digit(words.back())) {
      parse_range(words.back(), rule);
      words.pop_back();
    }
    if (words.size() > 2) {
      fail(words[2], "expected a range such as 0-64k here, or ';' before the next rule");
    }
    if (words.size() == 2) collective_ = parse_collective(words.front());
    if (!collective_) {
      fail(words.front(), "the first rule must name its collective, as in all_reduce:ring");
    }
    rule.collective = *collective_;
    parse_choice(words.back(), rule);
    return rule;
  }

  Collective parse_collective(std::string_view word) const {
    std::string known;
    for (const CollectiveInfo& row : collectives()) {
      if (row.id == Collective::kBarrier) continue;
      if (row.name == word) return row.id;
      known += (known.empty() ? "" : ", ") + std::string(row.name);
    }
    if (word == info(Collective::kBarrier).name) {
      fail(word, "a barrier runs as an all_reduce of 1 byte: write a rule for all_reduce");
    }
    fail(word, "no collective has this name; expected one of " + known);
  }

  void parse_choice(std::string_view word, Rule& rule) const {
    const std::vector<std::string_view> words = split(word, '/');
    if (words.size() > 2) fail(words[2], "expected ALGORITHM or ALGORITHM/PROTOCOL");
    if (words.front() != "auto") {
      rule.algorithm = words.front();
      // The algorithm's existence is checked when a message needs it: algorithms of Python are
      // registered after the rules are read.
      if (words.front().empty()) fail(word, "expected an algorithm, or auto, before '/' or ':'");
    }
    if (words.size() == 1) return;
    rule.protocol = find_protocol(words.back());
    if (!rule.protocol) {
      fail(words.back(),
           "no protocol has this name; expected one of " + std::string(protocol_names()));
    }
  }

  void parse_range(std::string_view word, Rule& rule) const {
    const std::vector<std::string_view> ends = split(word, '-');
    if (ends.size() != 2) fail(word, "expected a range such as 0-64k or 64k-max");
    rule.first_nbytes = parse_size(ends.front());
    if (ends.back() != "max") rule.last_nbytes = parse_size(ends.back());
    if (rule.first_nbytes >= rule.last_nbytes) {
      fail(word, "this range holds no size: its end must be above its start");
    }
  }

  int64_t parse_size(std::string_view word) const {
    constexpr std::string_view kUnits = "kmg";
    std::string_view digits = word;
    int shift = 0;
    if (!word.empty()) {
      const auto unit =
          kUnits.find(static_cast<char>(std::tolower(static_cast<unsigned char>(word.back()))));
      if (unit != std::string_view::npos) {
        shift = 10 * (static_cast<int>(unit) + 1);
        digits.remove_suffix(1);
      }
    }
    int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), value);
    if (error == std::errc::result_out_of_range || value > (INT64_MAX >> shift)) {
      fail(word, "this size is too large");
    }
    if (error != std::errc() || end != digits.end() || value < 0) {
      fail(word, "expected a size in bytes such as 0, 4096, 64k, 2m or 1g");
    }
    return value << shift;
  }

  [[noreturn]] void fail(std::string_view piece, const std::string& why) const {
    const auto column = static_cast<size_t>(piece.data() - text_.data());
    const size_t begin = column > kShownBytes / 2 ? column - kShownBytes / 2 : 0;
    std::string shown(text_.substr(begin, kShownBytes));
    for (char& letter : shown) {
      if (letter < 0x20 || letter == 0x7f) letter = '?';
    }
    std::string marks = std::string(column - begin, ' ') + "^";
    const size_t end = std::min(column + piece.size(), begin + shown.size());
    if (end > column + 1) marks += std::string(end - column - 1, '~');
    throw UsageError(std::string(name_) + ": " + why + "\n  " + shown + "\n  " + marks);
  }

  std::string_view text_;
  std::string_view name_;
  std::optional<Collective> collective_;
};

}  // namespace

Rules Rules::parse(std::string_view text, std::string_view name) {
  Rules rules;
  if (!trimmed(text).empty()) rules.rules_ = Parser(text, name).run();
  return rules;
}

const Rule* Rules::find(Collective collective, int64_t nbytes) const {
  for (const Rule& rule : rules_) {
    if (rule.collective == collective && rule.first_nbytes <= nbytes && nbytes < rule.last_nbytes) {
      return &rule;
    }
  }
  return nullptr;
}

bool Rules::agree_between(Collective collective, int64_t first_nbytes, int64_t last_nbytes) const {
  const auto inside = [&](int64_t border) {
    return first_nbytes < border && border <= last_nbytes;
  };
  return std::none_of(rules_.begin(), rules_.end(), [&](const Rule& rule) {
    return rule.collective == collective && (inside(rule.first_nbytes) || inside(rule.last_nbytes));
  });
}

}  // namespace pycoll
